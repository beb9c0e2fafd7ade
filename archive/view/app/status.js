// One line at the bottom that says what happened, also to those who listen.

import { add, fill } from "./dom.js";

let timer = 0;

/** Says something; an error stays until something else is said. */
export function say(text, { error = false, action = null } = {}) {
  const line = document.getElementById("status");
  fill(line, text);
  if (action) add(line, " ", action);
  line.className = error ? "error" : "";
  clearTimeout(timer);
  if (!error) timer = setTimeout(() => fill(line), 6000);
}
