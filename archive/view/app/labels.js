// Labels: what one may say of an episode, by keys and buttons; what is said is saved together, and can be taken back.

import { ask, tell } from "./api.js";
import { cut, el, fill } from "./dom.js";
import * as format from "./format.js";
import { say } from "./status.js";

const SAVE_MS = 2500; // after the last change, all of them are one commit
const MOST_KEYS = 9;

/** scope(): which episodes are meant; onsaved(): labels have changed. */
export class Labels {
  constructor({ scope, onsaved }) {
    Object.assign(this, { scope, onsaved });
    this.unsaved = {}; // id -> {key: value}
    this.done = []; // what can be taken back: {id, key, before, after}
    this.node = el("section", { class: "labels", "aria-label": "Labels" });
    this.leave = (event) => this._leaving(event);
    addEventListener("beforeunload", this.leave);
  }

  async load() {
    this.offered = await ask("labels", this.scope());
    this.choices = this.offered.labels.flatMap((label) => _choices(label)).slice(0, MOST_KEYS);
    this.draw();
  }

  close() {
    removeEventListener("beforeunload", this.leave);
    return this.save();
  }

  /** The episode that keys are about: its id, and what is said of it. */
  of(id, labels) {
    this.id = id;
    this.said = { ...labels, ...this.unsaved[id] };
    this.draw();
  }

  keys() {
    const numbered = Array.from({ length: MOST_KEYS }, (_, i) => ({
      keys: [String(i + 1)], does: i === 0 ? "the first label, and so on to 9; again takes it back" : null, run: () => this.choose(i),
    }));
    return [
      ...numbered,
      { keys: ["n"], does: "write a note", run: () => this.node.querySelector("input[type=text]")?.focus() },
      { keys: ["u"], does: "take the last label back", run: () => this.undo() },
      { keys: ["s"], does: "save labels now", run: () => this.save() },
    ];
  }

  choose(i) {
    const choice = this.choices?.[i];
    if (!choice || !this.id) return;
    this.set(choice.key, this.said[choice.key] === choice.value ? null : choice.value);
  }

  /** Says something of the episode; null takes it back. */
  set(key, value, { undoing = false } = {}) {
    if (this.offered.why_not) return say(`nothing can be labelled here: ${this.offered.why_not}`, { error: true });
    const before = this.said[key] ?? null;
    if (before === value) return undefined;
    if (!undoing) this.done.push({ id: this.id, key, before, after: value });
    this._put(this.id, key, value);
    this.said = { ...this.said, [key]: value };
    this.draw();
    return undefined;
  }

  _put(id, key, value) {
    this.unsaved[id] = { ...this.unsaved[id], [key]: value };
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), SAVE_MS);
  }

  undo() {
    const last = this.done.pop();
    if (!last) return say("there is no label to take back");
    this._put(last.id, last.key, last.before);
    if (last.id === this.id) this.said = { ...this.said, [last.key]: last.before };
    say(`${last.key} of ${cut(last.id, 40)} is ${_told(last.before)} again`);
    this.draw();
    return undefined;
  }

  /** Saves what is not saved, as one commit. */
  async save() {
    clearTimeout(this.timer);
    const labels = this.unsaved;
    const count = Object.keys(labels).length;
    if (!count) return;
    this.unsaved = {};
    try {
      await this.saving;
      this.saving = tell("labels", { labels });
      const { commit } = await this.saving;
      say(`labels of ${count} ${count === 1 ? "episode" : "episodes"} are saved: commit ${commit}`);
      this.onsaved?.(commit);
      this.offered = await ask("labels", this.scope());
    } catch (error) {
      // they are not lost: the next change, or "s", tries again
      for (const [id, said] of Object.entries(labels)) this.unsaved[id] = { ...said, ...this.unsaved[id] };
      say(`not saved: ${error.message}`, { error: true, action: el("button", { onclick: () => this.save() }, "Try again") });
    }
    this.draw();
  }

  _leaving(event) {
    if (!Object.keys(this.unsaved).length) return;
    this.save();
    event.preventDefault();
  }

  draw() {
    if (!this.offered) return;
    const locked = Boolean(this.offered.why_not);
    const waiting = Object.keys(this.unsaved).length;
    const state = locked ? this.offered.why_not : waiting ? `${waiting} not saved yet` : "";
    const typing = this.node.contains(document.activeElement) && document.activeElement.tagName === "INPUT";
    if (typing) return void fill(this.node.querySelector(".state"), state);
    fill(this.node, el("h3", {}, "Labels ", el("span", { class: "quiet-text state" }, state)),
      this.offered.labels.map((label) => this._row(label, locked)), this._progress());
    return undefined;
  }

  _row(label, locked) {
    const name = el("span", { class: "label-key" }, cut(label.key, 30));
    const own = this.choices.map((choice, i) => ({ ...choice, number: i + 1 })).filter((choice) => choice.key === label.key);
    const inside = own.length ? own.map((choice) => this._button(choice, locked)) : this._field(label, locked);
    return el("div", { class: "label-row", role: "group", "aria-label": label.key }, name, inside);
  }

  _button(choice, locked) {
    const on = this.said?.[choice.key] === choice.value;
    return el("button", {
      "aria-pressed": String(on), "aria-keyshortcuts": choice.number, disabled: locked || !this.id,
      onclick: () => this.choose(choice.number - 1),
    }, cut(choice.title, 24), " ", el("kbd", {}, choice.number));
  }

  _field(label, locked) {
    const number = label.kind === "number";
    const value = this.said?.[label.key];
    const input = el("input", {
      type: number ? "number" : "text", step: number ? "any" : null, min: label.least, max: label.most, "aria-label": label.key,
      disabled: locked || !this.id, value: value ?? "", placeholder: number ? "number" : "note",
      onchange: () => this._typed(label, input), onkeydown: (event) => event.key === "Enter" && input.blur(),
    });
    return input;
  }

  _typed(label, input) {
    const text = input.value.trim();
    if (!input.checkValidity()) return say(`${label.key}: ${input.validationMessage}`, { error: true });
    input.blur();
    return this.set(label.key, text === "" ? null : label.kind === "number" ? Number(text) : text);
  }

  _progress() {
    const { count, labelled } = this.offered;
    return el("div", { class: "progresses" }, Object.entries(labelled).filter(([, n]) => n).map(([key, n]) => {
      const told = `${key}: ${format.count(n)} of ${format.count(count)} have it`;
      return el("div", {}, el("progress", { max: count, value: n, "aria-label": told }), el("span", { class: "quiet-text" }, ` ${told}`));
    }));
  }
}

function _choices(label) {
  if (label.kind === "flag") {
    return [{ key: label.key, value: true, title: "yes" }, { key: label.key, value: false, title: "no" }];
  }
  return label.kind === "choice" ? label.values.map((value) => ({ key: label.key, value, title: String(value) })) : [];
}

function _told(value) {
  return value === null ? "not said" : JSON.stringify(value);
}
