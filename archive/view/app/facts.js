// What is known of an episode: who made it, its metadata, its fields.

import { cut, el } from "./dom.js";
import * as format from "./format.js";
import { tree } from "./tree.js";

/** Names and values as a list; `values` as the server tells them. */
export function facts(values) {
  const rows = Object.entries(values).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, _told(value))]);
  return el("dl", { class: "facts" }, rows);
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
    return el(
      "tr",
      {},
      el("td", {}, el("button", { class: "quiet", onclick: () => cursor.by(part.start - cursor.step) }, steps)),
      el("td", { title: weights }, cut(weights, 40)),
      el("td", { class: "number" }, updates),
      el("td", {}, cut(part.session, 24)),
    );
  });
  const heads = ["steps", "weights", "update", "session"].map((name) => el("th", { scope: "col" }, name));
  return el("table", { class: "plain" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
}

/** The fields, and what each holds; a press shows its values: onpick(name). */
export function fields(found, more, onpick) {
  const rows = found.map((one) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, cut(one.name, 60)),
      el("td", {}, cut(one.told, 60)),
      el(
        "td",
        {},
        el(
          "button",
          { class: "quiet", "aria-label": `Values of ${cut(one.name, 60)}`, onclick: () => onpick(one.name) },
          "values",
        ),
      ),
    ),
  );
  const rest = more ? el("p", { class: "quiet-text" }, `and ${more} more fields`) : null;
  return el("div", {}, el("table", { class: "plain" }, el("tbody", {}, rows)), rest);
}

/** The metadata and the attributes as trees. */
export function trees(found) {
  return ["metadata", "attributes"]
    .filter((name) => Object.keys(found[name] ?? {}).length)
    .flatMap((name) => [el("h3", {}, name), tree(found[name], { open: 2 })]);
}
