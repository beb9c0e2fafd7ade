// Which weights made which steps, as a band over the curves: where it changes colour, others took over.

import { cut, el, fill, svg } from "./dom.js";
import * as format from "./format.js";

const COLORS = 8; // --line-0 ... in episode.css
const HEIGHT = 12;

/** Whether there is anything to tell apart. */
export function changing(parts) {
  return new Set(parts.map(_name)).size > 1;
}

export class Weights {
  constructor(parts, length, cursor) {
    this.parts = parts.filter((part) => part.stop > part.start);
    const numbers = new Map([...new Set(this.parts.map(_name))].map((name, i) => [name, i]));
    const press = (part) => () => cursor.by(part.start - cursor.step);
    const bands = this.parts.map((part) =>
      svg(
        "rect",
        {
          x: part.start,
          y: 0,
          width: part.stop - part.start,
          height: HEIGHT,
          class: `weights-${numbers.get(_name(part)) % COLORS}`,
          onclick: press(part),
        },
        svg("title", {}, _told(part)),
      ),
    );
    this.mark = svg("rect", { y: 0, height: HEIGHT, class: "weights-mark", width: Math.max(0.5, length / 600) });
    this.now = el("b", {});
    this.node = el(
      "section",
      { class: "chart weights-band", "aria-label": "Weights of the steps" },
      el(
        "header",
        {},
        el("strong", {}, "weights"),
        this.now,
        el("span", { class: "quiet-text" }, `${numbers.size} in all`),
      ),
      svg(
        "svg",
        {
          viewBox: `0 0 ${Math.max(1, length - 1)} ${HEIGHT}`,
          preserveAspectRatio: "none",
          class: "weights-row",
          "aria-hidden": "true",
        },
        bands,
        this.mark,
      ),
    );
    this.unfollow = cursor.follow((step) => this.show(step));
    this.show(cursor.step);
  }

  close() {
    this.unfollow();
  }

  show(step) {
    this.mark.setAttribute("x", step);
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
