// How a column of a checkpoint is spread, such as priorities: over all ranks as a histogram, and rank by rank.

import { ask } from "./api.js";
import { cut, el, fill, svg } from "./dom.js";
import * as format from "./format.js";

const [WIDTH, HEIGHT] = [420, 60];
const MOST = 64; // ranks of the table

/** A part for each column of a buffer, folded; asked for when it is opened. asked: commit and number. */
export function columns(buffers, asked, signal) {
  return Object.entries(buffers).flatMap(([buffer, { columns: names }]) =>
    names.map((name) => _column(buffer, name, asked, signal)),
  );
}

function _column(buffer, name, asked, signal) {
  const inside = el("div", {});
  const part = el(
    "details",
    { class: "column-of" },
    el("summary", {}, `Column ${cut(name, 60)} of ${cut(buffer, 40)}`),
    inside,
  );
  part.addEventListener("toggle", async () => {
    if (!part.open || inside.childElementCount) return;
    try {
      fill(inside, _drawn(name, await ask("column", { ...asked, name, buffer }, signal)));
    } catch (error) {
      fill(inside, el("p", { class: "error-text" }, error.message));
    }
  });
  return part;
}

function _drawn(name, { edges, counts, ranks }) {
  if (!counts.length) return el("p", { class: "quiet-text" }, "no numbers");
  const most = Math.max(...counts);
  const wide = WIDTH / counts.length;
  const bars = counts.map((count, i) =>
    svg(
      "rect",
      {
        x: i * wide,
        width: Math.max(0.5, wide - 1),
        y: HEIGHT * (1 - count / most),
        height: (HEIGHT * count) / most,
        class: "now",
      },
      svg("title", {}, `${format.number(edges[i])} to ${format.number(edges[i + 1])}: ${format.count(count)}`),
    ),
  );
  const told = `${name}: ${format.count(counts.reduce((sum, one) => sum + one, 0))} numbers from ${format.number(edges[0])} to ${format.number(edges.at(-1))}`;
  const heads = ["rank", "rows", "least", "mean", "most"].map((head, i) =>
    el("th", { scope: "col", class: i ? "number" : null }, head),
  );
  const rows = ranks.slice(0, MOST).map((one) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, one.rank),
      el("td", { class: "number" }, format.count(one.rows)),
      [one.least, one.mean, one.most].map((value) => el("td", { class: "number" }, format.number(value))),
    ),
  );
  return [
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "histogram", role: "img", "aria-label": told }, bars),
    el("div", { class: "ends" }, el("span", {}, format.number(edges[0])), el("span", {}, format.number(edges.at(-1)))),
    el("table", { class: "plain costs" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows)),
  ];
}
