// Keys: each has a name and a purpose, which `?` lists. Nothing happens while one types into a field. One key is run when
// the one before is done and the page that it is for is shown: what is pressed meanwhile waits, and none is lost.

import * as address from "./address.js";
import { el, fill } from "./dom.js";
import * as format from "./format.js";
import { failed, say } from "./status.js";

const USED = /^(.|Space|Enter|Escape|Home|End|Page(Up|Down)|(Shift\+)?Arrow\w+)$/; // all others are the browser's

const layers = []; // what is on top comes first: a page's keys, then those of everywhere
let queue = []; // keys that wait: {pressed, at: the address that they were pressed at}
let loading = false; // a page is on its way
let running = false; // a key is being run
let leading = false; // ... and leads to another page right now

/** Keys of a page: [{keys: ["ArrowRight"], does: "next step", run: f}], until `signal`. A promise of `run` is waited for;
 * by `soon: true` it need not wait for the page itself. */
export function bind(title, list, signal) {
  const layer = { title, list };
  layers.unshift(layer);
  signal?.addEventListener("abort", () => layers.splice(layers.indexOf(layer), 1), { once: true });
}

/** Another page is on its way: keys wait for it. Those that were pressed for one that was given up are left out. */
export function wait() {
  if (leading) for (const key of queue) key.at = address.hash();
  else _leaveOut((key) => key.at !== address.hash());
  loading = true;
}

/** The page that was waited for is shown, or, by `false`, cannot be: nothing is done to what is shown in its place. */
export function ready(there = true) {
  loading = false;
  if (!there) _leaveOut(() => true);
  _run();
}

/** Runs what waits, if it need not wait any longer. */
export function resume() {
  _run();
}

/** Goes on to another page by a key whose run has waited for something. */
export function lead(go) {
  leading = running;
  go();
  leading = false;
}

/** Whether what is pressed there is text. */
export function typing(where) {
  if (where.isContentEditable || where.tagName === "TEXTAREA" || where.tagName === "SELECT") return true;
  return where.tagName === "INPUT" && !["range", "checkbox", "radio", "button"].includes(where.type);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing(event.target)) {
    if (event.key === "Escape") event.target.blur(); // it leaves the field, not the page
    return;
  }
  if (_covered()) return; // what is behind it waits
  const pressed = _name(event);
  // a button that has the focus is what Space and Enter are for
  if (["Space", "Enter"].includes(pressed) && event.target.closest("button, a, summary, [role=row]")) return;
  const waits = running || _held();
  if (!(waits ? USED.test(pressed) : _found(pressed))) return;
  event.preventDefault();
  if (waits && event.repeat) return; // a key that is held down goes at the pace of what it does
  queue.push({ pressed, at: address.hash() });
  _run();
});

async function _run() {
  if (running) return;
  running = true;
  while (queue.length && !_held()) await _press(queue.shift().pressed);
  running = false;
}

async function _press(pressed) {
  const field = document.activeElement;
  if (typing(field)) return _type(field, pressed); // the key before led into it
  if (_covered()) return _leaveOut(() => true);
  try {
    leading = true;
    const done = _found(pressed)?.run();
    leading = false;
    await done;
  } catch (error) {
    leading = false;
    failed(error);
  }
  return undefined;
}

function _type(field, pressed) {
  const key = pressed === "Space" ? " " : pressed;
  if (key.length === 1)
    document.execCommand("insertText", false, key); // as somebody who types: it can be undone
  else field.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
}

function _held() {
  return address.moved() || (loading && !_found(queue[0]?.pressed)?.soon);
}

function _leaveOut(which) {
  const count = queue.filter(which).length;
  queue = queue.filter((key) => !which(key));
  if (count) say(`left out: ${format.counted(count, "key")} typed for a page that is not shown`, { error: true });
}

function _covered() {
  return document.querySelector("dialog[open]") !== null;
}

function _found(pressed) {
  for (const { list } of layers) {
    const found = list.find((one) => one.keys.includes(pressed));
    if (found) return found;
  }
  return null;
}

function _name(event) {
  const shift = event.shiftKey && event.key.length > 1 ? "Shift+" : "";
  return shift + (event.key === " " ? "Space" : event.key);
}

/** Shows what keys there are. */
export function help() {
  const dialog = document.getElementById("help");
  const parts = layers.flatMap((layer) => [
    el("h3", layer.title),
    el(
      "dl",
      layer.list
        .filter((one) => one.does)
        .flatMap((one) => [
          el(
            "dt",
            one.keys.filter((key) => !key.startsWith("_")).flatMap((key, i) => [i ? " " : null, el("kbd", _told(key))]),
          ),
          el("dd", one.does),
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
