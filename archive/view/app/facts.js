// What is known of an episode: who made it, its metadata, its fields.

import { cut, el, table } from "./dom.js";
import * as format from "./format.js";
import { tree } from "./tree.js";

/** Names and values as a list; `values` as the server tells them. */
export function facts(values) {
  const rows = Object.entries(values).flatMap(([name, value]) => [el("dt", name), el("dd", _told(value))]);
  return el("dl.facts", rows);
}

function _told(value) {
  if (Array.isArray(value)) return cut(value.join(", "), 600);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? format.number(value) : cut(value, 600);
}

/** Which weights made which steps; a press goes there. */
export function parts(found, cursor) {
  const rows = found.map((part) => {
    const weights = (part.model_weights_uuids ?? []).join(", ") || "–";
    const updates =
      part.update_count_min === null
        ? "–"
        : part.update_count_min === part.update_count_max
          ? part.update_count_min
          : `${part.update_count_min} to ${part.update_count_max}`;
    const steps = part.stop > part.start ? `${part.start} to ${part.stop - 1}` : "none";
    const button = el("button.quiet", { onclick: () => cursor.by(part.start - cursor.step) }, steps);
    return [button, el("span", { title: weights }, cut(weights, 40)), updates, cut(part.session, 24)];
  });
  return table({ steps: "text", weights: "text", update: "number", session: "text" }, rows);
}

/** The fields, and what each holds; a press shows its values: onpick(name). */
export function fields(found, more, onpick) {
  const rows = found.map(({ name, told }) => {
    const given = { "aria-label": `Values of ${cut(name, 60)}`, onclick: () => onpick(name) };
    return [cut(name, 60), cut(told, 60), el("button.quiet", given, "values")];
  });
  const rest = more ? el("p.quiet-text", `and ${more} more fields`) : null;
  return el("div", table({ field: "name", holds: "text", values: "text" }, rows, { heads: false }), rest);
}

/** The metadata and the attributes as trees. */
export function trees(found) {
  return ["metadata", "attributes"]
    .filter((name) => Object.keys(found[name] ?? {}).length)
    .flatMap((name) => [el("h3", name), tree(found[name], { open: 2 })]);
}
