// Keys: each has a name and a purpose, which `?` lists. Nothing happens while one types into a field.

import { el, fill } from "./dom.js";

const layers = []; // what is on top comes first: a page's keys, then those of everywhere

/** Keys of a page: [{keys: ["ArrowRight"], does: "next step", run: f}]; returns what takes them away again. */
export function bind(title, list) {
  const layer = { title, list };
  layers.unshift(layer);
  return () => layers.splice(layers.indexOf(layer), 1);
}

function _name(event) {
  const shift = event.shiftKey && event.key.length > 1 ? "Shift+" : "";
  return shift + (event.key === " " ? "Space" : event.key);
}

function _typing(event) {
  const where = event.target;
  if (where.isContentEditable || where.tagName === "TEXTAREA" || where.tagName === "SELECT") return true;
  return where.tagName === "INPUT" && !["range", "checkbox", "radio", "button"].includes(where.type);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (_typing(event)) {
    if (event.key === "Escape") event.target.blur(); // it leaves the field, not the page
    return;
  }
  if (document.querySelector("dialog[open]")) return; // what is behind it waits
  const pressed = _name(event);
  // a button that has the focus is what Space and Enter are for
  if (["Space", "Enter"].includes(pressed) && event.target.closest("button, a, summary, [role=row]")) return;
  for (const layer of layers) {
    const found = layer.list.find((one) => one.keys.includes(pressed));
    if (found) {
      event.preventDefault();
      found.run(event);
      return;
    }
  }
});

/** Shows what keys there are. */
export function help() {
  const dialog = document.getElementById("help");
  const parts = layers.flatMap((layer) => [
    el("h3", {}, layer.title),
    el(
      "dl",
      {},
      layer.list
        .filter((one) => one.does)
        .flatMap((one) => [
          el(
            "dt",
            {},
            one.keys
              .filter((key) => !key.startsWith("_"))
              .flatMap((key, i) => [i ? " " : null, el("kbd", {}, _told(key))]),
          ),
          el("dd", {}, one.does),
        ]),
    ),
  ]);
  fill(
    dialog,
    el("h2", { id: "help-title" }, "Keys"),
    ...parts,
    el("button", { onclick: () => dialog.close() }, "Close"),
  );
  if (!dialog.open) dialog.showModal();
}

function _told(key) {
  return key.replace("ArrowLeft", "←").replace("ArrowRight", "→").replace("ArrowUp", "↑").replace("ArrowDown", "↓");
}
