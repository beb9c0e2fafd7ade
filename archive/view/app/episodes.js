// The page of all episodes: a condition, how their numbers are spread, and the table.

import * as address from "./address.js";
import { ask, askTable, Refused } from "./api.js";
import { histogram } from "./bars.js";
import { Conditions } from "./conditions.js";
import { el, fill } from "./dom.js";
import * as format from "./format.js";
import { Grid } from "./grid.js";
import * as keys from "./keys.js";
import { LabelMany } from "./labelmany.js";
import { Scopes } from "./scopes.js";
import { say } from "./status.js";
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

let page = null;

export async function show(main, about, given) {
  page = new Episodes(about, given);
  fill(main, page.node);
  await page.load();
  return () => {
    page.close();
    page = null;
  };
}

/** The page draws a change of its condition or order itself. */
export function update(given) {
  page.given = given;
  page.load();
  return true;
}

/** A newer commit is there: the rows are asked for again, where one looks stays in sight. */
export function news(about) {
  page.about = about;
  page.names(); // somebody may have set a label that there was not
  return page.load({ stay: true });
}

export function title(name) {
  return TITLES[name] ?? name.replaceAll("_", " ");
}

class Episodes {
  constructor(about, given) {
    Object.assign(this, { about, given });
    this.names();
    this.conditions = new Conditions({
      value: given.where ?? "",
      scope: () => address.scope({ ...this.given, where: "" }),
      onset: (where) => this.change({ where, row: "" }),
      onheld: () => this.grid.view.focus(),
    });
    this.scopes = new Scopes(about, given, (change) => this.change({ ...change, row: "" }));
    this.count = el("strong", { class: "count", role: "status" });
    this.side = el("section", { "aria-label": "How they are spread" });
    this.labels = new LabelMany({
      scope: () => address.scope(this.given),
      count: () => this.grid.count,
      picked: () => this.grid.row(this.grid.picked)?.episode_id,
      onwithout: (key) => this.filter("", `label.${key} is null`),
      onsaved: () => this.labelled(),
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
      onfail: (error) => say(error.message, { error: true }),
    });
    this.strip = new Strip({
      asked: () => ({ commit: this.given.commit, checkpoint: this.given.checkpoint }),
      onpick: (place) => this.grid.pick(place),
    });
    this.pictures = el(
      "button",
      { "aria-keyshortcuts": "p", onclick: () => this.change({ pictures: this.given.pictures ? "" : "1" }) },
      "pictures",
    );
    this.node = el(
      "div",
      { class: "episodes" },
      el("h1", { class: "unseen" }, "Episodes"),
      el("div", { class: "bar" }, this.conditions.node, this.scopes.node, this.pictures, this.count),
      this.strip.node,
      this.grid.node,
      el("aside", { class: "side" }, this.labels.node, this.side),
    ); // Tab comes to the rows first
    this.unbind = keys.bind("Episodes", [...this.keys(), ...this.labels.keys()]);
  }

  /** Which columns are listed, and which are drawn. */
  names() {
    const { columns } = this.about;
    const labels = Object.keys(columns).filter((name) => name.startsWith("label."));
    this.shown = [...SHOWN.slice(0, 6), ...labels.slice(0, 6), ...SHOWN.slice(6)].filter((name) => name in columns);
    this.spread = [...SPREAD, ...labels.slice(0, 8)];
  }

  close() {
    this.unbind();
    this.labels.close();
    this.grid.close();
    this.strip.close();
  }

  keys() {
    const go = (place) => () => this.grid.pick(place());
    const [grid, last] = [this.grid, () => this.grid.count - 1];
    return [
      { keys: ["/"], does: "write a condition", run: () => this.conditions.focus() },
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
      const kind = name === "episode_id" ? "name" : this.about.columns[name];
      return { name, title: title(name), kind, sortable: kind !== "list", width: WIDE[name] ?? WIDTHS[kind] ?? 120 };
    });
  }

  change(given) {
    address.change(given, { entry: true });
    dispatchEvent(new PopStateEvent("popstate"));
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

  async load({ stay = false } = {}) {
    this.asking?.abort();
    const stopped = (this.asking = new AbortController());
    this.conditions.set(this.given.where ?? "");
    this.scopes.set(this.given);
    this.strip.node.hidden = !this.given.pictures;
    this.pictures.setAttribute("aria-pressed", String(Boolean(this.given.pictures)));
    try {
      const first = await this.rows(0, FIRST_ROWS, stopped.signal);
      const sort = this.given.sort ? { name: this.given.sort, descending: this.given.descending === "1" } : null;
      const same = { picked: Math.min(this.grid.picked, first.facts.count - 1) };
      const place =
        stay === "place" ? same : stay ? await this.stayed(stopped.signal) : { picked: Number(this.given.row || -1) };
      this.grid.reset(first.facts.count, { columns: this.columns(), sort, ...place });
      this.grid.give(0, first);
      this.conditions.held();
      this.labels.show();
      const { count, all } = first.facts;
      fill(
        this.count,
        count === all ? format.counted(all, "episode") : `${format.count(count)} of ${format.counted(all, "episode")}`,
      );
      this.grid.say(count ? "" : all ? "No episode meets the condition." : "There are no episodes yet.");
      await Promise.all([this.spreads(stopped.signal), this.labels.load()]);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error instanceof Refused && error.status === 400 && this.given.where) this.conditions.refused(error.message);
      else say(error.message, { error: true });
    }
  }

  /** Where the rows are now that were in sight, and the one that was picked: newer ones came before them. */
  async stayed(signal) {
    const { first, picked } = this.grid;
    const seen = picked >= 0 ? picked : Math.floor(first);
    const id = this.grid.row(seen)?.episode_id;
    if (id === undefined || (picked < 0 && first < 1)) return { picked };
    const now = await ask("neighbours", { ...this.asked, id }, signal).catch(() => null);
    if (!now) return { picked: -1 };
    // at the top one wants to see what is new
    return { picked: picked < 0 ? -1 : now.place, first: first < 1 ? first : first + now.place - seen };
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
    this.about = await ask("about", { commit: this.given.commit });
    this.names();
    await this.load({ stay: "place" });
  }

  open() {
    const row = this.grid.row(Math.max(0, this.grid.picked));
    if (!row) return;
    address.change({ row: Math.max(0, this.grid.picked) }); // "back" comes back to it
    const { sort, descending } = this.asked;
    address.go("episode", { ...address.scope(this.given), sort, descending, id: row.episode_id });
  }
}
