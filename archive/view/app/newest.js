// The newest of several questions: it waits a moment, as whoever scrubs on does not want what was passed by, and takes
// back the one before.

export class Newest {
  constructor(waitMs) {
    this.waitMs = waitMs;
  }

  /** load(signal): asks, once it has waited. */
  ask(load) {
    this.wait();
    this.timer = setTimeout(() => {
      this.asking?.abort();
      this.asking = new AbortController();
      load(this.asking.signal);
    }, this.waitMs);
  }

  /** Nothing that waits is asked any more. */
  wait() {
    clearTimeout(this.timer);
  }

  close() {
    this.wait();
    this.asking?.abort();
  }
}

/** Signals of turns: each ends the one before, and all end with `signal`. */
export function turns(signal) {
  let now = new AbortController();
  return () => {
    now.abort();
    now = new AbortController();
    return AbortSignal.any([signal, now.signal]);
  };
}
