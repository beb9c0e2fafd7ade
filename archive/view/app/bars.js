// A histogram whose bars filter: those of all episodes in grey, of those that are meant in colour.

import { cut, el, svg } from "./dom.js";
import * as format from "./format.js";

const WIDTH = 232;
const HEIGHT = 46;

/** found: an answer of "histograms"; onpick(condition, value): what pressing a bar asks for; value: of a bar of one. */
export function histogram(name, title, found, onpick) {
  const body = found.kind === "text" ? _texts(name, found, onpick) : _numbers(name, title, found, onpick);
  const none = found.none_all ? el("span", { class: "quiet-text" }, ` ${format.count(found.none)} without`) : null;
  return el("section", { class: "bars", "aria-label": `${title}, spread` }, el("h2", {}, title, none), body);
}

function _numbers(name, title, found, onpick) {
  if (!found.all.length) return el("p", { class: "quiet-text" }, "no values");
  if (found.least === found.most && found.kind === "number")
    return _texts(name, { ...found, values: [found.least] }, onpick);
  const most = Math.max(...found.all);
  const wide = WIDTH / found.all.length;
  const show = found.kind === "time" ? format.time : format.number;
  const bars = found.all.flatMap((all, i) => {
    const [low, high] = [found.edges[i], found.edges[i + 1]];
    const told = `${title} ${show(low)} to ${show(high)}: ${format.count(found.counts[i])} of ${format.count(all)}`;
    const last = i === found.all.length - 1;
    const run = () => onpick(_between(name, low, high, last, found.kind));
    return [
      _bar(i * wide, wide, all / most, "every"),
      _bar(i * wide, wide, found.counts[i] / most, "now"),
      svg(
        "rect",
        {
          x: i * wide,
          y: 0,
          width: wide,
          height: HEIGHT,
          class: "press",
          tabindex: all ? 0 : null,
          role: "button",
          "aria-label": told,
          onclick: run,
          onkeydown: (event) => _pressed(event, run),
        },
        svg("title", {}, told),
      ),
    ];
  });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "histogram" }, bars);
  const ends = [show(found.least), show(found.most)];
  return el("div", {}, picture, el("div", { class: "ends" }, el("span", {}, ends[0]), el("span", {}, ends[1])));
}

function _bar(x, wide, part, kind) {
  const tall = part ? Math.max(1, HEIGHT * part) : 0;
  return svg("rect", { x, y: HEIGHT - tall, width: Math.max(wide - 1, 0.5), height: tall, class: kind });
}

function _between(name, low, high, last, kind) {
  if (kind === "time") return null; // conditions compare no times
  return `${name} >= ${low} and ${name} ${last ? "<=" : "<"} ${high}`;
}

function _texts(name, found, onpick) {
  if (!found.values.length) return el("p", { class: "quiet-text" }, "no values");
  const most = Math.max(1, ...found.all);
  const rows = found.values.map((value, i) => {
    const told = `${cut(value, 200)}: ${format.count(found.counts[i])} of ${format.count(found.all[i])}`;
    const every = el("span", { class: "every", style: { width: `${(100 * found.all[i]) / most}%` } });
    const now = el("span", { class: "now", style: { width: `${(100 * found.counts[i]) / most}%` } });
    return el(
      "button",
      { class: "value quiet", title: told, "aria-label": told, onclick: () => onpick(_equal(name, value), value) },
      every,
      now,
      el("span", { class: "text" }, cut(value, 60)),
      el("span", { class: "number" }, format.count(found.counts[i])),
    );
  });
  const more = found.others ? el("p", { class: "quiet-text" }, `and ${format.count(found.others)} more values`) : null;
  return el("div", { class: "values" }, rows, more);
}

function _equal(name, value) {
  if (typeof value !== "string") return `${name} = ${value}`;
  return `${name} = '${value.replaceAll("\\", "\\\\").replaceAll("'", "\\'")}'`;
}

function _pressed(event, run) {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  event.stopPropagation();
  run();
}
