// Which weights made which steps, as a band over the curves: where it changes colour, others took over.

import { cut, el, fill } from "./dom.js";
import * as format from "./format.js";

const COLORS = 8; // --line-0 ... in episode.css
/** Whether there is anything to tell apart. */
export function changing(parts) {
  return new Set(parts.map(_name)).size > 1;
}

export class Weights {
  constructor(parts, length, cursor) {
    this.parts = parts.filter((part) => part.stop > part.start);
    const numbers = new Map([...new Set(this.parts.map(_name))].map((name, i) => [name, i]));
    const part = (step) => `${(100 * step) / Math.max(1, length)}%`;
    const bands = this.parts.map((one) => {
      const style = { left: part(one.start), width: part(one.stop - one.start) };
      const go = () => cursor.by(one.start - cursor.step);
      const color = `line-${numbers.get(_name(one)) % COLORS}`;
      return el("span", { class: color, style, title: _told(one), onclick: go });
    });
    this.mark = el("span.weights-mark");
    this.at = part;
    this.now = el("b");
    this.node = el(
      "section.chart.weights-band",
      { "aria-label": "Weights of the steps" },
      el("header", el("strong", "weights"), this.now, el("span.quiet-text", `${numbers.size} in all`)),
      el("div.weights-row", { "aria-hidden": "true" }, bands, this.mark),
    );
    this.unfollow = cursor.follow((step) => this.show(step));
    this.show(cursor.step);
  }

  close() {
    this.unfollow();
  }

  show(step) {
    this.mark.style.left = this.at(step);
    const part = this.parts.find((one) => one.start <= step && step < one.stop);
    fill(this.now, part ? _told(part) : "–");
  }
}

function _name(part) {
  return (part.model_weights_uuids ?? []).join(", ") || "–";
}

function _told(part) {
  const [least, most] = [part.update_count_min, part.update_count_max];
  const updates =
    least === null || least === undefined ? "" : ` · update ${least === most ? least : `${least} to ${most}`}`;
  return `${format.name(cut(_name(part), 200), 40)}${updates}`;
}
