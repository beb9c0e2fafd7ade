// The values of a long episode at the step that is looked at: its curves are drawn thinned, and told exactly.

import { ask } from "./api.js";
import { Newest } from "./newest.js";

const [BEHIND, AHEAD] = [300, 1200]; // steps around the cursor that are asked for at once
const WAIT_MS = 100;

export class Exact {
  /** charts(): those whose values are told; given(): what else the question says. */
  constructor(asked, cursor, charts, given) {
    Object.assign(this, { asked, cursor, charts, given });
    this.newest = new Newest(WAIT_MS);
    this.start = this.stop = 0;
    this.unfollow = cursor.follow((step) => this.show(step));
    this.show(cursor.step);
  }

  close() {
    this.unfollow();
    this.newest.close();
  }

  /** All is asked for again, as after another discount. */
  renew() {
    this.start = this.stop = 0;
    this.show(this.cursor.step);
  }

  show(step) {
    this.newest.wait();
    if (step < this.start || step >= this.stop) this.newest.ask((signal) => this._load(step, signal));
  }

  async _load(step, signal) {
    const start = Math.max(0, step - BEHIND);
    const stop = Math.min(this.cursor.length, step + AHEAD);
    try {
      const found = await ask("curves", { ...this.asked, ...this.given(), start, stop }, signal);
      for (const chart of this.charts())
        chart.known(
          start,
          found.curves.filter((line) => line.field === chart.field),
        );
      [this.start, this.stop] = [start, stop];
    } catch (error) {
      if (error.name !== "AbortError") this.stop = this.start; // the thinned values stay, and say that they are near
    }
  }
}
