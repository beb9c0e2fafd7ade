// An episode as it is played: its pictures, what was said, its curves. All follow one cursor.

import { ask } from "./api.js";
import { Chart } from "./charts.js";
import { cut, el, fill } from "./dom.js";
import { Exact } from "./exact.js";
import { Film } from "./films.js";
import * as keys from "./keys.js";
import { failed, say } from "./status.js";
import { talk } from "./talk.js";
import { changing, Weights } from "./weights.js";

export class Stage {
  /** asked: commit, checkpoint and id; found: the answer to "episode"; gamma: the discount; ongamma(text): another;
   * keyed: it is alone, and its tokens have keys. What is asked is taken back by `signal`. */
  constructor(asked, found, cursor, { gamma = "", ongamma = () => {}, keyed = false, signal }) {
    Object.assign(this, { asked, found, cursor, gamma, ongamma, signal, open: [] });
    this.derived = el("div.charts");
    this.films = el("div.films");
    this.talk = el("div.talk");
    this.charts = el("div.charts");
    for (const field of found.fields.filter((one) => one.kind === "frames"))
      this._keep(this.films, new Film(field.name, asked, cursor));
    if (keyed && this._spoken) keys.bind("Conversation", this._keys(), signal);
  }

  /** What follows the pictures, which come first. */
  async load() {
    await Promise.all([this._curves(), (this.talking = this._talk())]);
  }

  /** Whether it may be a rollout. */
  get _spoken() {
    return this.found.fields.some(({ kind, name }) => ["tokens", "text"].includes(kind) || /tokens|_ids$/.test(name));
  }

  _keys() {
    const token = (way) => async () => (await this.talking)?.token(way); // a key may come before it is drawn
    return [
      { keys: ["."], does: "next token, and what is known of it", run: token(1) },
      { keys: [","], does: "the token before", run: token(-1) },
    ];
  }

  close() {
    for (const one of this.open) one.close();
    this.open = [];
  }

  get _charted() {
    return this.open.filter((one) => one instanceof Chart);
  }

  _keep(node, part) {
    this.open.push(part);
    node.append(part.node);
  }

  async _talk() {
    if (!this._spoken) return null;
    const made = await talk(this.asked, this.cursor, this.signal).catch(failed);
    if (made) this._keep(this.talk, made);
    return made;
  }

  async _curves() {
    if (changing(this.found.parts))
      this._keep(this.charts, new Weights(this.found.parts, this.found.length, this.cursor));
    const found = await this._ask({});
    if (!found) return;
    this._draw(
      this.charts,
      found.curves.filter((line) => !line.derived),
    );
    this.charts.append(this.derived);
    this._draw(
      this.derived,
      found.curves.filter((line) => line.derived),
    );
    if (found.curves.some((line) => line.x)) this.exact = this._exact();
    const left = found.left_out;
    if (left.length)
      this.charts.append(el("p.quiet-text", `and ${left.length} more fields of numbers: ${cut(left.join(", "), 300)}`));
  }

  _ask(given) {
    return ask("curves", { ...this.asked, gamma: this.gamma, ...given }, this.signal).catch(failed);
  }

  _draw(node, lines) {
    const byField = new Map();
    for (const line of lines) byField.set(line.field, [...(byField.get(line.field) ?? []), line]);
    for (const [field, own] of byField) {
      const chart = new Chart(field, own, this.found.length, this.cursor);
      if (field.startsWith("discounted ")) chart.controls.append(this._discount(field.slice("discounted ".length)));
      this._keep(node, chart);
    }
  }

  _exact() {
    const exact = new Exact(
      this.asked,
      this.cursor,
      () => this._charted,
      () => ({ gamma: this.gamma }),
    );
    this.open.push(exact);
    return exact;
  }

  _discount(value) {
    const field = el("input", {
      type: "number",
      min: 0,
      max: 1,
      step: "any",
      value,
      class: "discount",
      "aria-label": "Discount of the return",
      onchange: () => this._discounted(field),
      onkeydown: (event) => event.key === "Enter" && field.blur(),
    });
    return field;
  }

  /** The return by another discount is drawn in the place of the one before. */
  async _discounted(field) {
    if (!field.checkValidity() || field.value === "")
      return void say(`discount: ${field.validationMessage || "a number from 0 to 1"}`, { error: true });
    this.gamma = field.value;
    this.ongamma(this.gamma);
    const found = await this._ask({ fields: ["reward"] });
    if (!found) return undefined;
    for (const chart of this._charted.filter((one) => this.derived.contains(one.node))) {
      chart.close();
      this.open.splice(this.open.indexOf(chart), 1);
    }
    fill(this.derived);
    this._draw(
      this.derived,
      found.curves.filter((line) => line.derived),
    );
    this.exact?.renew();
    return undefined;
  }
}
