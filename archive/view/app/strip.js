// The first pictures of the episodes in sight, in a row above the table.

import { askBytes } from "./api.js";
import { cut, el, fill } from "./dom.js";
import { picture } from "./films.js";

const WAIT_MS = 200; // while somebody scrolls, what passes by is not asked for
const KEPT = 400;

/** asked(): commit and checkpoint; onpick(row): a picture was pressed. */
export class Strip {
  constructor({ asked, onpick, signal }) {
    Object.assign(this, { asked, onpick, signal });
    this.pictures = new Map(); // id -> ImageData, or null for an episode without one
    this.node = el("div.strip", {
      role: "group",
      "aria-label": "First pictures of the episodes in sight",
      tabindex: "0",
    });
  }

  /** rows: [{place, id}], those in sight. */
  show(rows, picked) {
    clearTimeout(this.timer);
    this.rows = rows;
    this.picked = picked;
    this._draw();
    if (rows.some(({ id }) => !this.pictures.has(id))) this.timer = setTimeout(() => this._load(), WAIT_MS);
  }

  close() {
    clearTimeout(this.timer);
  }

  async _load() {
    const ids = this.rows
      .map(({ id }) => id)
      .filter((id) => !this.pictures.has(id))
      .slice(0, 64);
    try {
      const { bytes, facts } = await askBytes("strip", { ...this.asked(), ids }, this.signal);
      this._take(bytes, facts, ids);
    } catch (error) {
      if (error.name !== "AbortError") fill(this.node, el("p.error-text", error.message));
      return;
    }
    this._draw();
  }

  _take(bytes, { shape: [, height, width], ids: found }, asked) {
    for (const id of asked) this.pictures.set(id, null);
    found.forEach((id, n) => this.pictures.set(id, picture(bytes, n, width, height)));
    while (this.pictures.size > KEPT) this.pictures.delete(this.pictures.keys().next().value);
  }

  _draw() {
    fill(
      this.node,
      this.rows.map(({ place, id }) => {
        const image = this.pictures.get(id);
        const chosen = place === this.picked ? "true" : null;
        return el(
          "button.quiet",
          {
            title: cut(id, 200),
            "aria-label": `Episode ${cut(id, 80)}`,
            "aria-current": chosen,
            onclick: () => this.onpick(place),
          },
          image ? _canvas(image) : el("span.no-picture", image === null ? "none" : "…"),
        );
      }),
    );
  }
}

function _canvas(image) {
  const canvas = el("canvas", { width: image.width, height: image.height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
