// The page of one episode: pictures, curves and words in step, and all that is known of it beside them.

import * as address from "./address.js";
import { ask } from "./api.js";
import { cut, el, fill } from "./dom.js";
import * as facts from "./facts.js";
import * as format from "./format.js";
import * as keys from "./keys.js";
import { book } from "./labelbook.js";
import { Labels } from "./labels.js";
import { turns } from "./newest.js";
import { Cursor, moves, player } from "./player.js";
import { RawTable } from "./rawtable.js";
import { Stage } from "./stage.js";
import { failed, say } from "./status.js";
import { Values } from "./values.js";

const ADDRESS_MS = 250; // after which the address has the step, too

let marked = null; // the episode that is compared with the next one

export class Page {
  constructor(main, about, given, signal) {
    Object.assign(this, { main, given, left: signal, turn: turns(signal), open: [] });
    this.scope = address.scope(given);
    // an episode is found in all of the commit or checkpoint; the condition says who its neighbours are
    const { commit, checkpoint } = this.scope;
    this.asked = { commit, checkpoint, id: given.id };
  }

  async load() {
    this.draw(await ask("episode", this.asked, this.left));
  }

  /** Draws it, and lets go of what was drawn before; curves, words and its place among others come when they are there. */
  draw(found) {
    const signal = (this.signal = this.turn());
    signal.addEventListener("abort", () => this.close());
    this.found = found;
    this.cursor = new Cursor(Math.max(1, found.length), _step(this.given));
    const ongamma = (gamma) => this.keepInAddress({ gamma });
    this.side = el("aside.beside", { "aria-label": "About the episode" });
    this.place = el("span.place");
    this.raw = el("div");
    this.labels = new Labels({
      scope: () => ({ ...this.scope, commit: "" }),
      onwithout: (key) => this.without(key),
      signal,
    });
    keys.bind("Episode", [...moves(this.cursor), ...this.keys(), ...this.labels.keys()], signal);
    this.stage = new Stage(this.asked, found, this.cursor, { gamma: this.given.gamma, ongamma, keyed: true, signal });
    this.open.push(this.stage, this.cursor);
    fill(
      this.main,
      el(
        "article.episode",
        this.head(),
        el("div.stage", this.stage.films, player(this.cursor), this.stage.talk, this.stage.charts, this.raw),
        this.side,
      ),
    );
    this.cursor.follow((step, { settled }) => this.settle(step, settled));
    this.tell();
    if (this.given.field) this.valuesOf(this.given.field);
    this.neighbouring = this.neighbours();
    this.grouping = this.group();
    const article = this.side.parentNode;
    Promise.all([this.stage.load(), this.neighbouring, this.grouping]).then(() => article.classList.add("ready"));
  }

  close() {
    clearTimeout(this.timer);
    for (const one of this.open) one.close();
    this.open = [];
  }

  /** A newer commit is there: shown anew, at the step that is looked at, where something of it has changed. */
  async news() {
    const found = await ask("episode", this.asked, this.left);
    const told = ({ length, labels, about, parts }) => JSON.stringify([length, labels, about, parts]);
    if (told(found) === told(this.found)) return void (this.neighbouring = this.neighbours());
    await this.written();
    const { step, playing, length } = this.cursor;
    const atEnd = step >= length - 1 && found.length > length;
    this.given = { ...this.given, step: atEnd ? found.length - 1 : step };
    this.draw(found);
    if (playing) this.cursor.play();
    if (found.length !== length) say(`it has ${format.counted(found.length, "step")} now`);
    return undefined;
  }

  /** Once nobody writes into a field of it. */
  async written() {
    const field = document.activeElement;
    if (!this.main.contains(field) || !keys.typing(field)) return;
    await new Promise((done) => {
      field.addEventListener("blur", done);
      this.left.addEventListener("abort", done); // a field that goes with its page may not say so
    });
    this.left.throwIfAborted();
  }

  keepInAddress(given) {
    this.given = { ...this.given, ...given };
    address.change(given);
  }

  /** The values of a field as a table below the curves; of the one that is shown, no longer. */
  valuesOf(field) {
    const shown = this.table?.field;
    if (this.table) this.open.splice(this.open.indexOf(this.table), 1);
    this.table?.close();
    this.table = null;
    fill(this.raw);
    this.keepInAddress({ field: field === shown ? "" : field });
    if (field === shown) return;
    const onfield = (name) => this.keepInAddress({ field: name });
    this.table = new RawTable(this.asked, this.found.fields, this.cursor, field, onfield);
    this.keep(this.raw, this.table);
  }

  keep(node, part) {
    this.open.push(part);
    node.append(part.node);
  }

  /** The address of the table that it is from, where it is the picked row. */
  origin() {
    const { sort, descending } = this.given;
    const row = sort || descending ? this.around?.place : null; // who came by a link has another order
    return address.of("episodes", { ...this.scope, sort, descending, row });
  }

  head() {
    this.back = el("a", { href: this.origin(), class: "back only-served" }, "← episodes");
    const to = (way, title, mark) => el("button", { onclick: () => this.beside(way), "aria-label": title }, mark);
    return el(
      "header.head",
      this.back,
      el("h1", cut(this.found.id, 200)),
      this.place,
      to("before", "Previous episode", "↑"),
      to("after", "Next episode", "↓"),
    );
  }

