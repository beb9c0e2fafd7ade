// Labels: what one may say of an episode, by keys and buttons, and how far a pass over the episodes that are meant is.

import { ask } from "./api.js";
import { cut, el, fill } from "./dom.js";
import * as format from "./format.js";
import { book } from "./labelbook.js";
import { failed, say } from "./status.js";

const MOST_KEYS = 9;

export class Labels {
  /** scope(): which episodes are meant; onwithout(key): show those of them that lack a label; whose(): the episode that a
   * key is for, as `of` had it, maybe once that is known. All until `signal`. */
  constructor({ scope, onwithout, whose = () => this.one, signal }) {
    Object.assign(this, { scope, onwithout, whose, signal, one: null });
    this.node = el("section.labels", { "aria-label": "Labels" });
    this.unfollow = book.follow((commit) => this._changed(commit));
  }

  load() {
    return (this.loading = this._load());
  }

  async _load() {
    this.offered = await ask("labels", this.scope(), this.signal);
    this.choices = this.offered.labels.flatMap((label) => choices(label)).slice(0, MOST_KEYS);
    this.draw();
  }

  close() {
    this.unfollow();
  }

  /** The episode that is shown: {id, labels}, by what is said of it; null for none. */
  of(one) {
    this.one = one;
    this.draw();
  }

  get said() {
    return _said(this.one);
  }

  /** The key that a pass is about: the one that was set last, or else the first. */
  get key() {
    const keys = this.offered?.labels.map((one) => one.key) ?? [];
    return keys.includes(book.last) ? book.last : keys[0];
  }

  keys() {
    const numbered = Array.from({ length: MOST_KEYS }, (_, i) => ({
      keys: [String(i + 1)],
      does: i === 0 ? "the first label, and so on to 9; again takes it back" : null,
      run: () => this.choose(i),
    }));
    const into = (css) => async () => {
      await this.loading; // a key may come before its field is drawn
      if ((await this.whose()) === this.one) this.node.querySelector(css)?.focus();
    };
    return [
      ...numbered,
      { keys: ["n"], does: "write a note", run: into("input[type=text]") },
      { keys: ["v"], does: "write the value of a number", run: into("input[type=number]") },
      { keys: ["u"], does: "take the last label back, on whatever page it was set", run: () => book.undo() },
      { keys: ["s"], does: "save labels now", run: () => void book.save() },
    ];
  }

  async choose(i) {
    const [one] = await Promise.all([this.whose(), this.loading]); // a key may come before its label is drawn
    const choice = this.choices?.[i];
    if (choice) this.set(choice.key, _said(one)[choice.key] === choice.value ? null : choice.value, one);
  }

  /** Says something of an episode; null takes it back. */
  set(key, value, one = this.one) {
    if (!one) return say("pick an episode first");
    if (this.offered.why_not) return say(`nothing can be labelled here: ${this.offered.why_not}`, { error: true });
    const before = _said(one)[key] ?? null;
    if (before !== value) book.set(one.id, key, before, value);
    return undefined;
  }

  async _changed(commit) {
    if (this.one) this.one.labels = this.said; // what is saved is no longer in the book
    this.draw();
    if (commit === undefined || !this.offered) return;
    try {
      this.offered = await ask("labels", this.scope(), this.signal);
    } catch (error) {
      failed(error);
    }
    this.draw();
  }

  draw() {
    if (!this.offered) return;
    const why = this.offered.why_not;
    const state = why ?? (book.waiting ? `${format.count(book.waiting)} not saved yet` : "");
    const focus = this.node.contains(document.activeElement) ? document.activeElement : null;
    if (focus?.tagName === "INPUT") return void fill(this.node.querySelector(".state"), state);
    const place = focus && [...this.node.querySelectorAll("button")].indexOf(focus);
    fill(
      this.node,
      el("h2", "Labels ", el("span.quiet-text.state", { role: "status" }, state)),
      this.offered.labels.map((label) => this._row(label, Boolean(why) || !this.one)),
      this._progress(),
    );
    if (focus) this.node.querySelectorAll("button")[place]?.focus();
    return undefined;
  }

  _row(label, locked) {
    const name = el("span.label-key", { title: label.key }, cut(label.key, 30));
    const own = this.choices
      .map((choice, i) => ({ ...choice, number: i + 1 }))
      .filter((choice) => choice.key === label.key);
    const inside = own.length ? own.map((choice) => this._button(choice, locked)) : this._field(label, locked);
    return el("div.label-row", { role: "group", "aria-label": label.key }, name, inside);
  }

  _button(choice, locked) {
    return el(
      "button",
      {
        "aria-pressed": String(this.said[choice.key] === choice.value),
        "aria-keyshortcuts": choice.number,
        disabled: locked,
        onclick: () => this.choose(choice.number - 1).catch(failed),
      },
      cut(choice.title, 24),
      " ",
      el("kbd", choice.number),
    );
  }

  _field(label, locked) {
    const number = label.kind === "number";
    const input = el("input", {
      type: number ? "number" : "text",
      step: number ? "any" : null,
      min: label.least,
      max: label.most,
      "aria-label": label.key,
      disabled: locked,
      value: this.said[label.key] ?? "",
      placeholder: number ? _range(label) : "note",
      onchange: () => this._typed(label, input),
      onkeydown: (event) => this._leaves(event, label, input),
    });
    return input;
  }

  _leaves(event, label, input) {
    if (event.key === "Escape") input.value = this.said[label.key] ?? ""; // nothing was said
    if (event.key === "Enter" || event.key === "Escape") input.blur();
  }

  _typed(label, input) {
    const text = input.value.trim();
    if (!input.checkValidity()) return say(`${label.key}: ${input.validationMessage}`, { error: true });
    input.blur();
    return this.set(label.key, text === "" ? null : label.kind === "number" ? Number(text) : text);
  }

  _progress() {
    const { count, labelled } = this.offered;
    const shown = Object.entries(labelled).filter(([key, n]) => n || key === this.key);
    return el(
      "div.progresses",
      shown.map(([key, n]) => {
        const told = `${cut(key, 30)}: ${format.count(n)} of ${format.count(count)}`;
        const without = el(
          "button.chip",
          { onclick: () => this.onwithout?.(key), "aria-label": `Only episodes without ${key}` },
          "unlabelled",
        );
        return el(
          "div",
          el("progress", { max: count, value: n, "aria-label": told }),
          el("span.quiet-text", ` ${told} `),
          n < count ? without : null,
        );
      }),
    );
  }
}

/** What a label may be set to by one key: {key, value, title} each. */
export function choices(label) {
  if (label.kind === "flag") {
    return [
      { key: label.key, value: true, title: "yes" },
      { key: label.key, value: false, title: "no" },
    ];
  }
  return label.kind === "choice" ? label.values.map((value) => ({ key: label.key, value, title: String(value) })) : [];
}

// what is said of an episode, with what this tab has not saved yet
function _said(one) {
  return one ? { ...one.labels, ...book.of(one.id) } : {};
}

function _range({ least, most }) {
  if (least === undefined && most === undefined) return "number";
  return `${least ?? "…"} to ${most ?? "…"}`;
}
