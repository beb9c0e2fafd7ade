// Runs, checkpoints or weights side by side: how one column is spread in each, on the same scale.

import * as address from "./address.js";
import { ask } from "./api.js";
import { cut, el, fill, svg } from "./dom.js";
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
const [WIDTH, HEIGHT] = [640, 54];

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
    this.body = el("div", { class: "spreads", "aria-live": "polite" });
    this.node = el(
      "div",
      { class: "compare" },
      el("h1", {}, "Side by side"),
      el("p", { class: "bar" }, this.column, " by ", this.by),
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
    try {
      const found = await ask("distributions", { ...address.scope(this.given), column, by }, this.turn());
      this.draw(found, column, by);
    } catch (error) {
      if (error.name !== "AbortError")
        fill(this.body, el("p", { class: "error-text", role: "alert" }, cut(error.message, 600)));
    }
    this.node.classList.add("ready");
  }

  draw(found, column, by) {
    fill(
      this.body,
      found.groups.map((group) => _group(group, found.edges, column, by)),
      found.others > 0 ? el("p", { class: "quiet-text" }, `and ${found.others} more`) : null,
      found.groups.length ? null : el("p", {}, "There is nothing to compare."),
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
    el("h2", {}, heading, el("span", { class: "quiet-text" }, told)),
    edges.length ? _bars(group, edges) : null,
  );
}

function _bars(group, edges) {
  const most = Math.max(1, ...group.counts);
  const wide = WIDTH / Math.max(1, group.counts.length);
  const bars = group.counts.map((n, i) =>
    svg(
      "rect",
      {
        x: i * wide,
        y: HEIGHT - (HEIGHT * n) / most,
        width: Math.max(wide - 1, 0.5),
        height: (HEIGHT * n) / most,
        class: "now",
      },
      svg("title", {}, `${format.number(edges[i])} to ${format.number(edges[i + 1])}: ${format.count(n)}`),
    ),
  );
  const span = edges.at(-1) - edges[0] || 1;
  const at = (value) => ((value - edges[0]) / span) * WIDTH;
  const box = group.quartiles
    ? [
        svg("rect", {
          x: at(group.quartiles[1]),
          y: HEIGHT + 2,
          width: Math.max(1, at(group.quartiles[3]) - at(group.quartiles[1])),
          height: 5,
          class: "box",
        }),
        svg("rect", { x: at(group.quartiles[2]) - 1, y: HEIGHT, width: 2, height: 9, class: "median" }),
      ]
    : [];
  return el(
    "div",
    {},
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 10}`, class: "histogram", "aria-hidden": "true" }, bars, box),
    el("div", { class: "ends" }, el("span", {}, format.number(edges[0])), el("span", {}, format.number(edges.at(-1)))),
  );
}
