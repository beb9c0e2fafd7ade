// The bar that plays: a button, a slider, the step as a number, the rate.

import { el, fill } from "./dom.js";
import { Cursor, RATES } from "./cursor.js";

/** A bar for a cursor, and the keys that go with it. */
export function player(cursor) {
  const slider = el("input", {
    type: "range",
    min: 0,
    max: Math.max(0, cursor.length - 1),
    value: cursor.step,
    "aria-label": "Step",
    class: "slider",
    oninput: () => cursor.go(Number(slider.value), { settled: false }),
    onchange: () => cursor.go(Number(slider.value)),
  });
  const at = el("input", {
    type: "number",
    min: 0,
    max: Math.max(0, cursor.length - 1),
    value: cursor.step,
    class: "at",
    "aria-label": "Go to step",
    onchange: () => cursor.by(Number(at.value) - cursor.step),
    onkeydown: (event) => event.key === "Enter" && at.blur(),
  });
  const play = el("button.play", { "aria-keyshortcuts": "Space", onclick: () => cursor.toggle() });
  const rate = el(
    "select",
    { "aria-label": "Steps a second", onchange: () => cursor.pace(Number(rate.value)) },
    RATES.map((one) => el("option", { value: one }, `${one}/s`)),
  );
  rate.value = String(cursor.rate);
  const state = (playing) => {
    fill(play, playing ? "❚❚" : "►");
    play.setAttribute("aria-label", playing ? "Pause" : "Play");
  };
  cursor.onplay = state;
  state(false);
  const show = (step) => {
    slider.value = step;
    slider.setAttribute("aria-valuetext", `step ${step} of ${cursor.length}`);
    if (document.activeElement !== at) at.value = step;
  };
  cursor.follow(show);
  show(cursor.step);
  return el(
    "div.player",
    { role: "group", "aria-label": "Player" },
    play,
    slider,
    at,
    el("span.quiet-text", `of ${cursor.length}`),
    rate,
  );
}

/** Keys that move a cursor. */
export function moves(cursor) {
  return [
    { keys: ["Space"], does: "play or pause", run: () => cursor.toggle() },
    { keys: ["ArrowRight"], does: "next step", run: () => cursor.by(1) },
    { keys: ["ArrowLeft"], does: "previous step", run: () => cursor.by(-1) },
    { keys: ["Shift+ArrowRight"], does: "ten steps on", run: () => cursor.by(10) },
    { keys: ["Shift+ArrowLeft"], does: "ten steps back", run: () => cursor.by(-10) },
    { keys: ["Home"], does: "first step", run: () => cursor.by(-cursor.length) },
    { keys: ["End"], does: "last step", run: () => cursor.by(cursor.length) },
  ];
}

export { Cursor };
