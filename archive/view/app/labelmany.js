// Labels beside the table of episodes: keys set those of the picked row; all that are meant are set after a question.

import { cut, el, fill } from "./dom.js";
import { ask } from "./api.js";
import * as format from "./format.js";
import { book } from "./labelbook.js";
import { choices, Labels } from "./labels.js";
import { failed, say } from "./status.js";

const WAIT_MS = 120; // who walks through the rows does not want what is said of each

export class LabelMany {
  /** scope(): which episodes are meant; count(): how many; picked(): the picked one's id, as far as it is known; arrived(): once it
   * is; onwithout(key); onsaved(). All until `signal`. */
  constructor({ scope, count, picked, arrived, onwithout, onsaved, signal }) {
    Object.assign(this, { scope, count, picked, arrived, signal });
    this.labels = new Labels({ scope, onwithout, whose: () => this._load(), signal });
    this.whose = el("p.whose", "Keys 1 to 9 label the picked row.");
    this.dialog = el("dialog", { "aria-labelledby": "many-title", class: "many" });
    this.node = el(
      "div.label-many",
      this.whose,
      this.labels.node,
      el("button", { onclick: () => this.all(), "aria-keyshortcuts": "a" }, "Label all of these …"),
      this.dialog,
    );
    this.unfollow = book.follow((commit) => commit !== undefined && onsaved(commit));
  }

  async load() {
    await this.labels.load().catch(failed);
  }

  close() {
    clearTimeout(this.timer);
    this.labels.close();
    this.unfollow();
  }

  /** Another row is picked, or none. */
  show() {
    clearTimeout(this.timer);
    const id = this.picked();
    fill(this.whose, id ? `${format.name(id, 30)}:` : "Keys 1 to 9 label the picked row.");
    if (this.labels.one?.id !== id) this.labels.of(null);
    if (id) this.timer = setTimeout(() => this._load().catch(failed), WAIT_MS);
  }

  /** The row that is picked now: {id, labels}, once it is known what is said of it; null for none. */
  async _load() {
    clearTimeout(this.timer);
    const id = this.picked() ?? (await this.arrived());
    if (!id || this.labels.one?.id === id) return id ? this.labels.one : null;
    const { commit, checkpoint } = this.scope();
    const found = await ask("said", { commit, checkpoint, id }, this.signal);
    if (this.picked() === id && this.labels.one?.id !== id) this.labels.of(found);
    return this.labels.one?.id === id ? this.labels.one : found;
  }

  /** The same keys as of an episode, of the picked row. */
  keys() {
    return [
      ...this.labels.keys(),
      { keys: ["a"], does: "label all episodes of the condition at once", run: () => this.all() },
    ];
  }

  /** Asks what is to be said of all that are meant, and how many these are, before it is. */
  async all() {
    await this.labels.loading?.catch(() => {}); // a key may come before it is known what may be said
    if (this.signal.aborted) return undefined;
    const { offered } = this.labels;
    if (!offered || offered.why_not)
      return say(`nothing can be labelled here${offered ? `: ${offered.why_not}` : ""}`, { error: true });
    const count = this.count();
    const scope = this.scope();
    const back = offered.labels.map(({ key }) => ({ key, value: null, title: "not said" }));
    const wanted = [...offered.labels.flatMap(choices), ...back];
    const what = el(
      "select",
      { "aria-label": "What is said of all" },
      wanted.map((one, i) => el("option", { value: i }, cut(`${one.key}: ${one.title}`, 60))),
    );
    const button = el("button.sure");
    const draw = () => fill(button, `Set it of ${format.counted(count, "episode")}`);
    what.addEventListener("change", draw);
    button.addEventListener("click", () => this._confirmed(scope, wanted[Number(what.value)], count));
    draw();
    fill(
      this.dialog,
      el("h2", { id: "many-title" }, `Label ${format.counted(count, "episode")}`),
      el("p", scope.where ? ["Those that meet ", el("code", cut(scope.where, 200))] : "All that are listed."),
      el("p", what),
      el("p.actions", button, el("button", { onclick: () => this.dialog.close() }, "Cancel")),
    );
    this.dialog.showModal();
    what.focus();
    return undefined;
  }

  async _confirmed(scope, { key, value }, count) {
    this.dialog.close();
    try {
      await book.ofAll(scope, key, value, count);
    } catch (error) {
      say(error.message, { error: true });
    }
  }
}
