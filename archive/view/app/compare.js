// Runs, checkpoints or weights side by side: how one column is spread in each, on the same scale.

import * as address from "./address.js";
import { ask } from "./api.js";
import { bars, ends, trend } from "./charts.js";
import { cut, el, fill } from "./dom.js";
import { title } from "./episodes.js";
import * as format from "./format.js";
import { turns } from "./newest.js";

const GROUPS = {
  run: "runs",
  checkpoint: "checkpoints",
  model_weights_uuids: "weights",
  buffer: "buffers",
  session: "sessions",
};
const NONE = "none"; // those without any, whom no condition of the address names

export class Page {
  constructor(main, about, given, signal) {
    Object.assign(this, { given, turn: turns(signal) });
    const columns = Object.entries(about.columns)
      .filter(([, kind]) => kind === "number" || kind === "flag")
      .map(([name]) => name);
    const labels = Object.keys(about.columns).filter((name) => name.startsWith("label.") && !columns.includes(name));
    this.column = _choice(
      "column",
      "Column",
      [...columns, ...labels].map((name) => [name, title(name)]),
    );
    this.by = _choice("by", "Groups", Object.entries(GROUPS));
    this.body = el("div.spreads", { "aria-live": "polite" });
    this.trend = el("div");
    signal.addEventListener("abort", () => this.drawn?.close());
    this.node = el(
      "div.compare",
      el("h1", "Side by side"),
      el("p.bar", this.column, " by ", this.by),
      this.trend,
      this.body,
    );
    fill(main, this.node);
  }

  /** The page draws another column or other groups itself. */
  update(given) {
    this.given = given;
    this.load();
    return true;
  }

  /** A newer commit is there. */
  news() {
    return this.load();
  }

  async load() {
    const { column = "return", by = "run" } = this.given;
    [this.column.value, this.by.value] = [column, by];
    const signal = this.turn();
    const asked = { ...address.scope(this.given), column, by };
    try {
      this.draw(await ask("distributions", asked, signal), column, by);
      this.drawTrend(by === "run" ? await ask("trend", asked, signal).catch(() => null) : null, column);
    } catch (error) {
      if (error.name !== "AbortError") fill(this.body, el("p.error-text", { role: "alert" }, cut(error.message, 600)));
    }
    this.node.classList.add("ready");
  }

  /** How the column goes over the update counts, run by run. */
  drawTrend(found, column) {
    this.drawn?.close();
    this.drawn = found && trend(found, title(column));
    fill(this.trend, this.drawn?.node);
  }

  draw(found, column, by) {
    fill(
      this.body,
      found.groups.map((group) => _group(group, found.edges, column, by)),
      found.others > 0 ? el("p.quiet-text", `and ${found.others} more`) : null,
      found.groups.length ? null : el("p", "There is nothing to compare."),
    );
  }
}

function _choice(name, label, options) {
  const onchange = (event) => {
    address.turn({ [name]: event.target.value });
  };
  return el(
    "select",
    { "aria-label": label, onchange },
    options.map(([value, text]) => el("option", { value }, cut(text, 60))),
  );
}

function _group(group, edges, column, by) {
  const told = group.quartiles
    ? `${format.counted(group.count, "episode")}, median ${format.number(group.quartiles[2])}, mean ${format.number(group.mean)}`
    : "no values";
  const linked = (by === "run" || by === "model_weights_uuids") && group.name !== NONE;
  const heading = linked
    ? el(
        "a",
        {
          href: address.of("episodes", {
            [by === "run" ? "run" : "weights"]: group.name,
            sort: column,
            descending: true,
          }),
        },
        cut(group.name, 60),
      )
    : cut(group.name, 60);
  return el(
    "section",
    { "aria-label": `${cut(group.name, 60)}: ${told}` },
    el("h2", heading, el("span.quiet-text", told)),
    edges.length ? _bars(group, edges) : null,
  );
}

function _bars(group, edges) {
  const told = (i) => `${format.number(edges[i])} to ${format.number(edges[i + 1])}: ${format.count(group.counts[i])}`;
  const at = (value) => (100 * (value - edges[0])) / (edges.at(-1) - edges[0] || 1);
  const mark = (kind, from, to) =>
    el("span", { class: kind, style: { left: `${at(from)}%`, width: `${at(to) - at(from)}%` } });
  const [, low, median, high] = group.quartiles ?? [];
  return el(
    "div",
    { "aria-hidden": "true" },
    bars(group.counts, { told }),
    el("div.quartiles", group.quartiles ? [mark("box", low, high), mark("median", median, median)] : null),
    ends(format.number(edges[0]), format.number(edges.at(-1))),
  );
}
