// The page of all episodes: a condition, how their numbers are spread, and the table.

import * as address from "./address.js";
import { ask, askTable, Refused } from "./api.js";
import { histogram } from "./bars.js";
import { Conditions } from "./conditions.js";
import { add, el, fill } from "./dom.js";
import * as format from "./format.js";
import { Grid } from "./grid.js";
import * as keys from "./keys.js";
import { LabelMany } from "./labelmany.js";
import { saved } from "./saved.js";
import { Scopes } from "./scopes.js";
import { turns } from "./newest.js";
import { failed } from "./status.js";
import { Strip } from "./strip.js";

const TITLES = {
  episode_id: "episode",
  update_count_min: "updates from",
  update_count_max: "update count",
  model_weights_uuids: "weights",
  created_at: "written (UTC)",
  env_id: "env",
};
const WIDTHS = { text: 112, number: 84, flag: 84, time: 172, list: 112, json: 200, name: 224 };
const WIDE = { reason: 90, buffer: 90, run: 70, env_id: 70, rank: 70, commit: 80, length: 66, update_count_max: 112 };
const SHOWN = [
  "episode_id",
  "return",
  "length",
  "update_count_max",
  "model_weights_uuids",
  "complete",
  "run",
  "created_at",
];
const SPREAD = ["return", "length", "update_count_max", "model_weights_uuids"];
const FIRST_ROWS = 200;
const NEXT = 10; // rows after one that has left, of which the first that is still there is picked

export function title(name) {
  return TITLES[name] ?? name.replaceAll("_", " ");
}

export class Page {
  constructor(main, about, given, signal) {
    Object.assign(this, { about, given, signal, turn: turns(signal) });
    this.names();
    this.conditions = new Conditions({
      value: given.where ?? "",
      scope: () => address.scope({ ...this.given, where: "" }),
      onset: (where) => this.change({ where, row: "" }),
      onheld: () => this.grid.view.focus(),
    });
    this.scopes = new Scopes(about, given, (change) => this.change({ ...change, row: "" }));
    this.count = el("strong.count", { role: "status" });
    this.side = el("section", { "aria-label": "How they are spread" });
    this.labels = new LabelMany({
      scope: () => address.scope(this.given),
      count: () => this.grid.count,
      picked: () => this.grid.row(this.grid.picked)?.episode_id,
      arrived: async () => (await this.grid.known(this.grid.picked))?.episode_id,
      onwithout: (key) => this.filter("", `label.${key} is null`),
      onsaved: () => this.labelled().catch(failed),
      signal,
    });
    this.grid = new Grid({
      label: "Episodes",
      columns: this.columns(),
      format: (column, value) => format.cell(column.kind, value),
      load: (start, stop, signal) => this.rows(start, stop, signal),
      onopen: () => this.open(),
      onsort: (name) => this.sort(name),
      onpick: () => this.labels.show(),
      onview: (start, stop) => this.seen(start, stop),
      onfail: failed,
    });
    this.strip = new Strip({
      asked: () => ({ commit: this.given.commit, checkpoint: this.given.checkpoint }),
      onpick: (place) => this.grid.pick(place),
      signal,
    });
    this.pictures = el(
      "button.only-served",
      { "aria-keyshortcuts": "p", onclick: () => this.change({ pictures: this.given.pictures ? "" : "1" }) },
      "pictures",
    );
    fill(
      main,
      el(
        "div.episodes",
        el("h1.unseen", "Episodes"),
        el("div.bar", this.conditions.node, this.scopes.node, this.pictures, this.count),
        this.strip.node,
        this.grid.node,
        el("aside.side", this.labels.node, this.side),
      ), // Tab comes to the rows first
    );
    keys.bind("Episodes", [...this.keys(), ...this.labels.keys()], signal);
    signal.addEventListener("abort", () => this.close());
  }

  close() {
    this.labels.close();
    this.grid.close();
    this.strip.close();
  }

