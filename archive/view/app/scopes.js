// Which episodes are meant: of a run, of a checkpoint, by weights; each can be taken back.

import { ask } from "./api.js";
import { cut, el, fill } from "./dom.js";

export class Scopes {
  constructor(about, given, onchange) {
    Object.assign(this, { about, onchange });
    this.run = el("select", { "aria-label": "Run", onchange: () => onchange({ run: this.run.value, checkpoint: "" }) });
    this.checkpoint = el("select", {
      "aria-label": "Checkpoint",
      onchange: () => onchange({ checkpoint: this.checkpoint.value }),
      onfocus: () => this.list(),
    });
    this.chips = el("span.chips");
    this.node = el("div.scopes", this.run, this.checkpoint, this.chips);
    this.set(given);
  }

  set(given) {
    this.given = given;
    const runs = this.about.runs.map((name) => el("option", { value: name }, cut(name, 60)));
    fill(this.run, el("option", { value: "" }, "all runs"), runs);
    this.run.value = given.run ?? "";
    this.run.hidden = this.about.runs.length < 2 && !given.run;
    this.options(given.checkpoint ? [{ number: given.checkpoint, name: `commit ${given.checkpoint}` }] : []);
    fill(
      this.chips,
      ["weights", "buffer", "commit"].filter((name) => given[name]).map((name) => this.chip(name, given[name])),
    );
  }

  options(found) {
    const now = this.given.checkpoint ?? "";
    const listed = found.map((one) => el("option", { value: one.number }, cut(one.name, 60)));
    fill(this.checkpoint, el("option", { value: "" }, "all ever archived"), listed);
    this.checkpoint.value = now;
  }

  /** The checkpoints are asked for when somebody wants one. */
  async list() {
    const found = await ask("checkpoints", { commit: this.given.commit, run: this.given.run }).catch(() => null);
    if (found)
      this.options(
        found.map((one) => ({ number: one.commit, name: `${one.name}${this.given.run ? "" : ` (${one.run})`}` })),
      );
  }

  chip(name, value) {
    const told = `${name} ${value}`;
    return el(
      "button.chip",
      { "aria-label": `No longer only ${told}`, title: told, onclick: () => this.onchange({ [name]: "" }) },
      cut(told, 28),
      " ×",
    );
  }
}
