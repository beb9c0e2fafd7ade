// A JSON value as a tree that opens; long texts and lists are cut, and say so.

import { cut, el } from "./dom.js";
import * as format from "./format.js";

const MOST = 100; // entries of one level
const DEEPEST = 12;
const TEXT = 2000;

/** A node for a value; `open`: how many levels are open at first. */
export function tree(value, { open = 1, depth = 0 } = {}) {
  if (value === null || typeof value !== "object") return _leaf(value);
  const entries = Array.isArray(value) ? value.map((one, i) => [i, one]) : Object.entries(value);
  if (!entries.length) return el("code", Array.isArray(value) ? "[]" : "{}");
  if (depth >= DEEPEST) return el("code", cut(JSON.stringify(value), 200));
  const rows = entries.slice(0, MOST).map(([key, one]) => _entry(key, one, open, depth));
  const more = entries.length > MOST ? el("li.quiet-text", `and ${entries.length - MOST} more`) : null;
  return el("ul.tree", rows, more);
}

function _entry(key, value, open, depth) {
  const name = el("span.tree-key", cut(key, 80), ": ");
  if (value === null || typeof value !== "object" || !Object.keys(value).length) return el("li", name, tree(value));
  const count = Object.keys(value).length;
  const told = Array.isArray(value) ? `[${count}]` : `{${count}}`;
  const inside = el("details", { open: depth + 1 < open }, el("summary", name, el("span.quiet-text", told)));
  const fillOnce = () => {
    if (inside.open && inside.childElementCount === 1) inside.append(tree(value, { open, depth: depth + 1 }));
  };
  inside.addEventListener("toggle", fillOnce);
  fillOnce();
  return el("li", inside);
}

function _leaf(value) {
  if (typeof value === "string") return el("span.tree-text", cut(value, TEXT));
  return el("code", typeof value === "number" ? format.number(value) : String(value));
}
