// The step that is looked at. Pictures, curves, words and values all follow it; it plays, at so many steps a second.

export const RATES = [1, 2, 5, 10, 20, 30, 60];

let usual = 20; // the rate that was chosen last: the next episode plays as this one

export class Cursor {
  constructor(length, step = 0) {
    this.length = length;
    this.step = Math.max(0, Math.min(length - 1, step));
    this.rate = usual;
    this.playing = false;
    this.way = 1; // in which direction one goes
    this.followers = [];
    this.readiness = []; // functions that say whether a step can be shown now: playing waits for all
  }

  /** f(step, {settled}) at each change; `settled` says that it stays there for now. */
  follow(f) {
    this.followers.push(f);
    return () => this.followers.splice(this.followers.indexOf(f), 1);
  }

  go(step, { settled = true } = {}) {
    const next = Math.max(0, Math.min(this.length - 1, Math.round(step)));
    if (next !== this.step) this.way = next > this.step ? 1 : -1;
    this.step = next;
    for (const follower of [...this.followers]) follower(next, { settled });
  }

  by(steps) {
    this.stop();
    this.go(this.step + steps);
  }

  /** Plays at another rate from here on, and what is opened next, too. */
  pace(rate) {
    this.rate = usual = rate;
  }

  toggle() {
    if (this.playing) this.stop();
    else this.play();
  }

  play() {
    if (this.length < 2) return;
    if (this.step >= this.length - 1) this.go(0);
    this.playing = true;
    this.way = 1;
    this.go(this.step, { settled: false }); // pictures are read ahead from here on
    this.due = performance.now() + 1000 / this.rate;
    this._tick();
    this._changed();
  }

  stop() {
    if (!this.playing) return;
    this.playing = false;
    cancelAnimationFrame(this.frame);
    this._changed();
    this.go(this.step);
  }

  close() {
    this.playing = false;
    cancelAnimationFrame(this.frame);
    this.followers = [];
  }

  _tick() {
    this.frame = requestAnimationFrame((now) => {
      if (!this.playing) return;
      const next = this.step + 1;
      if (now >= this.due && this.readiness.every((ready) => ready(next))) {
        // what could not be shown in time is not made up for
        this.due = Math.max(this.due + 1000 / this.rate, now - 1000 / this.rate);
        this.go(next, { settled: false });
        if (next >= this.length - 1) return this.stop();
      }
      this._tick();
    });
  }

  _changed() {
    this.onplay?.(this.playing);
  }
}
