// Episodes side by side: two that are compared, or those of a group; by step, or each in its own time.

import * as address from "./address.js";
import { ask } from "./api.js";
import { cut, el, fill } from "./dom.js";
import * as format from "./format.js";
import * as keys from "./keys.js";
import { Cursor, moves, player } from "./player.js";
import { Stage } from "./stage.js";
import { say } from "./status.js";

const MOST = 8;

export class Page {
  constructor(main, about, given, signal) {
    Object.assign(this, { main, given, signal });
    const { commit, checkpoint } = address.scope(given);
    this.asked = { commit, checkpoint };
    this.stages = [];
    signal.addEventListener("abort", () => this.close());
  }

  async load() {
    const ids = this._ids();
    const found = await Promise.all(ids.slice(0, MOST).map((id) => ask("episode", { ...this.asked, id }, this.signal)));
    if (!found.length)
      return void fill(this.main, el("p", "There are no episodes to compare: mark one by x, another by x."));
    const longest = Math.max(1, ...found.map((one) => one.length));
    this.cursor = new Cursor(longest, Number(this.given.step ?? 0) || 0);
    const by = el(
      "select",
      { "aria-label": "In step, or in time", onchange: () => this.by(by.value) },
      el("option", { value: "step" }, "in step"),
      el("option", { value: "time" }, "each in its own time"),
    );
    by.value = this.given.by === "time" ? "time" : "step";
    this.way = by.value;
    const columns = el("div.columns");
    fill(
      this.main,
      el(
        "article.together",
        el(
          "header.head",
          el("h1", `${found.length} side by side`),
          by,
          ids.length > MOST ? el("span.quiet-text", `the first of ${ids.length}`) : null,
        ),
        player(this.cursor),
        columns,
      ),
    );
    const back = { keys: ["Escape"], does: "back", run: () => history.back() };
    keys.bind("Side by side", [...moves(this.cursor), back], this.signal);
    for (const one of found) columns.append(this._column(one));
    this.cursor.follow((step, how) => this.lead(step, how));
    // it plays on when all can be shown
    for (const { stage } of this.stages)
      this.cursor.readiness.push((step) =>
        stage.cursor.readiness.every((ready) => ready(this._of(stage.cursor, step))),
      );
    this.lead(this.cursor.step, { settled: true });
    Promise.all(this.stages.map(({ stage }) => stage.load())).then(() => columns.parentNode.classList.add("ready"));
    return undefined;
  }

  close() {
    for (const { stage } of this.stages) {
      stage.close();
      stage.cursor.close();
    }
    this.cursor?.close();
  }

  by(way) {
    this.way = way;
    address.change({ by: way });
    this.lead(this.cursor.step, { settled: true });
  }

  lead(step, how) {
    this.leading = true;
    for (const { stage } of this.stages) {
      stage.cursor.playing = this.cursor.playing; // so that pictures are fetched ahead
      stage.cursor.go(this._of(stage.cursor, step), how);
    }
    this.leading = false;
    if (how.settled) address.change({ step });
  }

  /** The step of an episode that goes with one of the longest. */
  _of(cursor, step) {
    if (this.way === "step") return Math.min(step, cursor.length - 1);
    return Math.round((step / Math.max(1, this.cursor.length - 1)) * (cursor.length - 1));
  }

  _column(found) {
    const asked = { ...this.asked, id: found.id };
    const stage = new Stage(asked, found, new Cursor(Math.max(1, found.length)), { signal: this.signal });
    const at = el("span.quiet-text");
    stage.cursor.follow((step) => {
      fill(at, `step ${step} of ${found.length}`);
      // a press on a curve or a turn of one leads all
      if (!this.leading) this.cursor.by(this._back(stage.cursor, step) - this.cursor.step);
    });
    this.stages.push({ stage });
    const labels = Object.entries(found.labels)
      .map(([key, value]) => `${key} ${value}`)
      .join(", ");
    return el(
      "section.column",
      { "aria-label": `Episode ${cut(found.id, 80)}` },
      el("h2", el("a", { href: address.of("episode", asked), title: found.id }, format.name(found.id, 34))),
      el(
        "p.quiet-text",
        `return ${format.number(found.about.return ?? null)}${labels ? ` · ${cut(labels, 80)}` : ""} · `,
        at,
      ),
      stage.films,
      stage.talk,
      stage.charts,
    );
  }

  _back(cursor, step) {
    if (this.way === "step") return step;
    return Math.round((step / Math.max(1, cursor.length - 1)) * (this.cursor.length - 1));
  }

  _ids() {
    try {
      const ids = JSON.parse(this.given.ids ?? "[]");
      return Array.isArray(ids) ? ids.filter((id) => typeof id === "string") : [];
    } catch {
      say("this link names no episodes", { error: true });
      return [];
    }
  }
}
