// An episode as it is played: its pictures, what was said, its curves. All follow one cursor.

import { ask } from "./api.js";
import { Chart } from "./curves.js";
import { cut, el } from "./dom.js";
import { Film } from "./films.js";
import { say } from "./status.js";
import { talk } from "./talk.js";

export class Stage {
  /** asked: commit, checkpoint and id; found: the answer to "episode". */
  constructor(asked, found, cursor) {
    Object.assign(this, { asked, found, cursor, open: [] });
    this.films = el("div", { class: "films" });
    this.talk = el("div", { class: "talk" });
    this.charts = el("div", { class: "charts" });
    for (const field of found.fields.filter((one) => one.kind === "frames")) this._keep(this.films, new Film(field.name, asked, cursor));
  }

  /** What follows the pictures, which come first. */
  async load() {
    await Promise.all([this._curves(), this._talk()]);
  }

  close() {
    for (const one of this.open) one.close();
    this.open = [];
  }

  _keep(node, part) {
    this.open.push(part);
    node.append(part.node);
  }

  async _talk() {
    if (!this.found.fields.some((one) => one.kind === "tokens" || one.kind === "text" || /tokens|_ids$/.test(one.name))) return;
    const made = await talk(this.asked, this.cursor).catch((error) => say(error.message, { error: true }));
    if (made) this._keep(this.talk, made);
  }

  async _curves() {
    const found = await ask("curves", this.asked).catch((error) => say(error.message, { error: true }));
    if (!found) return;
    const byField = new Map();
    for (const line of found.curves) byField.set(line.field, [...(byField.get(line.field) ?? []), line]);
    for (const [field, lines] of byField) this._keep(this.charts, new Chart(field, lines, found.length, this.cursor));
    const left = found.left_out;
    if (left.length) this.charts.append(el("p", { class: "quiet-text" }, `and ${left.length} more fields of numbers: ${cut(left.join(", "), 300)}`));
  }
}
