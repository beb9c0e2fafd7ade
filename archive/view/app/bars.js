// A histogram whose bars filter: those of all episodes in grey, of those that are meant in colour.

import { bars, ends } from "./charts.js";
import { cut, el } from "./dom.js";
import * as format from "./format.js";

/** found: an answer of "histograms"; onpick(condition, value): what pressing a bar asks for; value: of a bar of one. */
export function histogram(name, title, found, onpick) {
  const body = found.kind === "text" ? _texts(name, found, onpick) : _numbers(name, title, found, onpick);
  const none = found.none_all ? el("span.quiet-text", ` ${format.count(found.none)} without`) : null;
  return el("section.bars", { "aria-label": `${title}, spread` }, el("h2", title, none), body);
}

function _numbers(name, title, found, onpick) {
  const { all, counts, edges, kind, least, most } = found;
  if (!all.length) return el("p.quiet-text", "no values");
  if (least === most && kind === "number") return _texts(name, { ...found, values: [least] }, onpick);
  const show = kind === "time" ? format.time : format.number;
  const told = (i) =>
    `${title} ${show(edges[i])} to ${show(edges[i + 1])}: ${format.count(counts[i])} of ${format.count(all[i])}`;
  const pick = (i) => {
    const upper = i === all.length - 1 ? "<=" : "<";
    const between = `${name} >= ${edges[i]} and ${name} ${upper} ${edges[i + 1]}`;
    onpick(kind === "time" ? null : between); // conditions compare no times
  };
  return el("div", bars(counts, { all, told, onpick: pick }), ends(show(least), show(most)));
}

function _texts(name, found, onpick) {
  if (!found.values.length) return el("p.quiet-text", "no values");
  const most = Math.max(1, ...found.all);
  const rows = found.values.map((value, i) => {
    const told = `${cut(value, 200)}: ${format.count(found.counts[i])} of ${format.count(found.all[i])}`;
    const every = el("span.every", { style: { width: `${(100 * found.all[i]) / most}%` } });
    const now = el("span.now", { style: { width: `${(100 * found.counts[i]) / most}%` } });
    return el(
      "button.value.quiet",
      { title: told, "aria-label": told, onclick: () => onpick(_equal(name, value), value) },
      every,
      now,
      el("span.text", cut(value, 60)),
      el("span.number", format.count(found.counts[i])),
    );
  });
  const more = found.others ? el("p.quiet-text", `and ${format.count(found.others)} more values`) : null;
  return el("div.values", rows, more);
}

function _equal(name, value) {
  if (typeof value !== "string") return `${name} = ${value}`;
  return `${name} = '${value.replaceAll("\\", "\\\\").replaceAll("'", "\\'")}'`;
}
