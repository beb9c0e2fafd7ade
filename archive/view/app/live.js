// New commits, as they come: the server is asked now and then, less and less often while nothing happens.

import { ask } from "./api.js";

const [SOON_MS, LATE_MS] = [2000, 30000];

/** onnews(commit): there is a newer one; onstate(text): how it goes. */
export class Live {
  constructor({ commit, onnews, onstate }) {
    Object.assign(this, { commit, onnews, onstate, on: false });
    // nobody looks at a tab that is hidden
    document.addEventListener("visibilitychange", () => this.on && !document.hidden && this._soon());
  }

  toggle() {
    this.on = !this.on;
    clearTimeout(this.timer);
    if (this.on) this._soon();
    this.onstate(this.on);
  }

  /** A commit that this page made itself is no news. */
  known(commit) {
    this.commit = Math.max(this.commit, commit);
  }

  _soon() {
    this.wait = SOON_MS;
    clearTimeout(this.timer);
    this._look();
  }

  async _look() {
    if (!this.on || document.hidden) return;
    try {
      const { commit } = await ask("news");
      if (commit > this.commit) {
        this.wait = SOON_MS;
        await this.onnews(commit);
        this.known(commit); // only now: what could not be shown is tried again
      } else this.wait = Math.min(LATE_MS, this.wait * 1.5);
    } catch {
      this.wait = LATE_MS; // it says so itself when something is asked for on purpose
    }
    if (this.on) this.timer = setTimeout(() => this._look(), this.wait);
  }
}
