// The table of episodes.

import * as address from "./address.js";
import { askTable } from "./api.js";
import { el, fill } from "./dom.js";

export async function show(main, about, given) {
  const found = await askTable("episodes", { ...address.scope(given), columns: ["episode_id", "length", "return"] });
  const { episode_id, length, return: returns } = found.columns;
  const rows = episode_id.map((id, i) => el("tr", {}, el("td", {}, id), el("td", {}, length[i]), el("td", {}, returns[i])));
  fill(main, el("h1", {}, `${found.facts.count} episodes`), el("table", {}, el("tbody", {}, rows)));
  return () => {};
}
