// Elements. All that comes from the archive goes through here as text: nothing in the viewer parses HTML.

const SVG = "http://www.w3.org/2000/svg";
// What text may hold but must not do: control characters, and those that turn the direction of what follows.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** A text in which each character can be seen: control characters as their symbols. */
export function visible(text) {
  return String(text).replace(UNSEEN, (one) => {
    const code = one.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : "\ufffd";
  });
}

/** el("td.number.wide", {onclick: f, "aria-label": "x"}, "text", other): the attributes may be left out. */
export function el(name, ...rest) {
  return _made((tag) => document.createElement(tag), name, rest);
}

/** The same of SVG. */
export function svg(name, ...rest) {
  return _made((tag) => document.createElementNS(SVG, tag), name, rest);
}

function _made(make, name, [first, ...rest]) {
  const [tag, ...classes] = name.split(".");
  const given = first?.constructor === Object ? first : {};
  const node = _filled(make(tag), given, given === first ? rest : [first, ...rest]);
  if (classes.length) node.classList.add(...classes);
  return node;
}

function _filled(node, given, children) {
  for (const [key, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style")
      Object.assign(node.style, value); // an object: the policy forbids style attributes
    else if (key === "value") node.value = value;
    else node.setAttribute(key, value === true ? "" : visible(value));
  }
  add(node, ...children);
  return node;
}

/** Appends nodes, and all else as text; what is null or undefined is left out. */
export function add(node, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : visible(child));
  }
  return node;
}

/** A table: columns {head: "name", which names its row, "number" or "text"}; rows: lists of texts or nodes, or {given, cells}
 * with attributes; heads: whether they are shown. */
export function table(columns, rows, { heads = true, kind = "" } = {}) {
  const kinds = Object.values(columns);
  const number = (i) => (kinds[i] === "number" ? "number" : null);
  const cell = (value, i) =>
    kinds[i] === "name" ? el("th", { scope: "row" }, value) : el("td", { class: number(i) }, value);
  const line = (row) => (Array.isArray(row) ? el("tr", row.map(cell)) : el("tr", row.given, row.cells.map(cell)));
  const titles = Object.keys(columns).map((name, i) => el("th", { scope: "col", class: number(i) }, name));
  const body = el("tbody", rows.map(line));
  return el("table", { class: `plain ${kind}` }, heads ? el("thead", el("tr", titles)) : null, body);
}

/** Replaces what is in a node. */
export function fill(node, ...children) {
  node.replaceChildren();
  return add(node, ...children);
}

/** A text of at most so many characters, which says when there were more. */
export function cut(text, most) {
  const whole = String(text);
  return whole.length <= most ? whole : `${whole.slice(0, most - 1)}…`;
}
