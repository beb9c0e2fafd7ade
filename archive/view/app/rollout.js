// The conversation: a part a message, or a span a token, coloured by what is known of it. A press goes to its step.

import { number as readable } from "./format.js";

function made(name, className, text) {
  const out = document.createElement(name);
  if (className) out.className = className;
  if (text !== undefined) out.textContent = text;
  return out;
}

// Blue for what is above 0, orange for below, the stronger the further; of log probabilities the unlikelier.
function shade(value, { low, high, chance }) {
  const number = Number(value);
  if (value === null || value === undefined || Number.isNaN(number)) return "";
  const most = Math.max(Math.abs(Number(low)), Math.abs(Number(high))) || 1;
  const strength = chance ? 1 - Math.exp(Math.min(number, 0)) : Math.min(Math.abs(number) / most, 1);
  if (strength < 0.01) return "";
  return `rgba(${chance || number < 0 ? "214, 94, 44" : "52, 120, 200"}, ${(0.75 * strength).toFixed(3)})`;
}

// Tokens that a tokenizer keeps for itself, such as <|im_end|>.
const SPECIAL = /^\s*(<\|[^|<>]*\|>|<\/?[a-z_]{1,20}>|\[[A-Z_]{2,12}\])\s*$/;

function said(block, tokens, draw) {
  const out = made("div", "said");
  if (block.before) out.append(made("span", "aside", `${block.before} tokens as before … `));
  if (block.same !== undefined)
    out.append(made("span", "aside", block.same === null ? "as above" : `as at step ${block.same}`));
  if (!block.pieces) out.append(draw(block.text));
  (block.pieces || []).forEach((piece, i) => {
    const span = made("span", piece.includes("\n") ? "token line" : "token", piece);
    span.classList.toggle("special", SPECIAL.test(piece));
    tokens.push({ span, block, i });
    span.dataset.token = tokens.length - 1;
    out.append(span);
    if (block.bare) out.append(" ");
  });
  if (block.more)
    out.append(made("span", "aside", ` … ${block.more} ${block.pieces ? "tokens" : "characters"} left out`));
  return out;
}

function about({ block, i }) {
  const values = Object.entries(block.signals).map(([name, list]) => `${name} ${list[i] ?? "-"}`);
  const masks = Object.entries(block.masks).map(([name, bits]) => `${name} ${bits[i]}`);
  const which = block.each ? `step ${block.step + i}` : `token ${i + (block.before || 0)}`;
  const id = block.ids && block.ids.length ? [`id ${block.ids[i]}`] : [];
  return [which, ...id, ...values, ...masks].join(" · ");
}

function choices(select, names) {
  for (const name of [...names, "nothing"]) {
    const option = made("option", "", name);
    option.value = name === "nothing" ? "" : `.${name}`;
    select.append(option);
  }
}

// The least value that is known, and the greatest, between them their colours.
function drawScale(place, signal) {
  place.textContent = "";
  if (!signal) return;
  const low = signal.chance ? Number(signal.low) : Math.min(0, Number(signal.low));
  const high = signal.chance ? 0 : Math.max(0, Number(signal.high));
  const bar = made("i", "bar");
  const stops = [0, 0.25, 0.5, 0.75, 1].map((x) => shade(low + x * (high - low), signal) || "transparent");
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  place.append(`${readable(low)} `, bar, ` ${readable(high)}`);
}

// `root` has the places that are drawn into; `draw` makes a node of a text.
export function conversation({ blocks, signals, masks }, goTo, root = document, draw = (text) => text) {
  const place = root.querySelector(".turns");
  const tokens = [];
  const turns = [];
  for (const block of blocks) {
    let turn = turns[turns.length - 1];
    if (!turn || turn.step !== block.step || block.each) {
      const box = made("article", "turn");
      const last = block.each ? ` to ${block.step + block.pieces.length - 1}` : "";
      const name = block.step === null ? "the episode" : `step${last && "s"} ${block.step}${last}`;
      const head = made("button", "head", name);
      head.type = "button";
      for (const [key, value] of Object.entries(block.numbers || {}))
        head.append(made("span", "number", `${key} ${value}`));
      if (block.step !== null) head.addEventListener("click", () => goTo(block.step));
      box.append(head);
      place.append(box);
      turn = { step: block.step, box, from: tokens.length, each: block.each };
      turns.push(turn);
    }
    const part = made("div", `block ${block.kind}`);
    part.append(made("div", "role", block.role), said(block, tokens, draw));
    turn.box.append(part);
  }
  const colour = root.querySelector(".colour");
  const dim = root.querySelector(".dims");
  const paint = () => {
    const name = colour.value.slice(1);
    drawScale(root.querySelector(".scale"), signals[name]);
    for (const { span, block, i } of tokens) {
      const list = colour.value && block.signals[name];
      span.style.background = list ? shade(list[i], signals[name]) : "";
      const bits = dim.value && block.masks[dim.value.slice(1)];
      span.classList.toggle("dim", Boolean(bits) && bits[i] === "0");
    }
  };
  if (colour) {
    choices(colour, Object.keys(signals));
    choices(dim, masks);
    for (const select of [colour, dim]) {
      select.parentNode.hidden = select.options.length < 2;
      select.addEventListener("change", paint);
    }
    paint();
  }
  place.addEventListener("pointerover", (event) => {
    const token = tokens[event.target.dataset.token];
    if (token) event.target.title = about(token);
  });
  place.addEventListener("click", (event) => {
    const token = tokens[event.target.dataset.token];
    if (token) goTo(token.block.each ? token.block.step + token.i : token.block.step);
  });
  let now = [];
  return {
    tokens: tokens.map((token) => ({ span: token.span, tell: () => about(token) })),
    show: (step) => {
      for (const one of now) one.classList.remove("now");
      now = turns.filter((turn) => turn.step === step && !turn.each).map((turn) => turn.box);
      const turn = turns.findLast((one) => one.each && one.step <= step);
      const token = turn && tokens[turn.from + step - turn.step];
      if (token && token.block.step === turn.step) now.push(token.span);
      for (const one of now) one.classList.add("now");
    },
  };
}
