// One line at the bottom that says what happened, also to those who listen.

import { add, cut, fill } from "./dom.js";

const MOST = 600; // characters

let timer = 0;

/** Says something; an error stays until something else is said. */
export function say(text, { error = false, action = null } = {}) {
  const line = document.getElementById("status");
  fill(line, cut(text, MOST));
  if (action) add(line, " ", action);
  line.className = error ? "error" : "";
  clearTimeout(timer);
  if (!error) timer = setTimeout(() => fill(line), 6000);
}

/** Says what went wrong; what was taken back did not. */
export function failed(error) {
  if (error.name !== "AbortError") say(error.message, { error: true });
}

/** What was wrong with another page is wrong no longer. */
export function clear() {
  const line = document.getElementById("status");
  if (line.className === "error") say("");
}
