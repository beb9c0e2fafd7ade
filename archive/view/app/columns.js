// How a column of a checkpoint is spread, such as priorities: over all ranks as a histogram, and rank by rank.

import { ask } from "./api.js";
import { bars, ends } from "./charts.js";
import { cut, el, fill, table } from "./dom.js";
import * as format from "./format.js";

const MOST = 64; // ranks of the table

/** A part for each column of a buffer, folded; asked for when it is opened. asked: commit and number. */
export function columns(buffers, asked, signal) {
  return Object.entries(buffers).flatMap(([buffer, { columns: names }]) =>
    names.map((name) => _column(buffer, name, asked, signal)),
  );
}

function _column(buffer, name, asked, signal) {
  const inside = el("div");
  const part = el("details.column-of", el("summary", `Column ${cut(name, 60)} of ${cut(buffer, 40)}`), inside);
  part.addEventListener("toggle", async () => {
    if (!part.open || inside.childElementCount) return;
    try {
      fill(inside, _drawn(name, await ask("column", { ...asked, name, buffer }, signal)));
    } catch (error) {
      fill(inside, el("p.error-text", error.message));
    }
  });
  return part;
}

function _drawn(name, { edges, counts, ranks }) {
  if (!counts.length) return el("p.quiet-text", "no numbers");
  const told = `${name}: ${format.count(counts.reduce((sum, one) => sum + one, 0))} numbers from ${format.number(edges[0])} to ${format.number(edges.at(-1))}`;
  const bar = (i) => `${format.number(edges[i])} to ${format.number(edges[i + 1])}: ${format.count(counts[i])}`;
  const rows = ranks
    .slice(0, MOST)
    .map(({ rank, rows, ...one }) => [
      rank,
      format.count(rows),
      ...["least", "mean", "most"].map((what) => format.number(one[what])),
    ]);
  return [
    bars(counts, { told: bar, label: told }),
    ends(format.number(edges[0]), format.number(edges.at(-1))),
    table({ rank: "name", rows: "number", least: "number", mean: "number", most: "number" }, rows, { kind: "costs" }),
  ];
}
