// A language rollout: turns with their tokens, coloured by what is known of them; calls of tools as trees.

import { conversation } from "./rollout.js";
import { ask } from "./api.js";
import { el, fill } from "./dom.js";
import { tree } from "./tree.js";

const CALL = /^([\w .-]{1,40}: )?([[{].*[\]}])$/s; // "tool_calls: [...]", or JSON alone

/** The rollout of an episode as a part of its stage, with `token(way)` for the next or the one before; null of an
 * episode that is none. */
export async function talk(given, cursor, signal) {
  const found = await ask("rollout", given, signal);
  if (!found?.blocks) return null;
  const tools =
    Object.keys(found.signals).length || found.masks.length
      ? el(
          "div",
          { class: "tools" },
          el("label", {}, "Colour ", el("select", { class: "colour" })),
          el("span", { class: "scale" }),
          el("label", {}, "Dim ", el("select", { class: "dims" })),
        )
      : null;
  const told = el("output", { class: "token-told", "aria-live": "polite", "aria-label": "The token" });
  const note =
    found.texts || !tools
      ? null
      : el(
          "p",
          { class: "quiet-text" },
          "Tokens are shown by their ids: --tokenizer NAME, or tokenizer= in Python, shows their text.",
        );
  const node = el(
    "section",
    { class: "rollout", "aria-label": "Conversation" },
    tools,
    note,
    told,
    el("div", { class: "turns" }),
    found.left_out ? el("p", { class: "quiet-text" }, `Left out: ${found.left_out}`) : null,
  );
  const drawn = conversation(found, (step) => cursor.by(step - cursor.step), node, _drawn);
  const unfollow = cursor.follow((step) => {
    drawn.show(step);
    node.querySelector(".turn.now, .token.now")?.scrollIntoView({ block: "nearest" });
  });
  drawn.show(cursor.step);
  return { node, token: _tokens(drawn.tokens, node, told), close: unfollow };
}

// what is known of a token is told below the pointer, and by keys
function _tokens(tokens, node, told) {
  told.hidden = !tokens.length;
  let at = -1;
  const pick = (place, seen) => {
    if (!tokens[place]) return;
    tokens[at]?.span.classList.remove("picked");
    at = place;
    const { span, tell } = tokens[at];
    span.classList.add("picked");
    fill(told, el("strong", {}, span.textContent.slice(0, 60)), ` ${tell()}`);
    if (!seen) span.scrollIntoView({ block: "nearest" });
  };
  node.addEventListener("pointerover", (event) => pick(Number(event.target.dataset?.token ?? -1), true));
  fill(told, "Point at a token, or, on the page of an episode, press . and , for the next and the one before.");
  return (way) => pick(Math.max(0, Math.min(at + way, tokens.length - 1)));
}

// a text, line by line; what is JSON as a tree
function _drawn(text) {
  const out = document.createDocumentFragment();
  if (!/[[{]/.test(text) || text.length > 200000) {
    out.append(text);
    return out;
  }
  text.split("\n").forEach((line, i) => {
    if (i) out.append("\n");
    const value = _parsed(line);
    if (value === undefined) out.append(line);
    else out.append(line.match(CALL)[1] ?? "", tree(value, { open: 2 }));
  });
  return out;
}

function _parsed(line) {
  const found = line.match(CALL);
  if (!found) return undefined;
  try {
    return JSON.parse(found[2]);
  } catch {
    return undefined;
  }
}
