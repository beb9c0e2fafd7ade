// A table of any number of rows, of which only those in sight are in the document. It asks for blocks of rows, keeps the
// last ones, and forgets questions whose answer is out of sight by now.

import { cut, el, fill } from "./dom.js";

const [ROW, HEAD] = [26, 29]; // pixels; grid.css says the same
const BLOCK = 200; // rows of one question
const KEPT = 60; // blocks
const MOST_PIXELS = 8e6; // browsers lay out no taller element well; beyond, a pixel is several rows' part
const TITLE = 1000; // characters of what the pointer shows
const WAIT_MS = 60; // while somebody scrolls on, what passes by is not asked for

/**
 * columns: [{name, title, kind, sortable, width}]; load(start, stop, signal) -> {columns: {name: values}};
 * format(column, value) -> text; onopen(row), onpick(row), onsort(name), onview(start, stop), onfail(error): what the
 * page does.
 */
export class Grid {
  constructor({ label, columns, load, format, onopen, onpick, onsort, onview, onfail }) {
    Object.assign(this, { columns, load, format, onopen, onpick, onsort, onview, onfail });
    this.count = 0;
    this.first = 0; // the row at the top, with a fraction
    this.picked = -1;
    this.blocks = new Map();
    this.asked = new Map();
    this.head = el("div", { role: "row", class: "grid-head", "aria-rowindex": 1 });
    this.space = el("div.grid-space");
    this.rows = el("div.grid-rows", { role: "rowgroup" });
    // the heads stand in what scrolls: they go sideways with their columns, and who listens has one grid
    this.view = el(
      "div.grid-view",
      { role: "grid", tabindex: "0", "aria-label": label, onscroll: () => this._scrolled() },
      this.head,
      this.space,
      this.rows,
    );
    this.view.addEventListener("wheel", (event) => this._wheeled(event), { passive: false });
    this.told = el("p.grid-told", { hidden: true });
    this.node = el("div.grid", this.view, this.told);
    this.seen = new ResizeObserver(() => this._draw());
    this.seen.observe(this.view);
  }

  close() {
    this.seen.disconnect();
    this._stop();
  }

  _stop() {
    for (const { stopped } of this.asked.values()) stopped.abort();
    this.asked.clear();
  }

  /** Shows other rows: how many there are; what was known of the old ones is gone. */
  reset(count, { columns = this.columns, sort = null, picked = -1, first = this.first } = {}) {
    this._stop();
    Object.assign(this, { count, columns, sort, picked });
    this.blocks.clear();
    this._heads();
    this.view.setAttribute("aria-rowcount", count + 1);
    this.space.style.height = `${Math.min(count * ROW, MOST_PIXELS)}px`;
    this._go(first);
    if (picked >= 0) this.show(picked);
    this._draw();
  }

  /** Says in the place of the rows why there are none; "" where there are some. */
  say(text) {
    this.told.hidden = !text;
    fill(this.told, text);
  }

  /** Rows that came before anybody asked, as those of a first answer. */
  give(start, found) {
    if (start % BLOCK === 0) this._keep(start / BLOCK, found);
    this._draw();
  }

  /** The values of a row, {column: value}; null while they are on their way. */
  row(place) {
    const block = this.blocks.get(Math.floor(place / BLOCK));
    if (!block) return null;
    const at = place % BLOCK;
    return Object.fromEntries(Object.entries(block.columns).map(([name, values]) => [name, values[at]]));
  }

  /** The same once it is there; null of a row that there is none of, or that nobody waits for any longer. */
  async known(place) {
    if (place >= 0 && place < this.count && !this.row(place)) await this._ask(Math.floor(place / BLOCK));
    return place < 0 ? null : this.row(place);
  }

  /** Picks a row and brings it into sight. */
  pick(place) {
    if (!this.count) return;
    this.picked = Math.max(0, Math.min(this.count - 1, place));
    this.show(this.picked);
    this._draw();
    this.onpick?.(this.picked);
  }

  /** Brings a row into sight. */
  show(place) {
    const rows = Math.max(1, Math.floor(this._tall / ROW));
    if (place < this.first) this._go(place);
    else if (place > this.first + rows - 1) this._go(place - rows + 1);
  }

  get page() {
    return Math.max(1, Math.floor(this._tall / ROW) - 1);
  }

  // pixels in which rows are seen
  get _tall() {
    return Math.max(0, this.view.clientHeight - HEAD);
  }

  _last() {
    return Math.max(0, this.count - this._tall / ROW);
  }

  // a pixel of the scroll bar is `scale` pixels of the rows
  get _scale() {
    const room = this.space.offsetHeight - this._tall;
    return room > 0 ? (this.count * ROW - this._tall) / room : 1;
  }

