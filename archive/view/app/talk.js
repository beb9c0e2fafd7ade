// A language rollout: turns with their tokens, coloured by what is known of them; calls of tools as trees.

import { ask } from "./api.js";
import { cut, el, fill } from "./dom.js";
import * as format from "./format.js";
import { tree } from "./tree.js";

const CALL = /^([\w .-]{1,40}: )?([[{].*[\]}])$/s; // "tool_calls: [...]", or JSON alone
// tokens that a tokenizer keeps for itself, such as <|im_end|>
const SPECIAL = /^\s*(<\|[^|<>]*\|>|<\/?[a-z_]{1,20}>|\[[A-Z_]{2,12}\])\s*$/;
const NO_TEXTS = "Tokens are shown by their ids: --tokenizer NAME, or tokenizer= in Python, shows their text.";
const HINT = "Point at a token, or, on the page of an episode, press . and , for the next and the one before.";

/** The rollout of an episode as a part of its stage; null of an episode that is none. */
export async function talk(given, cursor, signal) {
  const found = await ask("rollout", given, signal);
  return found?.blocks ? new Talk(found, cursor) : null;
}

class Talk {
  constructor({ blocks, signals, masks, texts, left_out: left }, cursor) {
    Object.assign(this, { signals, cursor, tokens: [], turns: [], now: [], picked: -1 });
    const known = Object.keys(signals);
    this.colour = _choice("colour", known, () => this._paint());
    this.dim = _choice("dims", masks, () => this._paint());
    this.scale = el("span.scale");
    const colour = el("label", { hidden: !known.length }, "Colour ", this.colour);
    const dim = el("label", { hidden: !masks.length }, "Dim ", this.dim);
    const tools = known.length || masks.length ? el("div.tools", colour, this.scale, dim) : null;
    const note = texts || !tools ? null : el("p.quiet-text", NO_TEXTS);
    const place = el("div.turns", {
      onpointerover: (event) => this._pointed(event),
      onclick: (event) => this._go(event),
    });
    for (const block of blocks) place.append(...this._drawn(block));
    this.told = el("output.token-told", { "aria-live": "polite", "aria-label": "The token" }, HINT);
    this.told.hidden = !this.tokens.length;
    const rest = left ? el("p.quiet-text", `Left out: ${left}`) : null;
    this.node = el("section.rollout", { "aria-label": "Conversation" }, tools, note, this.told, place, rest);
    this._paint();
    this.close = cursor.follow((step) => {
      this.show(step);
      this.now[0]?.scrollIntoView({ block: "nearest" });
    });
    this.show(cursor.step);
  }

  /** The next token, or the one before. */
  token(way) {
    this._pick(Math.max(0, Math.min(this.picked + way, this.tokens.length - 1)));
    this.tokens[this.picked]?.span.scrollIntoView({ block: "nearest" });
  }

  show(step) {
    for (const one of this.now) one.classList.remove("now");
    this.now = this.turns.filter((turn) => turn.step === step && !turn.each).map((turn) => turn.box);
    const turn = this.turns.findLast((one) => one.each && one.step <= step);
    const token = turn && this.tokens[turn.from + step - turn.step];
    if (token && token.block.step === turn.step) this.now.push(token.span);
    for (const one of this.now) one.classList.add("now");
  }

  // a block within its turn, which is new where it begins another step
  _drawn(block) {
    let turn = this.turns.at(-1);
    const begins = !turn || turn.step !== block.step || block.each;
    if (begins) {
      const last = block.each ? ` to ${block.step + block.pieces.length - 1}` : "";
      const name = block.step === null ? "the episode" : `step${last && "s"} ${block.step}${last}`;
      const numbers = Object.entries(block.numbers ?? {}).map(([key, value]) => el("span.number", `${key} ${value}`));
      const head = el("button.head", { type: "button", onclick: () => this._to(block.step) }, name, numbers);
      turn = { step: block.step, box: el("article.turn", head), from: this.tokens.length, each: block.each };
      this.turns.push(turn);
    }
    turn.box.append(el("div", { class: `block ${block.kind}` }, el("div.role", block.role), this._said(block)));
    return begins ? [turn.box] : [];
  }

