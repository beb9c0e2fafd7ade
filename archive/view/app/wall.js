// For a display on a wall: the newest episodes, playing, and how their returns go. Follows new commits by itself.

import * as address from "./address.js";
import { ask, askTable } from "./api.js";
import { Chart } from "./charts.js";
import { cut, el, fill } from "./dom.js";
import { Film } from "./films.js";
import * as format from "./format.js";
import { Cursor } from "./player.js";
import { turns } from "./newest.js";
import { failed } from "./status.js";

const TILES = 8;
const RECENT = 400; // episodes whose returns are drawn
const RATE = 10;
const COLUMNS = ["episode_id", "return", "length", "update_count_max", "run"];

export class Page {
  constructor(main, about, given, signal) {
    Object.assign(this, { given, signal, turn: turns(signal), open: [] });
    this.ids = null;
    this.returns = el("div");
    this.tiles = el("div.tiles");
    this.node = el("div.wall", el("h1", "Newest episodes"), this.returns, this.tiles);
    fill(main, this.node);
    signal.addEventListener("abort", () => this.close());
  }

  /** A newer commit is there. */
  news() {
    return this.load();
  }

  close() {
    for (const one of this.open) one.close();
    this.open = [];
  }

  async load() {
    try {
      const asked = { ...address.scope(this.given), descending: true, stop: RECENT, columns: COLUMNS };
      const found = await askTable("episodes", asked, this.signal);
      const { columns, count } = found;
      const ids = columns.episode_id.slice(0, TILES).join();
      if (ids === this.ids) return;
      this.ids = ids;
      this.close();
      this._returns(Array.from(columns.return).reverse());
      fill(this.tiles);
      if (!count)
        fill(this.returns, el("p.quiet-text", "There are no episodes yet; they appear here as they are committed."));
      const rows = Array.from({ length: Math.min(TILES, count) }, (_, i) =>
        Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[i]])),
      );
      const signal = this.turn(); // tiles of older ones are no longer wanted
      await Promise.all(rows.map((row) => this._tile(row, signal)));
    } catch (error) {
      failed(error);
    }
    this.node.classList.add("ready");
  }

  _returns(values) {
    if (!values.some(Number.isFinite)) return void fill(this.returns); // an archive without rewards
    const cursor = new Cursor(values.length, values.length - 1);
    const chart = new Chart("return", [{ part: "", x: null, y: values }], values.length, cursor);
    this.open.push(chart, cursor);
    fill(this.returns, chart.node);
    return undefined;
  }

  async _tile(row, signal) {
    const { commit, checkpoint } = address.scope(this.given);
    const asked = { commit, checkpoint, id: row.episode_id };
    const stage = el("div.tile-stage");
    const told = `return ${format.number(row.return)} · ${format.counted(row.length, "step")} · update ${format.number(row.update_count_max)}`;
    this.tiles.append(
      el(
        "a.tile",
        { href: address.of("episode", asked), "aria-label": `Episode ${cut(row.episode_id, 80)}, ${told}` },
        stage,
        el("strong", format.name(row.episode_id, 26)),
        el("span.quiet-text", told),
      ),
    );
    const found = await ask("episode", asked, signal).catch((error) => ({ fields: [], why: error.message }));
    if (signal.aborted) return;
    const field = found.fields.find((one) => one.kind === "frames");
    if (!field) {
      if (found.why) stage.append(el("p.error-text", cut(found.why, 200)));
      return;
    }
    const cursor = new Cursor(found.length);
    cursor.rate = RATE;
    const film = new Film(field.name, asked, cursor);
    this.open.push(film, cursor);
    stage.append(film.node);
    const again = (playing) => !playing && this.open.includes(cursor) && setTimeout(() => cursor.play(), 800);
    cursor.onplay = again;
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) cursor.play();
  }
}