  /** The page draws a change of its condition or order itself. */
  update(given) {
    this.given = given;
    this.load();
    return true;
  }

  /** A newer commit is there: the rows are asked for again, where one looks stays in sight. */
  news(about) {
    this.about = about;
    this.names(); // somebody may have set a label that there was not
    return this.load("row");
  }

  /** Which columns are listed, and which are drawn. */
  names() {
    const { columns } = this.about;
    const labels = Object.keys(columns).filter((name) => name.startsWith("label."));
    const fixed = [...SHOWN.slice(0, 6), ...labels.slice(0, 6), ...SHOWN.slice(6)].filter((name) => name in columns);
    this.shown = [...fixed, ...(this.metadata ?? []).slice(0, 6)];
    this.spread = [...SPREAD, ...labels.slice(0, 8)];
  }

  keys() {
    const go = (place) => () => this.grid.pick(place());
    const [grid, last] = [this.grid, () => this.grid.count - 1];
    return [
      { keys: ["/"], does: "write a condition", soon: true, run: () => this.conditions.focus() },
      { keys: ["ArrowDown", "j"], does: "next episode", run: go(() => grid.picked + 1) },
      { keys: ["ArrowUp", "k"], does: "previous episode", run: go(() => grid.picked - 1) },
      { keys: ["PageDown"], does: "a page down", run: go(() => grid.picked + grid.page) },
      { keys: ["PageUp"], does: "a page up", run: go(() => grid.picked - grid.page) },
      { keys: ["Home"], does: "the first one", run: go(() => 0) },
      { keys: ["End"], does: "the last one", run: go(last) },
      { keys: ["p"], does: "first pictures of those in sight", run: () => this.pictures.click() },
      { keys: ["Enter"], does: "open the episode", run: () => this.open() },
      { keys: ["Escape"], does: "no condition", run: () => this.change({ where: "", row: "" }) },
    ];
  }

  columns() {
    return this.shown.map((name) => {
      const kind = name === "episode_id" ? "name" : (this.about.columns[name] ?? "text");
      return { name, title: title(name), kind, sortable: kind !== "list", width: WIDE[name] ?? WIDTHS[kind] ?? 120 };
    });
  }

  change(given) {
    address.turn(given);
  }

  sort(name) {
    const again = this.given.sort === name;
    // first the greatest, then the least, then as they were written
    const next = !again
      ? { sort: name, descending: "1" }
      : this.given.descending
        ? { sort: name, descending: "" }
        : { sort: "", descending: "" };
    this.change({ ...next, row: "" });
  }

  get asked() {
    const { sort, descending } = this.given;
    // the newest first, where nothing else is asked for
    return { ...address.scope(this.given), sort, descending: sort ? descending : "1" };
  }

  rows(start, stop, signal) {
    return askTable("episodes", { ...this.asked, start, stop, columns: this.shown }, signal);
  }

  /** Shows what is asked for by now; the picked row stays picked by `stay`: "row", or "next": where it has left, the next. */
  load(stay = "") {
    return (this.loading = this._load(stay, this.turn()));
  }

  async _load(stay, signal) {
    this.conditions.set(this.given.where ?? "");
    this.scopes.set(this.given);
    this.strip.node.hidden = !this.given.pictures;
    this.pictures.setAttribute("aria-pressed", String(Boolean(this.given.pictures)));
    try {
      if (!this.metadata) {
        const names = await ask("names", { ...address.scope(this.given), where: "" }, signal);
        this.metadata = names.filter((name) => name.startsWith("metadata."));
        this.names();
      }
      const first = await this.rows(0, FIRST_ROWS, signal);
      const { count, all } = first.facts;
      const sort = this.given.sort ? { name: this.given.sort, descending: this.given.descending === "1" } : null;
      const place = stay ? await this.stayed(stay, count, signal) : { picked: Number(this.given.row || -1) };
      this.grid.reset(count, { columns: this.columns(), sort, ...place });
      this.grid.give(0, first);
      this.conditions.held();
      this.labels.show();
      fill(
        this.count,
        count === all ? format.counted(all, "episode") : `${format.count(count)} of ${format.counted(all, "episode")}`,
      );
      if (saved?.left) add(this.count, `, ${saved.left}`);
      this.grid.say(count ? "" : all ? "No episode meets the condition." : "There are no episodes yet.");
    } catch (error) {
      if (error.name === "AbortError" && !this.signal.aborted) return this.loading; // by a newer one
      if (error instanceof Refused && error.status === 400 && this.given.where) this.conditions.refused(error.message);
      else failed(error);
      return undefined;
    }
    this.spreads(signal).catch(failed);
    this.leftOut(signal).catch(failed);
    this.labels.load();
    return undefined;
  }

