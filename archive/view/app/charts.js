// Charts: numbers over the steps with the cursor on all of them, quantiles along an axis, and bars. uPlot draws the lines.
/* global uPlot */

import { el, fill } from "./dom.js";
import * as format from "./format.js";

const COLORS = 8; // --line-0 ... in base.css
const [HEIGHT, TALL] = [84, 230];
const DRAG = 6; // pixels after which a press zooms
const RIGHT = 16; // pixels beside a plot, for half of the last number; episode.css says the same

/** A class name of the colour of a series. */
export function colored(kind, i) {
  return `${kind}-${i % COLORS}`;
}

const css = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);

/** Round numbers from low to high, never many, however near or far apart these are. */
export function ticks(low, high, most) {
  const rough = (high - low) / most;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * unit).find((one) => one >= rough);
  if (!Number.isFinite(step) || !step) return [low, high];
  const first = Math.ceil(low / step);
  return Array.from({ length: most + 2 }, (_, i) => Number(((first + i) * step).toPrecision(12))).filter(
    (one) => one <= high,
  );
}

function axis(most, size, more = {}) {
  const splits = (_, i, low, high) => ticks(low, high, most);
  const values = (_, found) => found.map((one) => format.number(one));
  const grid = { stroke: css("--line"), width: 1 };
  return {
    stroke: css("--quiet"),
    font: "10px system-ui",
    grid,
    ticks: { show: false },
    gap: 3,
    size,
    splits,
    values,
    ...more,
  };
}

function spanned(_, low, high) {
  if (low === null || low === undefined) return [0, 1];
  const room = (high - low) * 0.05 || Math.abs(low) * 0.1 || 0.5;
  return Number.isFinite(high - low + 2 * room)
    ? [low - room, high + room]
    : [-Number.MAX_VALUE / 4, Number.MAX_VALUE / 4];
}

const lone = (values) =>
  values.flatMap((one, i) =>
    Number.isFinite(one) && !Number.isFinite(values[i - 1]) && !Number.isFinite(values[i + 1]) ? [i] : [],
  );

/** A chart that is as wide as its place, in the colours of the theme. */
class Plot {
  constructor(place, height, given, data) {
    const scales = {
      x: { time: false, range: (_, a, b) => (a === b ? [a - 0.5, b + 0.5] : [a, b]) },
      y: { range: spanned },
    };
    const cursor = { y: false, points: { show: false }, drag: { x: true, y: false, dist: DRAG } };
    const whole = {
      width: place.clientWidth || 600,
      height,
      legend: { show: false },
      padding: [6, RIGHT, 0, 0],
      scales,
      cursor,
      ...given,
    };
    this.drawn = new uPlot(whole, data, place);
    this.seen = new ResizeObserver(() => place.clientWidth && this.drawn.setSize({ width: place.clientWidth, height }));
    this.seen.observe(place);
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => this.drawn.redraw(false, true);
    this.theme.addEventListener("change", this.repaint);
  }

  close() {
    this.seen.disconnect();
    this.theme.removeEventListener("change", this.repaint);
    this.drawn.destroy();
  }
}

/** The numbers of one field over the steps: a press goes to a step, a drag zooms, two presses show all again. */
export class Chart {
  /** lines: [{part, x, y, derived}]; length: steps. */
  constructor(field, lines, length, cursor) {
    Object.assign(this, { field, cursor });
    this.lines = lines.map((line, i) => ({ ...line, y: line.y.map(Number), color: i % COLORS, on: true }));
    this.at = el("div.curve-cursor");
    this.place = el("div.curve", { role: "img", "aria-label": `${field} over ${length} steps` });
    this.values = el("span.values");
    const told = lines[0]?.derived ? "from rewards" : "";
    this.controls = el("span.controls");
    this.pointed = el("span.quiet-text.pointed"); // the step that the mouse is over
    this.node = el(
      "section.chart",
      { "aria-label": field },
      el("header", el("strong", field), el("span.quiet-text", told), this.controls, this.pointed, this.values),
      this.place,
    );
    this._legend();
    this._plot(length);
    this.unfollow = cursor.follow((step) => this.show(step));
    this.show(cursor.step);
  }

  close() {
    this.unfollow();
    this.plot.close();
  }

  _plot(length) {
    const own = this.lines.map((line) => [
      line.x ?? line.y.map((_, i) => i),
      line.y.map((one) => (Number.isFinite(one) ? one : null)),
    ]);
    const points = { size: 4, filter: (u, i, show) => (show ? null : lone(u.data[i])) };
    const series = this.lines.map((line) => ({ stroke: css(`--line-${line.color}`), width: 1.2, points }));
    const axes = [axis(10, 16, { grid: { show: false } }), axis(4, 52)];
    const hooks = { draw: [() => this._mark()], setCursor: [(u) => this._point(u, length)] };
    this.plot = new Plot(
      this.place,
      HEIGHT,
      { series: [{}, ...series], axes, hooks },
      uPlot.join([...own, [[0, Math.max(0, length - 1)]]]),
    );
    this.drawn = this.plot.drawn;
    this.drawn.over.append(this.at);
    this.drawn.over.addEventListener("pointerdown", (event) => {
      const at = this.drawn.posToVal(event.clientX - this.drawn.over.getBoundingClientRect().left, "x");
      this.cursor.stop();
      this.cursor.go(Math.min(Math.max(at, 0), length - 1));
    });
  }

