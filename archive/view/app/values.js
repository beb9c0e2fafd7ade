// What all fields hold at the step that is looked at, as texts.

import { ask } from "./api.js";
import { cut, el, fill } from "./dom.js";
import { Newest } from "./newest.js";

const WAIT_MS = 120;

export class Values {
  constructor(given, cursor) {
    Object.assign(this, { given, cursor });
    this.newest = new Newest(WAIT_MS);
    this.body = el("tbody");
    this.title = el("h3");
    this.node = el("section.at-step", { "aria-label": "Values at the step" }, this.title, el("table.plain", this.body));
    this.unfollow = cursor.follow((step) => this.show(step));
    this.show(cursor.step);
  }

  close() {
    this.unfollow();
    this.newest.close();
  }

  show(step) {
    fill(this.title, `Step ${step}`);
    this.newest.wait();
    if (this.cursor.playing) return; // the curves tell their values; all the rest when it stands still
    this.newest.ask((signal) => this._load(step, signal));
  }

  async _load(step, signal) {
    try {
      const found = await ask("steps", { ...this.given, start: step, stop: step + 1 }, signal);
      fill(
        this.body,
        Object.entries(found.values).map(([name, texts]) =>
          el("tr", el("th", { scope: "row" }, cut(name, 60)), el("td", el("code", cut(texts[0] ?? "", 20_000)))),
        ),
        found.more ? el("tr", el("td.quiet-text", { colspan: 2 }, `and ${found.more} more fields`)) : null,
      );
    } catch (error) {
      if (error.name !== "AbortError") fill(this.body, el("tr", el("td.error-text", error.message)));
    }
  }
}