  /** Says which episodes the condition leaves out because they have no value. */
  async leftOut(signal) {
    if (!this.given.where) return;
    const { notes } = await ask("check", address.scope(this.given), signal);
    this.conditions.told(notes.join("; "));
  }

  /** Where the rows are now that were in sight, and the one that was picked: others came before them, or left. */
  async stayed(stay, count, signal) {
    const { first, picked } = this.grid;
    const seen = picked >= 0 ? picked : Math.floor(first);
    if (picked < 0 && first < 1) return { picked };
    const rows = Array.from({ length: stay === "next" ? NEXT : 1 }, (_, i) => this.grid.row(seen + i)?.episode_id);
    const ids = rows.filter((id) => id !== undefined);
    const now = ids.length ? await ask("neighbours", { ...this.asked, ids }, signal) : { place: null };
    let place = { picked: stay === "next" ? Math.min(picked, count - 1) : -1 };
    if (now.place !== null) {
      const moved = now.place - seen - rows.indexOf(now.id);
      // at the top one wants to see what is new
      place = { picked: picked < 0 ? -1 : now.place, first: first < 1 ? first : first + moved };
    }
    return this.grid.picked === picked ? place : this.stayed(stay, count, signal); // somebody went on meanwhile
  }

  async spreads(signal) {
    const found = await ask("histograms", { ...address.scope(this.given), columns: this.spread }, signal);
    const bars = () => [...this.side.querySelectorAll("button, [role=button]")];
    const focused = bars().indexOf(document.activeElement);
    fill(
      this.side,
      this.spread
        .filter((name) => name in found)
        .map((name) =>
          histogram(name, title(name), found[name], (condition, value) => this.filter(name, condition, value)),
        ),
    );
    bars()[focused]?.focus();
  }

  /** Rows that came into sight: their pictures, where somebody wants them. */
  seen(start, stop) {
    if (!this.given.pictures) return;
    const rows = Array.from({ length: stop - start }, (_, i) => ({
      place: start + i,
      id: this.grid.row(start + i)?.episode_id,
    }));
    this.strip.show(
      rows.filter(({ id }) => id !== undefined),
      this.grid.picked,
    );
  }

  filter(name, condition, value) {
    if (condition === null || ` and ${this.given.where ?? ""} and `.includes(` and ${condition} and `)) return;
    if (name === "model_weights_uuids") this.change({ weights: value, row: "" });
    else this.change({ where: this.conditions.and(condition), row: "" });
  }

  /** Labels were saved: there may be columns that there were not. Who left the condition by it makes room for the next. */
  async labelled() {
    this.about = await ask("about", { commit: this.given.commit }, this.signal);
    this.names();
    await this.load("next");
  }

  async open() {
    const place = Math.max(0, this.grid.picked);
    const row = await this.grid.known(place);
    if (!row || this.signal.aborted) return;
    address.change({ row: place }); // "back" comes back to it
    const { sort, descending } = this.asked;
    const given = { ...address.scope(this.given), sort, descending, id: row.episode_id };
    keys.lead(() => address.go("episode", given));
  }
}
