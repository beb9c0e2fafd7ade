// What was said of episodes in this tab: what is not saved yet, and what can be taken back, whatever page one is on.

import { tell } from "./api.js";
import { cut, el } from "./dom.js";
import * as format from "./format.js";
import { say } from "./status.js";

const SAVE_MS = 2500; // after the last change, all of them are one commit

class Book {
  constructor() {
    this.unsaved = {}; // id -> {key: value}
    this.sending = {}; // the same, on its way
    this.expected = {}; // id -> {key: what was said when one changed it}
    this.done = []; // what can be taken back: {id -> {key: what it was}} each
    this.followers = [];
    this.last = null; // the key that was set last
    addEventListener("pagehide", () => this._leave());
    addEventListener("beforeunload", (event) => this.failed && event.preventDefault());
  }

  /** What an earlier page of this tab could not save of the same archive is saved now. */
  start(about) {
    this.kept = `labels of ${about.id}`;
    this.unsaved = JSON.parse(sessionStorage.getItem(this.kept) ?? "{}");
    if (this.waiting) this._later();
  }

  /** f(commit): something was said, or saved, which is when there is a commit. */
  follow(f) {
    this.followers.push(f);
    return () => this.followers.splice(this.followers.indexOf(f), 1);
  }

  /** How many episodes have labels that are not saved. */
  get waiting() {
    return Object.keys(this.unsaved).length;
  }

  /** What this tab has said of an episode beyond what is saved. */
  of(id) {
    return { ...this.sending[id], ...this.unsaved[id] };
  }

  set(id, key, before, value) {
    this.done.push({ [id]: { [key]: before } });
    this.last = key;
    if (!(key in this.of(id))) this.expected[id] = { ...this.expected[id], [key]: before };
    this._put({ [id]: { [key]: value } });
  }

  /** Says the same of all that are meant, at once; `count` is how many somebody confirmed. */
  async ofAll(scope, key, value, count) {
    await this.save();
    const { commit, before } = await tell("labels-of-all", { labels: { [key]: value }, count }, scope);
    this.done.push(before);
    this.last = key;
    say(`${key} of ${format.counted(count, "episode")} is ${told(value)} now: commit ${commit}; u takes it back`);
    this._tell(commit);
  }

  undo() {
    const last = this.done.pop();
    if (!last) return say("there is no label to take back");
    const ids = Object.keys(last);
    this.back = true;
    this._put(last);
    const [key, value] = Object.entries(last[ids[0]])[0];
    if (ids.length > 1) say(`${key} of ${format.counted(ids.length, "episode")} is what it was`);
    else say(`${key} of ${cut(ids[0], 40)} is ${told(value)} again`);
    return undefined;
  }

  /** Saves what is not saved, as one commit. */
  async save() {
    clearTimeout(this.timer);
    await this.saving;
    if (this.waiting) await (this.saving = this._send());
  }

  _put(said) {
    for (const [id, values] of Object.entries(said)) this.unsaved[id] = { ...this.unsaved[id], ...values };
    this._later();
    this._keep();
    this._tell();
  }

  _later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), SAVE_MS);
  }

  async _send() {
    const [labels, expected] = [this.unsaved, this.expected];
    [this.unsaved, this.sending, this.expected] = [{}, labels, {}];
    let saved;
    try {
      const { commit, before } = await tell("labels", { labels, back: this.back });
      saved = commit;
      this.failed = this.back = false;
      say(
        _others(expected, before) ??
          `labels of ${format.counted(Object.keys(labels).length, "episode")} are saved: commit ${commit}`,
      );
    } catch (error) {
      // they are not lost: the next change, "s", or the next page tries again
      for (const [id, values] of Object.entries(labels)) this.unsaved[id] = { ...values, ...this.unsaved[id] };
      this.expected = { ...expected, ...this.expected };
      this.failed = true;
      say(`not saved, but kept: ${error.message}`, {
        error: true,
        action: el("button", { onclick: () => this.save() }, "Try again"),
      });
    }
    this._tell(saved);
    this.sending = {};
    this._keep();
  }

  _keep() {
    const all = { ...this.sending, ...this.unsaved };
    if (Object.keys(all).length) sessionStorage.setItem(this.kept, JSON.stringify(all));
    else sessionStorage.removeItem(this.kept);
  }

  /** The tab closes: one question more, which goes on without it. */
  _leave() {
    if (this.waiting)
      tell("labels", { labels: this.unsaved, back: this.back }, {}, { keepalive: true }).catch(() => {});
  }

  _tell(commit) {
    for (const follower of [...this.followers]) follower(commit);
  }
}

/** A label's value, to people. */
export function told(value) {
  return value === null || value === undefined
    ? "not said"
    : value === true
      ? "yes"
      : value === false
        ? "no"
        : cut(JSON.stringify(value), 60);
}

// what somebody else had said while one was labelling
function _others(expected, before) {
  for (const [id, values] of Object.entries(expected)) {
    for (const [key, was] of Object.entries(values)) {
      const found = before[id]?.[key];
      if (found !== undefined && found !== was)
        return `saved; meanwhile somebody had said of ${cut(id, 40)}: ${key} ${told(found)}`;
    }
  }
  return null;
}

export const book = new Book();
