// The checkpoints of one run, over its steps: what each has, how much was new, where a session went on from an older one.

import { cut, el, svg } from "./dom.js";
import * as format from "./format.js";

const [WIDTH, HEIGHT, EDGE] = [640, 92, 12];
const MOST = 400; // marks; of more, the newest

/** saved: oldest first; picked: one of them; onpick(one). */
export function timeline(run, saved, picked, onpick) {
  const shown = saved.slice(-MOST);
  const most = Math.max(1, ...shown.map((one) => one.new.steps));
  const wide = (WIDTH - 2 * EDGE) / Math.max(1, shown.length);
  const at = (i) => EDGE + (i + 0.5) * wide;
  const marks = shown.flatMap((one, i) => _mark(one, i, at(i), wide, one.new.steps / most, one === picked, onpick));
  const arcs = shown.map((one, i) => _arc(one, i, shown, at)).filter(Boolean);
  const left = saved.length > shown.length ? `, the newest ${MOST}` : "";
  return el(
    "section.timeline",
    { "aria-label": `Checkpoints of run ${cut(run, 40)}` },
    el(
      "h2",
      `Run ${cut(run, 60)} `,
      el("span.quiet-text", `${format.counted(saved.length, "checkpoint")}${left}; bars: steps that were new`),
    ),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "marks" }, arcs, marks),
    el("div.ends", el("span", `step ${shown[0]?.step ?? "–"}`), el("span", `step ${shown.at(-1)?.step ?? "–"}`)),
  );
}

function _mark(one, i, x, wide, part, chosen, onpick) {
  const told = [
    `${one.name}, step ${one.step}, ${one.world_size} ranks`,
    one.whole ? "" : "partial",
    one.replay_saved ? "" : "without buffers",
    format.counted(one.new.steps, "new step"),
    one.tags.length ? `tags ${one.tags.join(", ")}` : "",
  ]
    .filter(Boolean)
    .join(", ");
  const tall = Math.max(2, 40 * part);
  const run = () => onpick(one);
  const kind = one.whole ? (one.replay_saved ? "whole" : "skipped") : "partial";
  const size = Math.max(2, Math.min(5, wide / 2));
  return [
    svg("rect", {
      x: x - Math.max(0.5, wide * 0.35),
      y: 84 - tall,
      width: Math.max(1, wide * 0.7),
      height: tall,
      class: chosen ? "new chosen" : "new",
    }),
    svg("circle", { cx: x, cy: 32, r: chosen ? size + 2 : size, class: `${kind}${chosen ? " chosen" : ""}` }),
    one.tags.length ? svg("path", { d: `M ${x} 22 l 4 -8 h -8 z`, class: "tagged" }) : null,
    svg(
      "rect",
      {
        x: x - wide / 2,
        y: 0,
        width: wide,
        height: HEIGHT,
        class: "press",
        role: "button",
        tabindex: wide >= 4 || chosen ? 0 : null,
        "aria-label": told,
        "aria-current": chosen ? "true" : null,
        onclick: run,
        onkeydown: (event) => {
          if (event.key === "Enter") {
            event.stopPropagation();
            run();
          }
        },
      },
      svg("title", told),
    ),
  ];
}

// from the checkpoint that a session went on from to its first one; one beside it needs no arc unless the ranks changed
function _arc(one, i, shown, at) {
  if (!one.resumed) return null;
  const from = shown.findIndex((other) => other.commit === one.resumed.commit);
  if (from < 0) return null;
  const [x0, x1] = [at(from), at(i)];
  const text = one.resumed.world_size === one.world_size ? "" : `${one.resumed.world_size}→${one.world_size}`;
  const high = Math.min(24, 10 + (x1 - x0) / 8);
  return svg(
    "g.arc",
    svg("path", { d: `M ${x0} 28 C ${x0} ${28 - high}, ${x1} ${28 - high}, ${x1} 28` }),
    text ? svg("text", { x: (x0 + x1) / 2, y: Math.max(9, 27 - high * 0.75), "text-anchor": "middle" }, text) : null,
    svg("title", `went on from ${one.resumed.name ?? `commit ${one.resumed.commit}`}`),
  );
}