  keys() {
    return [
      { keys: ["ArrowUp", "k"], does: "previous episode", run: () => this.beside("before") },
      { keys: ["ArrowDown", "j"], does: "next episode", run: () => this.beside("after") },
      { keys: ["]"], does: "next of its group, as of the same prompt", run: () => this.member(1) },
      { keys: ["["], does: "the one before of its group", run: () => this.member(-1) },
      {
        keys: ["g"],
        does: "its group side by side",
        run: async () => {
          await this.grouping;
          if (this.grouped) this.go("together", this.grouped);
          else say("it is in no group");
        },
      },
      {
        keys: ["t"],
        does: "the values of a field as a table, or no longer",
        run: () => this.found.fields.length && this.valuesOf(this.table?.field ?? this.found.fields[0].name),
      },
      { keys: ["x"], does: "compare: this one, and the one where x is pressed next", run: () => this.compare() },
      { keys: ["m"], does: "next episode without a label", run: () => this.unlabelled() },
      { keys: ["Escape"], does: "back to the episodes", run: () => address.open(this.origin()) },
    ];
  }

  async neighbours() {
    const { sort, descending } = this.given;
    try {
      this.around = await ask("neighbours", { ...this.scope, sort, descending, id: this.given.id }, this.signal);
      this.back.href = this.origin();
      fill(this.place, `${format.count(this.around.place + 1)} of ${format.count(this.around.count)}`);
    } catch (error) {
      if (error.name !== "AbortError") fill(this.place, "not among those of the condition");
    }
  }

  /** Another page, unless this one was left meanwhile. */
  go(name, given) {
    if (!this.left.aborted) keys.lead(() => address.go(name, given));
  }

  async beside(way) {
    await this.neighbouring; // a key may come before it is known who they are
    const id = this.around?.[way];
    if (id === undefined || id === null) say(way === "after" ? "this is the last one" : "this is the first one");
    else this.go("episode", { ...this.given, id, step: "" });
  }

  /** The others of the same prompt, to go to, or to see side by side. */
  async group() {
    const found = await ask("group", { ...this.asked, by: this.given.group }, this.signal).catch(() => null);
    if (!found?.members || found.members.length < 2) return;
    this.members = found.members.map((one) => one.id);
    const to = (id) => address.of("episode", { ...this.given, id, step: "" });
    const rows = found.members.map((one) =>
      el(
        "li",
        el(
          "a",
          { href: to(one.id), "aria-current": one.id === this.given.id ? "true" : null, title: one.id },
          format.name(one.id, 26),
        ),
        el("span.number", format.number(one.return)),
      ),
    );
    const ids = JSON.stringify([this.given.id, ...this.members.filter((id) => id !== this.given.id)].slice(0, 8));
    const { commit, checkpoint } = this.asked;
    const count = found.members.length + found.more;
    this.grouped = { commit, checkpoint, ids };
    this.side.insertBefore(
      el(
        "details",
        { open: true },
        el("summary", `${count} of the same ${cut(found.by, 30)}`),
        el("a", { href: address.of("together", this.grouped), "aria-keyshortcuts": "g" }, "side by side"),
        el("ul.members", rows),
      ),
      this.values,
    );
  }

  /** The next of the group, or the one before. */
  async member(way) {
    await this.grouping;
    const id = this.members?.[this.members.indexOf(this.given.id) + way];
    if (id === undefined)
      say(this.members ? `this is the ${way > 0 ? "last" : "first"} of its group` : "it is in no group");
    else this.go("episode", { ...this.given, id, step: "" });
  }

  /** Marks this one for a comparison; with one that was marked before, shows both. */
  compare() {
    const before = marked;
    const { commit, checkpoint } = this.asked;
    if (!before || before === this.given.id) {
      marked = this.given.id;
      say("marked: press x at another episode to see both side by side");
      return;
    }
    marked = null;
    address.go("together", { commit, checkpoint, ids: JSON.stringify([before, this.given.id]) });
  }

  async unlabelled() {
    await Promise.all([book.save(), this.labels.loading]);
    const { key } = this.labels;
    const { sort, descending } = this.given;
    const found = await ask("unlabelled", { ...this.scope, sort, descending, id: this.given.id, key }, this.left);
    if (found.id) this.go("episode", { ...this.given, id: found.id, step: "" });
    else say(`all of them have the label ${key}`);
  }

  /** Those of the condition that lack a label. */
  without(key) {
    const { where, ...scope } = this.scope;
    const condition = `label.${key} is null`;
    address.go("episodes", { ...scope, where: where ? `(${where}) and ${condition}` : condition });
  }

  tell() {
    this.keep(this.side, this.labels);
    this.labels.of({ id: this.found.id, labels: this.found.labels });
    this.labels.load().catch(failed);
    const values = new Values(this.asked, this.cursor);
    this.keep(this.side, values);
    this.values = values.node;
    const { about, parts, fields, more_fields: more } = this.found;
    const section = (title, open, ...nodes) => el("details", { open }, el("summary", title), nodes);
    this.side.append(
      section("About", true, facts.facts(about)),
      section("Which weights made which steps", parts.length > 1, facts.parts(parts, this.cursor)),
    );
    const { whole = {}, left_out: left } = this.found; // of a page that was saved
    if (Object.keys(whole).length) this.side.append(section("Of the whole episode", true, facts.facts(whole)));
    if (left)
      this.side.prepend(
        el(
          "section.left",
          el("h3", left.why),
          el(
            "ul",
            left.what.map((one) => el("li", one)),
          ),
        ),
      );
    const trees = facts.trees(this.found);
    if (trees.length) this.side.append(section("Metadata", true, trees));
    this.side.append(
      section(
        format.counted(fields.length + more, "field"),
        false,
        facts.fields(fields, more, (name) => this.valuesOf(name)),
      ),
    );
  }

  settle(step, settled) {
    clearTimeout(this.timer);
    if (settled) this.timer = setTimeout(() => address.change({ step }), ADDRESS_MS);
  }
}

function _step(given) {
  const step = Number(given.step ?? 0);
  return Number.isInteger(step) ? step : 0;
}