  _go(first) {
    this.first = Math.max(0, Math.min(this._last(), first));
    this.placed = Math.round((this.first * ROW) / this._scale);
    this.view.scrollTop = this.placed;
  }

  _scrolled() {
    const top = this.view.scrollTop;
    if (Math.abs(top - (this.placed ?? 0)) > 1) this.first = (top * this._scale) / ROW;
    this.placed = top;
    this._draw();
  }

  _wheeled(event) {
    if (this._scale <= 1.01 || event.ctrlKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
    event.preventDefault(); // a notch is three rows, however many there are
    this._go(this.first + event.deltaY / (event.deltaMode ? 1 : ROW));
    this._draw();
  }

  _heads() {
    const focused = [...this.head.querySelectorAll("button")].indexOf(document.activeElement);
    fill(
      this.head,
      this.columns.map((column) => {
        const way = this.sort?.name === column.name ? (this.sort.descending ? "descending" : "ascending") : null;
        const title =
          column.sortable === false
            ? el("span", column.title)
            : el("button.quiet", { onclick: () => this.onsort(column.name) }, column.title);
        const given = { role: "columnheader", class: `cell ${column.kind}`, "aria-sort": way };
        return el("div", { ...given, style: { width: `${column.width}px` } }, title);
      }),
    );
    const width = `${this.columns.reduce((sum, column) => sum + column.width, 0)}px`;
    this.head.querySelectorAll("button")[focused]?.focus(); // who sorted by keys is still there
    this.head.style.minWidth = this.space.style.width = this.rows.style.minWidth = width;
  }

  _draw() {
    const start = Math.floor(this.first);
    const stop = Math.min(this.count, start + Math.ceil(this._tall / ROW) + 1);
    this.rows.style.transform = `translateY(${this.view.scrollTop - (this.first - start) * ROW}px)`;
    fill(
      this.rows,
      Array.from({ length: Math.max(0, stop - start) }, (_, i) => this._row(start + i)),
    );
    const named = this.picked >= start && this.picked < stop;
    if (named) this.view.setAttribute("aria-activedescendant", `row-${this.picked}`);
    else this.view.removeAttribute("aria-activedescendant");
    clearTimeout(this.timer);
    const missing = this._missing(start, stop);
    if (!missing.length) this.onview?.(start, stop);
    if (missing.length)
      this.timer = setTimeout(() => missing.forEach((n) => this._ask(n)), this.blocks.size ? WAIT_MS : 0);
  }

  _row(place) {
    const block = this.blocks.get(Math.floor(place / BLOCK));
    const cells = this.columns.map((column) => {
      const values = block?.columns[column.name];
      const text = values ? this.format(column, values[place % BLOCK]) : "";
      const title = text.length > 12 ? cut(values[place % BLOCK], TITLE) : null;
      return el(
        "div",
        { role: "gridcell", class: `cell ${column.kind}`, title, style: { width: `${column.width}px` } },
        text,
      );
    });
    return el(
      "div",
      {
        role: "row",
        id: `row-${place}`,
        class: block ? "grid-row" : "grid-row waiting",
        "aria-rowindex": place + 2,
        "aria-selected": place === this.picked ? "true" : "false",
        onclick: () => this.pick(place),
        ondblclick: () => this.onopen?.(place),
      },
      cells,
    );
  }

  _missing(start, stop) {
    const out = [];
    for (let n = Math.floor(start / BLOCK); n * BLOCK < stop; n++) if (!this.blocks.has(n)) out.push(n);
    return out;
  }

  async _ask(number) {
    if (this.blocks.has(number)) return undefined;
    for (const [other, { stopped }] of this.asked) if (Math.abs(other - number) > 2) stopped.abort();
    if (!this.asked.has(number)) {
      const stopped = new AbortController();
      this.asked.set(number, { stopped, done: this._load(number, stopped) });
    }
    return this.asked.get(number).done;
  }

  async _load(number, stopped) {
    try {
      const found = await this.load(number * BLOCK, Math.min(this.count, (number + 1) * BLOCK), stopped.signal);
      if (!stopped.signal.aborted) this._keep(number, found);
    } catch (error) {
      if (error.name !== "AbortError") return this.onfail?.(error); // asked again when somebody scrolls
    } finally {
      if (this.asked.get(number)?.stopped === stopped) this.asked.delete(number);
    }
    this._draw();
    if (number === Math.floor(this.picked / BLOCK)) this.onpick?.(this.picked); // now it is known who it is
    return undefined;
  }

  _keep(number, found) {
    this.blocks.set(number, found);
    while (this.blocks.size > KEPT) this.blocks.delete(this.blocks.keys().next().value);
  }
}
