// Any field as a table of its values: the rows around the cursor, as many columns as can be read; all others by paging.

import { ask } from "./api.js";
import { cut, el, fill } from "./dom.js";
import * as format from "./format.js";
import { Newest } from "./newest.js";

const [BEFORE, ROWS, PAGE] = [3, 14, 48];
const WAIT_MS = 120;

export class RawTable {
  /** fields: those of the episode; onfield(name): another is shown. */
  constructor(asked, fields, cursor, field, onfield) {
    Object.assign(this, { asked, cursor, field, column: 0, first: 0 });
    this.newest = new Newest(WAIT_MS);
    this.choice = el(
      "select",
      {
        "aria-label": "Field",
        onchange: () => {
          this.pick(this.choice.value);
          onfield(this.choice.value);
        },
      },
      fields.map((one) => el("option", { value: one.name }, cut(one.name, 60))),
    );
    this.told = el("span.quiet-text");
    this.pages = el("span.pages");
    this.head = el("tr");
    this.body = el("tbody");
    this.node = el(
      "section.raw",
      { "aria-label": "Values of a field" },
      el("header", el("strong", "Values of "), this.choice, this.told, this.pages),
      el("div.raw-room", { tabindex: 0 }, el("table.raw-table", el("thead", this.head), this.body)),
    );
    this.unfollow = cursor.follow(() => this._later());
    this.pick(field);
  }

  close() {
    this.unfollow();
    this.newest.close();
  }

  pick(field) {
    Object.assign(this, { field, column: 0, first: 0, free: false });
    this.choice.value = field;
    this._later();
  }

  _later() {
    if (this.cursor.playing) this.newest.wait();
    else this.newest.ask((signal) => this._load(signal));
  }

  async _load(signal) {
    const last = Math.max(0, this.cursor.length - ROWS);
    const start = this.free ? this.first : Math.min(last, Math.max(0, this.cursor.step - BEFORE));
    try {
      const asked = { ...this.asked, field: this.field, start, stop: start + ROWS, column: this.column };
      this._show(await ask("field-rows", asked, signal));
    } catch (error) {
      if (error.name !== "AbortError") fill(this.body, el("tr", el("td.error-text", error.message)));
    }
  }

  _show(found) {
    const free = !found.steps; // its rows are no steps: they are paged, and begin with the first
    if (free && !this.free && found.start) {
      this.free = true;
      return this._later();
    }
    this.free = free;
    const heads = found.columns.map((name) => el("th", { scope: "col" }, name === "" ? "value" : name));
    fill(this.told, found.told);
    fill(this.head, el("th", { scope: "col" }, found.steps ? "step" : "row"), heads);
    fill(
      this.body,
      found.rows.map((texts, i) => {
        const row = found.start + i;
        const now = found.steps && row === this.cursor.step;
        const name = found.steps
          ? el("button.quiet", { onclick: () => this.cursor.by(row - this.cursor.step) }, row)
          : row;
        return el(
          "tr",
          { "aria-current": now ? "true" : null },
          el("th", { scope: "row" }, name),
          texts.map((text) => el("td", cut(text, 300))),
        );
      }),
    );
    if (!this.seen) this.node.scrollIntoView({ block: "nearest" });
    this.seen = true;
    fill(
      this.pages,
      this._paging(found.all_columns, found.columns.length, PAGE, this.column, "columns", (to) => {
        this.column = to;
      }),
      this.free
        ? this._paging(found.count, found.rows.length, ROWS, this.first, "rows", (to) => {
            this.first = to;
          })
        : null,
    );
    return undefined;
  }

  _paging(count, shown, page, at, what, go) {
    if (count <= page) return null;
    const to = (place, mark, title, there) =>
      el(
        "button.quiet",
        {
          disabled: !there,
          "aria-label": title,
          onclick: () => {
            go(place);
            this._later();
          },
        },
        mark,
      );
    return el(
      "span",
      to(at - page, "‹", `${what} before`, at > 0),
      ` ${what} ${format.count(at)} to ${format.count(at + shown - 1)} of ${format.count(count)} `,
      to(at + page, "›", `${what} after`, at + page < count),
    );
  }
}
