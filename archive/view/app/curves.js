// Numbers over the steps: one chart a field, with the cursor on all of them; a press goes to that step.

import { el, fill } from "./dom.js";
import * as format from "./format.js";

const HEIGHT = 64;
const DOT = 4; // pixels of a value without another beside it
const COLORS = 8; // --line-0 ... in episode.css

export class Chart {
  /** lines: [{part, x, y, derived}] of one field; length: steps. */
  constructor(field, lines, length, cursor) {
    Object.assign(this, { field, length, cursor });
    this.lines = lines.map((line, i) => ({ ...line, y: line.y.map(Number), color: i % COLORS, on: true }));
    this.canvas = el("canvas", {
      class: "curve",
      role: "img",
      "aria-label": `${field} over ${length} steps`,
      onpointerdown: (event) => this._press(event),
      onpointermove: (event) => event.buttons && this._press(event),
    });
    this.values = el("span", { class: "values" });
    const told = lines[0]?.derived ? "from rewards" : "";
    this.controls = el("span", { class: "controls" });
    this.node = el(
      "section",
      { class: "chart", "aria-label": field },
      el("header", {}, el("strong", {}, field), el("span", { class: "quiet-text" }, told), this.controls, this.values),
      this.canvas,
    );
    this.unfollow = cursor.follow((step) => this.show(step));
    this.seen = new ResizeObserver(() => this._paint());
    this.seen.observe(this.canvas);
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => this._paint();
    this.theme.addEventListener("change", this.repaint);
    this._legend();
    this.show(cursor.step);
  }

  close() {
    this.unfollow();
    this.seen.disconnect();
    this.theme.removeEventListener("change", this.repaint);
  }

  show(step) {
    this.step = step;
    for (const line of this.lines) fill(line.told, this.told(line, step));
    this._cursor();
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
    return `≈ ${format.number(this.near(line, step))}`;
  }

  /** Of a thinned line the nearest value that was kept. */
  near(line, step) {
    let [low, high] = [0, line.x.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (line.x[middle] < step) low = middle + 1;
      else high = middle;
    }
    return line.y[low];
  }

  _legend() {
    fill(
      this.values,
      this.lines.map((line) => {
        line.told = el("b", {});
        const button = el(
          "button",
          {
            class: "key quiet",
            "aria-pressed": "true",
            title: "show or hide",
            onclick: () => {
              line.on = !line.on;
              button.setAttribute("aria-pressed", String(line.on));
              this._paint();
            },
          },
          el("i", { class: `swatch line-${line.color}` }),
          line.part ? `${line.part} ` : "",
          line.told,
        );
        return button;
      }),
    );
  }

  _press(event) {
    const box = this.canvas.getBoundingClientRect();
    this.cursor.stop();
    this.cursor.go(((event.clientX - box.left) / box.width) * (this.length - 1), {
      settled: event.type === "pointerdown",
    });
  }

  // the lines are painted once for a size, the cursor over them at each step
  _paint() {
    const [wide, ratio] = [this.canvas.clientWidth, devicePixelRatio];
    if (!wide) return;
    this.canvas.width = wide * ratio;
    this.canvas.height = HEIGHT * ratio;
    this.painted = new OffscreenCanvas(this.canvas.width, this.canvas.height);
    const pen = this.painted.getContext("2d");
    pen.scale(ratio, ratio);
    const shown = this.lines.filter((line) => line.on);
    const [least, most] = _range(shown);
    const style = getComputedStyle(this.canvas);
    if (least < 0 && most > 0) _rule(pen, wide, _y(0, least, most), style.getPropertyValue("--line"));
    for (const line of shown) {
      pen.strokeStyle = style.getPropertyValue(`--line-${line.color}`);
      this._stroke(pen, line, wide, least, most);
    }
    this.ends = [least, most];
    this._cursor();
  }

  _stroke(pen, line, wide, least, most) {
    const per = wide / Math.max(1, this.length - 1);
    pen.lineWidth = 1.2;
    pen.fillStyle = pen.strokeStyle;
    pen.beginPath();
    let down = false;
    line.y.forEach((value, i) => {
      if (!Number.isFinite(value)) {
        down = false;
        return;
      }
      const [x, y] = [(line.x ? line.x[i] : i) * per, _y(value, least, most)];
      if (down) pen.lineTo(x, y);
      else pen.moveTo(x, y);
      if (!down && !Number.isFinite(line.y[i + 1])) pen.fillRect(Math.min(x, wide - DOT), y - DOT / 2, DOT, DOT); // it is alone
      down = true;
    });
    pen.stroke();
  }

  _cursor() {
    if (!this.painted) return;
    const [pen, ratio] = [this.canvas.getContext("2d"), devicePixelRatio];
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.painted, 0, 0);
    const style = getComputedStyle(this.canvas);
    pen.font = `${10 * ratio}px system-ui`;
    this._end(pen, format.number(this.ends[1]), 9 * ratio, ratio, style);
    this._end(pen, format.number(this.ends[0]), this.canvas.height - 2 * ratio, ratio, style);
    const x = (this.step / Math.max(1, this.length - 1)) * (this.canvas.width - ratio);
    pen.fillStyle = style.getPropertyValue("--cursor");
    pen.fillRect(x, 0, 1.5 * ratio, this.canvas.height);
  }

  // the least value or the greatest, legible over the lines
  _end(pen, text, y, ratio, style) {
    pen.fillStyle = style.getPropertyValue("--back");
    pen.globalAlpha = 0.75;
    pen.fillRect(0, y - 9 * ratio, pen.measureText(text).width + 4 * ratio, 11 * ratio);
    pen.globalAlpha = 1;
    pen.fillStyle = style.getPropertyValue("--quiet");
    pen.fillText(text, 2, y);
  }
}

function _range(lines) {
  let [least, most] = [Infinity, -Infinity];
  for (const line of lines) {
    for (const value of line.y) {
      if (!Number.isFinite(value)) continue;
      if (value < least) least = value;
      if (value > most) most = value;
    }
  }
  if (least > most) return [0, 1];
  return least === most ? [least - 0.5, most + 0.5] : [least, most];
}

function _y(value, least, most) {
  return HEIGHT - 4 - ((value - least) / (most - least)) * (HEIGHT - 8);
}

function _rule(pen, wide, y, color) {
  pen.strokeStyle = color;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(0, y);
  pen.lineTo(wide, y);
  pen.stroke();
}
