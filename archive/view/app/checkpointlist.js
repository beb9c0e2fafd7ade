// The checkpoints of all runs as a table: what each has, what was new, its metrics; a press picks one.

import { cut, el } from "./dom.js";
import * as format from "./format.js";

const MOST = 300; // rows; of more, the newest, and the one that is picked
const METRICS = 6;

/** saved: oldest first; picked: one of them; onpick(one). */
export function checkpointList(saved, picked, onpick) {
  const metrics = [...new Set(saved.flatMap((one) => Object.keys(one.metrics ?? {})))];
  const shown = saved.filter((one, i) => i >= saved.length - MOST || one === picked).reverse();
  const runs = new Set(saved.map((one) => one.run)).size > 1;
  const names = [
    "checkpoint",
    ...(runs ? ["run"] : []),
    "ranks",
    "new steps",
    ...metrics.slice(0, METRICS).map((one) => cut(one, 20)),
    "when (UTC)",
  ];
  const heads = names.map((name, i) =>
    el("th", { scope: "col", class: i > (runs ? 1 : 0) && i < names.length - 1 ? "number" : null }, name),
  );
  const rows = shown.map((one) => _row(one, one === picked, runs, metrics.slice(0, METRICS), onpick));
  const left = [
    saved.length > shown.length ? `and ${format.count(saved.length - shown.length)} older ones` : "",
    metrics.length > METRICS ? `and ${metrics.length - METRICS} more metrics` : "",
  ]
    .filter(Boolean)
    .join(", ");
  return el(
    "div",
    { class: "checkpoint-list" },
    el("table", { class: "plain" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows)),
    left ? el("p", { class: "quiet-text" }, left) : null,
  );
}

function _row(one, chosen, runs, metrics, onpick) {
  const number = (value) => el("td", { class: "number" }, value);
  const marks = [
    one.whole ? null : el("span", { class: "tag bad" }, "partial"),
    one.replay_saved ? null : el("span", { class: "tag" }, "without buffers"),
    one.tags.map((tag) => el("span", { class: "tag" }, cut(tag, 20))),
  ];
  const name = el("button", { class: "quiet", onclick: () => onpick(one), title: one.name }, format.name(one.name, 24));
  const ranks =
    one.resumed && one.resumed.world_size && one.resumed.world_size !== one.world_size
      ? `${one.resumed.world_size} → ${one.world_size}`
      : one.world_size;
  return el(
    "tr",
    { "aria-current": chosen ? "true" : null },
    el("th", { scope: "row" }, name, marks),
    runs ? el("td", {}, cut(one.run, 20)) : null,
    number(ranks),
    number(format.count(one.new.steps)),
    metrics.map((key) => number(format.number(one.metrics?.[key]))),
    el("td", {}, String(one.created_at).slice(5, 16).replace("T", " ")),
  );
}