  show(step) {
    this.step = step;
    this._tell(step);
    this._mark();
  }

  _tell(step) {
    for (const line of this.lines) fill(line.told, this.told(line, step));
  }

  /** The values below the mouse, and those at the cursor again when it leaves. */
  _point(drawn, length) {
    if (this.step === undefined) return; // it is being made
    const at = drawn.cursor.left >= 0 ? Math.round(drawn.posToVal(drawn.cursor.left, "x")) : -1;
    const there = at >= 0 && at < length;
    fill(this.pointed, there ? `step ${at}` : "");
    this._tell(there ? at : this.step);
  }

  _mark() {
    const { scales } = this.drawn;
    const part = (this.step - scales.x.min) / (scales.x.max - scales.x.min);
    this.at.style.left = `${100 * part}%`;
    this.at.hidden = !(part >= 0 && part <= 1);
  }

  /** Values of steps from `start` on, of lines that are drawn thinned. */
  known(start, lines) {
    for (const line of this.lines) {
      const found = lines.find((one) => one.part === line.part);
      line.exact = found && !found.x ? { start, y: found.y.map(Number) } : null;
    }
    this.show(this.step);
  }

  /** The value of a line at a step, as text; "≈" of thinned ones until it is known. */
  told(line, step) {
    if (!line.x) return format.number(line.y[step]);
    const { start, y } = line.exact ?? { start: 0, y: [] };
    if (step >= start && step < start + y.length) return format.number(y[step - start]);
    const after = line.x.findIndex((one) => one >= step);
    return `≈ ${format.number(line.y.at(after))}`; // the last one where there is none after it
  }

  _legend() {
    fill(
      this.values,
      this.lines.map((line, i) => {
        line.told = el("b");
        const toggle = () => {
          line.on = !line.on;
          button.setAttribute("aria-pressed", String(line.on));
          this.drawn.setSeries(i + 1, { show: line.on });
        };
        const swatch = el("i", { class: `swatch line-${line.color}` });
        const given = { class: "key quiet", "aria-pressed": "true", title: "show or hide", onclick: toggle };
        const button = el("button", given, swatch, line.part ? `${line.part} ` : "", line.told);
        return button;
      }),
    );
  }
}

/** How values are spread along an axis: found is an answer to "trend". {node, close}, or null where there is nothing. */
export function trend({ along, groups }, title) {
  const shown = groups.filter((one) => one.at.length);
  if (!shown.length) return null;
  const place = el("div.trend", { role: "img", "aria-label": `${title} over ${along}` });
  const keys = shown.map((one, i) => el("span.key", el("i", { class: `swatch ${colored("line", i)}` }), one.name));
  const told = "line: median; bands: 25 to 75 and 10 to 90 of 100 episodes";
  const caption = el("figcaption.quiet-text", shown.length > 1 ? keys : null, told);
  const series = shown.flatMap((_, i) =>
    [0, 1, 2, 3, 4].map((n) => ({
      stroke: css(`--${colored("line", i)}`),
      width: n === 2 ? 1.8 : 0,
      points: { show: n === 2 ? undefined : false, size: 4 },
    })),
  );
  const bands = shown.flatMap((_, i) =>
    [
      [4, 0, 16],
      [3, 1, 26],
    ].map(([high, low, percent]) => ({
      series: [5 * i + high + 1, 5 * i + low + 1],
      fill: () => `color-mix(in srgb, ${css(`--${colored("line", i)}`)()} ${percent}%, transparent)`,
    })),
  );
  const axes = [axis(8, 20, { label: along, labelSize: 14, labelFont: "11px system-ui", labelGap: 0 }), axis(6, 58)];
  const node = el("figure.trend-figure", el("strong", title), place, caption);
  const data = uPlot.join(shown.map((one) => [one.at, ...one.quantiles]));
  const plot = new Plot(
    place,
    TALL,
    { series: [{}, ...series.map((one) => ({ ...one, spanGaps: true }))], bands, axes },
    data,
  );
  return { node, close: () => plot.close() };
}

/** Bars of counts, before those of `all`; told(i): what one stands for; onpick(i): a press on one filters by it. */
export function bars(counts, { all = counts, told, onpick = null, label = null }) {
  const most = Math.max(1, ...all);
  const bar = (kind, n) => el("span", { class: kind, style: { height: `${n ? Math.max(2, (100 * n) / most) : 0}%` } });
  const pressed = (i) => ({ "aria-label": told(i), tabindex: all[i] ? null : -1, onclick: () => onpick(i) });
  return el(
    "div.histogram",
    { role: label ? "img" : null, "aria-label": label },
    counts.map((n, i) =>
      el(
        onpick ? "button" : "span",
        { class: "press", title: told(i), ...(onpick ? pressed(i) : {}) },
        bar("every", all[i]),
        bar("now", n),
      ),
    ),
  );
}

/** The least and the greatest below a chart. */
export function ends(low, high) {
  return el("div.ends", el("span", low), el("span", high));
}
