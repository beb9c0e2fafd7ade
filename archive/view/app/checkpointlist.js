// The checkpoints of all runs as a table: what each has, what was new, its metrics; a press picks one.

import { cut, el, table } from "./dom.js";
import * as format from "./format.js";

const MOST = 300; // rows; of more, the newest, and the one that is picked
const METRICS = 6;

/** saved: oldest first; picked: one of them; onpick(one). */
export function checkpointList(saved, picked, onpick) {
  const metrics = [...new Set(saved.flatMap((one) => Object.keys(one.metrics ?? {})))];
  const shown = saved.filter((one, i) => i >= saved.length - MOST || one === picked).reverse();
  const runs = new Set(saved.map((one) => one.run)).size > 1;
  const told = metrics.slice(0, METRICS);
  const columns = {
    checkpoint: "name",
    ...(runs ? { run: "text" } : {}),
    ranks: "number",
    "new steps": "number",
    ...Object.fromEntries(told.map((one) => [cut(one, 20), "number"])),
    "when (UTC)": "text",
  };
  const rows = shown.map((one) => _row(one, one === picked, runs, told, onpick));
  const left = [
    saved.length > shown.length ? `and ${format.count(saved.length - shown.length)} older ones` : "",
    metrics.length > METRICS ? `and ${metrics.length - METRICS} more metrics` : "",
  ].filter(Boolean);
  return el("div.checkpoint-list", table(columns, rows), left.length ? el("p.quiet-text", left.join(", ")) : null);
}

function _row(one, chosen, runs, metrics, onpick) {
  const marks = [
    one.whole ? null : el("span.tag.bad", "partial"),
    one.replay_saved ? null : el("span.tag", "without buffers"),
    one.tags.map((tag) => el("span.tag", cut(tag, 20))),
  ];
  const name = el("button.quiet", { onclick: () => onpick(one), title: one.name }, format.name(one.name, 24));
  const ranks =
    one.resumed && one.resumed.world_size && one.resumed.world_size !== one.world_size
      ? `${one.resumed.world_size} → ${one.world_size}`
      : one.world_size;
  const cells = [
    [name, marks],
    ...(runs ? [cut(one.run, 20)] : []),
    ranks,
    format.count(one.new.steps),
    ...metrics.map((key) => format.number(one.metrics?.[key])),
    String(one.created_at).slice(5, 16).replace("T", " "),
  ];
  return { given: { "aria-current": chosen ? "true" : null }, cells };
}
