// What is on screen, to pass on: a link that leads back to it, and a page of its own.

import * as address from "./address.js";
import { askBytes } from "./api.js";
import { el } from "./dom.js";
import { say } from "./status.js";

/** Copies what leads back here: the command that opens it for anybody who may read the archive. The token stays out. */
export async function link(about) {
  const { page, given } = address.read();
  const at = address.of(page, { ...given, commit: given.commit ?? about.commit });
  const text = `archive view ${_quoted(about.url)} --at ${_quoted(at)}`;
  try {
    await navigator.clipboard.writeText(text);
    say(`copied: ${text}`);
  } catch {
    say(text); // without the right to the clipboard it can be selected
  }
}

/** Saves what is on screen as a single page. */
export async function save() {
  const { page, given } = address.read();
  const what =
    { episode: "episode", episodes: "episodes", checkpoints: given.ranks ? "plan" : "checkpoint" }[page] ?? "archive";
  try {
    const { bytes, facts } = await askBytes("page", { ...given, what });
    const url = URL.createObjectURL(new Blob([bytes], { type: "text/html" }));
    el("a", { href: url, download: facts.name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
    say(`saved as ${facts.name}`);
  } catch (error) {
    say(error.message, { error: true });
  }
}

function _quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