  _said(block) {
    const aside = (text) => el("span.aside", text);
    const out = el("div.said", block.before ? aside(`${block.before} tokens as before … `) : null);
    if (block.same !== undefined) out.append(aside(block.same === null ? "as above" : `as at step ${block.same}`));
    if (!block.pieces) out.append(_lines(block.text));
    (block.pieces ?? []).forEach((piece, i) => {
      const span = el("span.token", { "data-token": this.tokens.length }, piece);
      span.classList.toggle("line", piece.includes("\n"));
      span.classList.toggle("special", SPECIAL.test(piece));
      this.tokens.push({ span, block, i });
      out.append(span, block.bare ? " " : "");
    });
    if (block.more) out.append(aside(` … ${block.more} ${block.pieces ? "tokens" : "characters"} left out`));
    return out;
  }

  _paint() {
    const name = this.colour.value.slice(1);
    _drawScale(this.scale, this.signals[name]);
    for (const { span, block, i } of this.tokens) {
      const list = this.colour.value && block.signals[name];
      span.style.background = list ? _shade(list[i], this.signals[name]) : "";
      const bits = this.dim.value && block.masks[this.dim.value.slice(1)];
      span.classList.toggle("dim", Boolean(bits) && bits[i] === "0");
    }
  }

  _pointed(event) {
    const place = Number(event.target.dataset?.token ?? -1);
    this._pick(place);
    if (this.tokens[place]) event.target.title = _about(this.tokens[place]);
  }

  // what is known of a token is told above the turns
  _pick(place) {
    if (!this.tokens[place]) return;
    this.tokens[this.picked]?.span.classList.remove("picked");
    this.picked = place;
    const { span } = this.tokens[place];
    span.classList.add("picked");
    fill(this.told, el("strong", cut(span.textContent, 60)), ` ${_about(this.tokens[place])}`);
  }

  _go(event) {
    const token = this.tokens[event.target.dataset?.token];
    if (token) this._to(token.block.each ? token.block.step + token.i : token.block.step);
  }

  _to(step) {
    if (step !== null) this.cursor.by(step - this.cursor.step);
  }
}

// blue for what is above 0, orange for below, the stronger the further; of log probabilities the unlikelier
function _shade(value, { low, high, chance }) {
  const number = Number(value);
  if (value === null || value === undefined || Number.isNaN(number)) return "";
  const most = Math.max(Math.abs(Number(low)), Math.abs(Number(high))) || 1;
  const strength = chance ? 1 - Math.exp(Math.min(number, 0)) : Math.min(Math.abs(number) / most, 1);
  if (strength < 0.01) return "";
  return `rgba(${chance || number < 0 ? "214, 94, 44" : "52, 120, 200"}, ${(0.75 * strength).toFixed(3)})`;
}

// the least value that is known, and the greatest, between them their colours
function _drawScale(place, signal) {
  if (!signal) return fill(place);
  const low = signal.chance ? Number(signal.low) : Math.min(0, Number(signal.low));
  const high = signal.chance ? 0 : Math.max(0, Number(signal.high));
  const stops = [0, 0.25, 0.5, 0.75, 1].map((x) => _shade(low + x * (high - low), signal) || "transparent");
  const bar = el("i.bar", { style: { background: `linear-gradient(to right, ${stops.join(", ")})` } });
  return fill(place, `${format.number(low)} `, bar, ` ${format.number(high)}`);
}

function _choice(kind, names, onchange) {
  const options = names.map((name) => el("option", { value: `.${name}` }, name));
  return el("select", { class: kind, onchange }, options, el("option", { value: "" }, "nothing"));
}

function _about({ block, i }) {
  const values = Object.entries(block.signals).map(([name, list]) => `${name} ${list[i] ?? "-"}`);
  const masks = Object.entries(block.masks).map(([name, bits]) => `${name} ${bits[i]}`);
  const which = block.each ? `step ${block.step + i}` : `token ${i + (block.before || 0)}`;
  const id = block.ids?.length ? [`id ${block.ids[i]}`] : [];
  return [which, ...id, ...values, ...masks].join(" · ");
}

// a text, line by line; what is JSON as a tree
function _lines(text) {
  const lines = /[[{]/.test(text) && text.length <= 200000 ? text.split("\n") : [text];
  const drawn = lines.map((line, i) => {
    const value = _parsed(line);
    return [i ? "\n" : "", value === undefined ? line : [line.match(CALL)[1] ?? "", tree(value, { open: 2 })]];
  });
  return el("span", drawn);
}

function _parsed(line) {
  const found = line.length <= 200000 ? line.match(CALL) : null;
  try {
    return found ? JSON.parse(found[2]) : undefined;
  } catch {
    return undefined;
  }
}
