// What a policy would let go of, and why the rest stays, before anybody does it. The viewer itself lets go of nothing.

import { ask } from "./api.js";
import { cut, el, fill, table } from "./dom.js";
import * as format from "./format.js";

const MOST = 60; // checkpoints that are listed

/** A form, folded away, and the plan that it gives. */
export function forgetting(given, signal) {
  const number = (label, value) =>
    el("input", { type: "number", min: 1, "aria-label": label, placeholder: "all", value });
  const [last, every] = [number("Keep the last", ""), number("Keep every", "")];
  const text = (label, placeholder) => el("input", { type: "text", "aria-label": label, placeholder, size: 12 });
  const [within, best] = [text("Keep those within", "7d, 12h"), text("Keep the best", "loss:min:3")];
  const unreferenced = el("input", { type: "checkbox", id: "unreferenced" });
  const result = el("div", { "aria-live": "polite" });
  const plan = async () => {
    try {
      const asked = {
        run: given.run,
        last: last.value,
        every: every.value,
        within: within.value,
        best: best.value,
        unreferenced: unreferenced.checked,
      };
      fill(result, _told(await ask("forgetting", asked, signal)));
    } catch (error) {
      fill(result, el("p.error-text", error.message));
    }
  };
  return el(
    "details.forgetting",
    el("summary", "What would forgetting let go of?"),
    el(
      "p",
      "Keep the last ",
      last,
      " and those of each ",
      every,
      " steps, those within ",
      within,
      " and the best ",
      best,
      ". ",
      unreferenced,
      el("label", { for: "unreferenced" }, " also episodes that none of them holds "),
      el("button", { onclick: plan }, "Plan"),
    ),
    result,
  );
}

function _told(found) {
  const { goes } = found;
  const rows = found.checkpoints
    .slice()
    .reverse()
    .slice(0, MOST)
    .map((one) => ({
      given: { class: one.stays ? null : "goes" },
      cells: [one.stays ? "stays" : "goes", cut(one.name, 60), cut(one.run, 40), cut(one.reasons.join("; "), 200)],
    }));
  const groups = found.episodes.map((one) =>
    el(
      "li",
      `${one.stays ? "stay" : "go"}: ${format.counted(one.episodes, "episode")}, ${format.counted(one.steps, "step")}: ${cut(one.reason, 200)}`,
    ),
  );
  return el(
    "div",
    el(
      "p",
      el(
        "strong",
        `${format.counted(goes.checkpoints, "checkpoint")}, ${format.counted(goes.episodes, "episode")} and ${format.size(goes.bytes)} in ${format.counted(goes.objects, "object")} would go. `,
      ),
      "To do it: ",
      el("code", `archive forget URL ${found.command} --yes`),
    ),
    el("ul", groups),
    table({ fate: "text", name: "text", run: "text", reasons: "text" }, rows, { heads: false }),
  );
}
