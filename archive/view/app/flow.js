// Who gets what: from source ranks on the left to target ranks on the right, bands as wide as the steps that move.

import { el, svg } from "./dom.js";
import * as format from "./format.js";

const [WIDTH, MARGIN, BAR, GAP] = [560, 66, 12, 6];
const MOST = 64; // ranks of a picture
const COLORS = 8;

/** moved: [[source, target, steps]]. */
export function flow(moved, sources, targets) {
  const total = moved.reduce((sum, [, , steps]) => sum + steps, 0);
  if (!total || Math.max(sources, targets) > MOST) return null;
  const room = Math.max(110, 20 * Math.max(sources, targets));
  const scale = room / total;
  const [left, right] = [_ends(moved, 0, sources, scale), _ends(moved, 1, targets, scale)];
  const height = Math.max(left.height, right.height) + 4;
  const bands = moved.map(([source, target, steps]) => {
    const tall = steps * scale;
    const [y0, y1] = [left.take(source, tall), right.take(target, tall)];
    return svg(
      "path",
      { d: _band(MARGIN + BAR, WIDTH - MARGIN - BAR, y0, y1, tall), class: `band band-${target % COLORS}` },
      svg("title", `${format.count(steps)} steps from rank ${source} to rank ${target}`),
    );
  });
  const boxes = [
    ..._boxes(left, MARGIN, MARGIN - 6, "end"),
    ..._boxes(right, WIDTH - MARGIN - BAR, WIDTH - MARGIN + 6, "start"),
  ];
  const told = `${format.count(total)} steps go from ${sources} to ${targets} ranks`;
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${height}`, class: "flow", role: "img", "aria-label": told },
    bands,
    boxes,
  );
}

function _ends(moved, side, count, scale) {
  const tall = Array(count).fill(0);
  for (const one of moved) tall[one[side]] += one[2] * scale;
  const tops = [];
  let y = 2;
  for (const one of tall) {
    tops.push(y);
    y += one + GAP;
  }
  const next = [...tops];
  const take = (rank, high) => {
    const at = next[rank];
    next[rank] += high;
    return at;
  };
  return { tall, tops, height: y - GAP, take };
}

function _band(x0, x1, y0, y1, tall) {
  const middle = (x0 + x1) / 2;
  return `M ${x0} ${y0} C ${middle} ${y0}, ${middle} ${y1}, ${x1} ${y1} v ${tall} C ${middle} ${y1 + tall}, ${middle} ${y0 + tall}, ${x0} ${y0 + tall} z`;
}

function _boxes(ends, x, textX, anchor) {
  return ends.tops.flatMap((y, rank) => [
    svg("rect", { x, y, width: BAR, height: Math.max(1, ends.tall[rank]), class: "rank" }),
    svg("text", { x: textX, y: y + ends.tall[rank] / 2 + 4, "text-anchor": anchor }, `rank ${rank}`),
  ]);
}

/** Live steps of each rank as bars. */
export function rankBars(ranks) {
  const most = Math.max(1, ...ranks.map((one) => one.steps));
  const shown = ranks.slice(0, MOST);
  const rows = shown.map(({ rank, steps }) =>
    el(
      "div.rank-bar",
      el("span", `rank ${rank}`),
      el("span.track", el("span.now", { style: { width: `${(100 * steps) / most}%` } })),
      el("span.number", format.count(steps)),
    ),
  );
  const more = ranks.length > MOST ? el("p.quiet-text", `and ${ranks.length - MOST} more ranks`) : null;
  return el("div.rank-bars", rows, more);
}
