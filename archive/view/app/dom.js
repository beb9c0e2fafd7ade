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

/** el("td", {class: "number", onclick: f, "aria-label": "x"}, "text", other) */
export function el(name, given = {}, ...children) {
  return _filled(document.createElement(name), given, children);
}

/** The same of SVG. */
export function svg(name, given = {}, ...children) {
  return _filled(document.createElementNS(SVG, name), given, children);
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

/** A table: heads (none without), rows of texts or nodes, of which the first column names the row where there are heads;
 * numbers: the column from which on they are numbers. A row may be {class, cells}. */
export function table(heads, rows, { numbers = Infinity, ...given } = {}) {
  const number = (i) => (i >= numbers ? "number" : null);
  const head = el(
    "tr",
    {},
    heads.map((name, i) => el("th", { scope: "col", class: number(i) }, name)),
  );
  const body = rows.map((row) => {
    const { cells = row, ...own } = Array.isArray(row) ? {} : row;
    return el(
      "tr",
      own,
      cells.map((cell, i) => el("td", { class: number(i) }, cell)),
    );
  });
  const kind = { ...given, class: `plain ${given.class ?? ""}` };
  return el("table", kind, heads.length ? el("thead", {}, head) : null, el("tbody", {}, body));
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
