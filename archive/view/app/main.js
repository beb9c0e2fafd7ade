// Starts: asks what is shown, and shows the page that the address names.

import * as address from "./address.js";
import { ask } from "./api.js";
import { el, fill } from "./dom.js";
import * as keys from "./keys.js";
import { book } from "./labelbook.js";
import { Live } from "./live.js";
import * as sharing from "./sharing.js";
import { say } from "./status.js";

// name -> its module, loaded when it is first shown: `show(node, about, given)` gives what leaves the page again;
// `update(given)`, if it is there, changes what is shown; `news(about)` shows a newer commit
const PAGES = {
  episodes: () => import("./episodes.js"),
  episode: () => import("./episode.js"),
  together: () => import("./together.js"),
  checkpoints: () => import("./checkpoints.js"),
  compare: () => import("./compare.js"),
  wall: () => import("./wall.js"),
};
const TABS = [["episodes", "Episodes"], ["checkpoints", "Checkpoints"], ["compare", "Side by side"], ["wall", "Newest"]];

let about = null;
let live = null;
let shown = { key: null, page: null, module: null, leave: null };

async function start() {
  // the token has opened the page: it need not stay in the address bar, nor in the history
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  try {
    about = await ask("about", { commit: address.read().given.commit });
  } catch (error) {
    say(error.message, { error: true });
    return;
  }
  document.title = `${about.url} · archive`;
  live = new Live({ commit: about.newest, onnews: news, onstate: () => top() });
  book.start(about);
  book.follow((commit) => commit !== undefined && saved(commit));
  keys.bind("Everywhere", [
    { keys: ["?"], does: "this help", run: keys.help },
    { keys: ["f"], does: "follow new commits, or no longer", run: () => live.toggle() },
    { keys: ["e"], does: "save what is on screen as a single page", run: sharing.save },
    { keys: ["l"], does: "copy the command that leads back here", run: () => sharing.link(about) },
  ]);
  addEventListener("hashchange", show);
  addEventListener("popstate", show);
  await show();
}

async function show() {
  const { page, given } = address.read();
  const key = JSON.stringify([page, given]);
  if (key === shown.key) return;
  shown.key = key;
  top();
  try {
    const module = await (PAGES[page] ?? PAGES.episodes)();
    if (shown.key !== key) return; // somebody went on
    if (shown.page === page && module.update?.(given)) return; // the page itself knows what changed
    shown.leave?.();
    const main = document.getElementById("main");
    fill(main);
    shown = { key, page, module, leave: null };
    const leave = await module.show(main, about, given);
    if (shown.key === key || shown.page === page) shown.leave = leave;
    else leave();
    if (page === "wall" && !live.on) live.toggle();
  } catch (error) {
    say(error.message, { error: true });
  }
}

/** Labels were saved, which is a commit that is no news to this page. */
function saved(commit) {
  live.known(commit);
  about = { ...about, commit };
  top();
}

/** A newer commit is there: pages that can show it do so. */
async function news(commit) {
  if (address.read().given.commit) return; // somebody looks at an older one
  about = await ask("about");
  top();
  say(`commit ${commit} is there`);
  await shown.module?.news?.(about);
}

function top() {
  const { page, given } = address.read();
  const tabs = TABS.map(([name, title]) =>
    el("a", { href: address.of(name, address.scope(given)), "aria-current": name === page ? "page" : null }, title));
  const at = given.commit ? `as of commit ${given.commit}` : `commit ${about.commit}`;
  fill(document.getElementById("top"),
    el("strong", { class: "url", title: about.url }, about.url),
    el("nav", { "aria-label": "Pages" }, tabs),
    el("span", { class: "facts" }, at),
    el("button", { "aria-pressed": String(live.on), disabled: about.pinned, "aria-keyshortcuts": "f", onclick: () => live.toggle() }, live.on ? "● live" : "○ live"),
    el("button", { class: "quiet", onclick: keys.help, "aria-label": "Help: all keys", "aria-keyshortcuts": "?" }, "?"));
}

start();
