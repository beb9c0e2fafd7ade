// The field for a condition: names of columns and values are completed; a condition that is none says why.

import { ask } from "./api.js";
import { cut, el, fill } from "./dom.js";

const WORDS = ["and", "or", "not", "in", "is null", "is not null", "true", "false"];
const NAME = /[A-Za-z_][\w.-]*$/;
const VALUE = /([A-Za-z_][\w.-]*)\s*(?:=|==|!=|<>)\s*'([^']*)$/;
const MOST = 12;

/** value: the condition; onset(text): it is to hold from now on; onheld(): it does, and whoever wrote it is done; scope():
 * which episodes it is about. */
export class Conditions {
  constructor({ value, scope, onset, onheld }) {
    Object.assign(this, { scope, onset, onheld, value });
    this.list = el("ul", {
      role: "listbox",
      id: "completions",
      class: "completions",
      hidden: true,
      "aria-label": "Completions",
    });
    this.why = el("p.why", { id: "condition-why", role: "alert" });
    this.input = el("input", {
      type: "text",
      class: "condition",
      placeholder: "Condition: return > 10 and length < 200",
      "aria-label": "Condition",
      role: "combobox",
      "aria-controls": "completions",
      "aria-expanded": "false",
      "aria-autocomplete": "list",
      "aria-describedby": "condition-why",
      "aria-keyshortcuts": "/",
      autocomplete: "off",
      spellcheck: "false",
      value,
      oninput: () => this._complete(),
      onkeydown: (event) => this._pressed(event),
      onblur: () => setTimeout(() => this._close(), 150),
    });
    this.node = el("div.conditions", this.input, this.list, this.why);
    this.chosen = -1;
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  /** Another condition than the one typed, as a bar's. */
  set(text) {
    if (text === this.value) return void this.refused(""); // what somebody is writing stays
    this.value = text;
    this.input.value = text;
    this.refused("");
    return undefined;
  }

  /** The condition holds: keys are for the rows again, unless somebody writes on. */
  held() {
    if (this.written === this.input.value && document.activeElement === this.input) this.onheld();
    this.written = null;
  }

  /** What the condition and another one ask for together. */
  and(more) {
    const now = this.input.value.trim();
    if (!now) return more;
    return `${/\bor\b/i.test(now) ? `(${now})` : now} and ${more}`;
  }

  /** Says why it cannot be applied; "" that it can. */
  refused(why) {
    this.input.setAttribute("aria-invalid", why ? "true" : "false");
    fill(this.why, cut(why, 300));
  }

  /** Says something of a condition that can be applied. */
  told(what) {
    fill(this.why, cut(what, 300));
  }

  async _complete() {
    const before = this.input.value.slice(0, this.input.selectionStart);
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const found = await this._found(before).catch(() => ({ options: [], start: 0 }));
    if (turn !== this.turn || document.activeElement !== this.input) return;
    this.options = found.options.slice(0, MOST);
    this.start = found.start;
    this.chosen = -1;
    this._draw();
  }

  async _found(before) {
    const value = before.match(VALUE);
    if (value) {
      const options = await ask("values", { ...this.scope(), name: value[1], text: value[2] });
      return { options, start: before.length - value[2].length - 1 };
    }
    const name = before.match(NAME)?.[0] ?? "";
    if (!name) return { options: [], start: before.length };
    this.names ??= await ask("names", this.scope());
    const wanted = name.toLowerCase();
    const starts = [...this.names, ...WORDS].filter((one) => one.toLowerCase().startsWith(wanted) && one !== name);
    const within = this.names.filter(
      (one) => one.toLowerCase().includes(wanted) && !starts.includes(one) && one !== name,
    );
    return { options: [...starts, ...within], start: before.length - name.length };
  }

  _draw() {
    this.list.hidden = !this.options.length;
    this.input.setAttribute("aria-expanded", String(!this.list.hidden));
    fill(
      this.list,
      this.options.map((option, i) =>
        el(
          "li",
          {
            role: "option",
            id: `completion-${i}`,
            "aria-selected": String(i === this.chosen),
            onpointerdown: (event) => {
              event.preventDefault();
              this._take(i);
            },
          },
          cut(option, 120),
        ),
      ),
    );
    if (this.chosen >= 0) this.input.setAttribute("aria-activedescendant", `completion-${this.chosen}`);
    else this.input.removeAttribute("aria-activedescendant");
  }

  _take(i) {
    const at = this.input.selectionStart;
    const text = this.input.value;
    const option = this.options[i];
    this.input.value = text.slice(0, this.start) + option + text.slice(at);
    this.input.selectionStart = this.input.selectionEnd = this.start + option.length;
    this._close();
  }

  _close() {
    this.turn = (this.turn ?? 0) + 1; // what is still on its way is no longer wanted
    this.list.hidden = true;
    this.options = [];
    this.chosen = -1;
    this.input.setAttribute("aria-expanded", "false");
  }

  _pressed(event) {
    const open = !this.list.hidden;
    if (open && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      const step = event.key === "ArrowDown" ? 1 : -1;
      this.chosen =
        (this.chosen + step + this.options.length + (this.chosen < 0 && step < 0 ? 1 : 0)) % this.options.length;
      this._draw();
    } else if (open && (event.key === "Tab" || (event.key === "Enter" && this.chosen >= 0))) {
      this._take(Math.max(0, this.chosen));
    } else if (event.key === "Enter") {
      this._close();
      this.written = this.input.value.trim();
      this.onset(this.written);
    } else if (event.key === "Escape" && open) {
      this._close();
    } else if (event.key === "Escape") {
      this.input.blur();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
