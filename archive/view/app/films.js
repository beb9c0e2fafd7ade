// The pictures of a camera: those around the cursor are fetched, ahead in the direction one goes, and kept for a while.

import { askBytes } from "./api.js";
import { el, fill } from "./dom.js";

const AHEAD = 16; // frames of a question while playing
const KEPT_BYTES = 256e6; // of all cameras on the page together

let films = 0; // that are open

/** The picture of place n of pictures that follow one another, as uint8 RGB. */
export function picture(bytes, n, width, height) {
  const image = new ImageData(width, height);
  const to = image.data;
  for (let i = 0, from = 3 * n * width * height; i < to.length; i += 4, from += 3) {
    to[i] = bytes[from];
    to[i + 1] = bytes[from + 1];
    to[i + 2] = bytes[from + 2];
    to[i + 3] = 255;
  }
  return image;
}

export class Film {
  /** given: the scope and the episode's id. */
  constructor(field, given, cursor) {
    Object.assign(this, { field, given, cursor });
    this.frames = new Map(); // step -> ImageData
    this.asking = new Map(); // first step -> {stop, controller}
    this.canvas = el("canvas.film", { role: "img", "aria-label": `${field}, no picture yet` });
    this.note = el("span.quiet-text");
    this.node = el("figure.camera", this.canvas, el("figcaption", el("strong", field), " ", this.note));
    this.wanted = cursor.step;
    films += 1;
    cursor.readiness.push((step) => this.frames.has(step) || this.failed);
    this.unfollow = cursor.follow((step) => this.show(step));
    this.show(cursor.step);
  }

  close() {
    films -= 1;
    this.unfollow();
    for (const { controller } of this.asking.values()) controller.abort();
  }

  show(step) {
    this.wanted = step;
    if (this.frames.has(step)) this._draw(step);
    else this._ask(step, step + 1);
    if (this.cursor.playing) this._ahead(); // who stands still, or scrubs, reads what is shown and no more
  }

  _ahead() {
    const { way, length } = this.cursor;
    for (let n = 1; n <= AHEAD; n++) {
      const step = this.wanted + way * n;
      if (step < 0 || step >= length) return;
      if (!this.frames.has(step) && !this._asked(step)) {
        if (way > 0) this._ask(step, Math.min(length, step + AHEAD));
        else this._ask(Math.max(0, step - AHEAD + 1), step + 1);
        return;
      }
    }
  }

  _asked(step) {
    return [...this.asking].some(([start, { stop }]) => start <= step && step < stop);
  }

  async _ask(start, stop) {
    if (this._asked(start)) return;
    // who scrubs on does not want what was passed by
    for (const [first, other] of this.asking) {
      if (Math.abs(first - this.wanted) > 2 * AHEAD) other.controller.abort();
    }
    const controller = new AbortController();
    this.asking.set(start, { stop, controller });
    try {
      const found = await askBytes("pictures", { ...this.given, field: this.field, start, stop }, controller.signal);
      this._take(start, found);
    } catch (error) {
      if (error.name !== "AbortError") this._fail(error);
    } finally {
      this.asking.delete(start);
    }
    if (this.frames.has(this.wanted)) this._draw(this.wanted);
    if (this.cursor.playing) this._ahead();
  }

  _take(start, { bytes, facts }) {
    this.failed = false;
    const [count, height, width] = facts.shape;
    const pixels = width * height;
    for (let n = 0; n < count; n++) this.frames.set(start + n, picture(bytes, n, width, height));
    while (this.frames.size * pixels * 4 > KEPT_BYTES / films) this.frames.delete(this._farthest());
    fill(this.note, facts.note, facts.every > 1 ? ` each ${facts.every}th pixel` : "");
    this.note.className = "quiet-text";
  }

  _farthest() {
    let [found, most] = [null, -1];
    for (const step of this.frames.keys()) {
      const far = Math.abs(step - this.wanted);
      if (far > most) [found, most] = [step, far];
    }
    return found;
  }

  _draw(step) {
    const image = this.frames.get(step);
    if (this.canvas.width !== image.width || this.canvas.height !== image.height) {
      this.canvas.width = image.width;
      this.canvas.height = image.height;
    }
    this.canvas.getContext("2d").putImageData(image, 0, 0);
    this.canvas.setAttribute("aria-label", `${this.field}, step ${step}`);
    this.canvas.dataset.step = step;
  }

  _fail(error) {
    this.failed = true; // what cannot be read does not keep the rest from playing
    fill(this.note, error.message);
    this.note.className = "error-text";
  }
}
