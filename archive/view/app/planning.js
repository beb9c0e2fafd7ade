// What a resume on another number of ranks takes: who gets what as a picture, and what it costs each of them.

import { ask } from "./api.js";
import { cut, el, fill, table } from "./dom.js";
import { flow, rankBars } from "./flow.js";
import * as format from "./format.js";
import { saved } from "./saved.js";
import { say } from "./status.js";

const POLICIES = ["balanced", "interleaved", "by_trajectory"];
const MOST = 64; // ranks of a table

/** Draws into `node`; asked: commit and number; onchange({ranks, policy}): what the address is to keep. */
export function planning(node, one, asked, { ranks, policy }, onchange, signal) {
  const wanted = el("input", {
    type: "number",
    min: 1,
    max: 1024,
    value: ranks ?? one.world_size,
    "aria-label": "Target ranks",
    id: "target-ranks",
    disabled: Boolean(saved),
    onchange: () => changed(),
    onkeydown: (event) => event.key === "Enter" && wanted.blur(),
  });
  const how = el(
    "select",
    { "aria-label": "Policy", class: "only-served", onchange: () => changed() },
    POLICIES.map((name) => el("option", { value: name }, name)),
  );
  how.value = POLICIES.includes(policy) ? policy : POLICIES[0];
  const result = el("div", { "aria-live": "polite" });
  let turn = 0;
  const changed = () => {
    if (!wanted.checkValidity() || wanted.value === "")
      return say(`ranks: ${wanted.validationMessage || "a number"}`, { error: true });
    onchange({ ranks: wanted.value, policy: how.value });
    return draw();
  };
  const draw = async () => {
    const mine = ++turn;
    try {
      const found = await ask("plan", { ...asked, ranks: wanted.value, policy: how.value }, signal);
      if (mine === turn) fill(result, _told(found, one));
    } catch (error) {
      if (mine === turn) fill(result, el("p.error-text", error.message));
    }
  };
  fill(node, el("h3", "Resume on ", wanted, " ranks, ", how), result);
  return draw();
}

function _told({ moved, ranks, dropped }, one) {
  const sum = (name) => ranks.reduce((all, rank) => all + rank[name], 0);
  const shown = flow(moved, one.world_size, ranks.length);
  return [
    el("p.quiet-text", `${format.size(sum("bytes"))} in ${format.counted(sum("requests"), "request")}`),
    _dropped(dropped),
    shown ?? rankBars(ranks.map((rank, i) => ({ rank: i, steps: rank.steps }))),
    _costs(ranks),
  ];
}

function _dropped(dropped) {
  const rows = Object.entries(dropped).map(
    ([why, { episodes, steps }]) =>
      `${format.counted(episodes, "episode")}, ${format.counted(steps, "step")}: ${cut(why, 100)}`,
  );
  if (!rows.length) return el("p.quiet-text", "Nothing is dropped.");
  return el(
    "div.dropped",
    el("strong", "It drops:"),
    el(
      "ul",
      rows.map((row) => el("li", row)),
    ),
  );
}

function _costs(ranks) {
  const { count, size } = format;
  const rows = ranks
    .slice(0, MOST)
    .map((rank, i) => [i, count(rank.episodes), count(rank.steps), size(rank.bytes), count(rank.requests)]);
  const columns = { rank: "name", episodes: "number", steps: "number", bytes: "number", requests: "number" };
  const more = ranks.length > MOST ? el("p.quiet-text", `and ${ranks.length - MOST} more ranks`) : null;
  return el("div", table(columns, rows, { kind: "costs" }), more);
}
