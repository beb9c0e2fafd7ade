// Starts: asks what is shown, and shows the page that the address names.

import * as address from "./address.js";
import { ask } from "./api.js";
import { el, fill } from "./dom.js";
import * as keys from "./keys.js";
import { say } from "./status.js";

const PAGES = { // name -> its module, loaded when it is first shown; each has `show(node, about, given)`
  episodes: () => import("./episodes.js"),
  episode: () => import("./episode.js"),
  compare: () => import("./compare.js"),
};
const TABS = [["episodes", "Episodes"], ["compare", "Side by side"]];

let about = null;
let shown = { page: null, leave: null };

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
  keys.bind("Everywhere", [{ keys: ["?"], does: "this help", run: keys.help }]);
  addEventListener("hashchange", show);
  addEventListener("popstate", show);
  await show();
}

async function show() {
  const { page, given } = address.read();
  _top(page);
  const main = document.getElementById("main");
  const load = PAGES[page] ?? PAGES.episodes;
  const key = JSON.stringify([page, given]);
  if (key === shown.key) return;
  shown.key = key;
  try {
    const module = await load();
    if (shown.key !== key) return; // somebody went on
    if (shown.page === page && module.update?.(given)) return; // the page itself knows what changed
    shown.leave?.();
    fill(main);
    shown = { key, page, leave: await module.show(main, about, given) };
  } catch (error) {
    say(error.message, { error: true });
  }
}

function _top(page) {
  const tabs = TABS.map(([name, title]) =>
    el("a", { href: address.of(name, address.scope()), "aria-current": name === page ? "page" : null }, title));
  fill(document.getElementById("top"),
    el("strong", { class: "url", title: about.url }, about.url),
    el("nav", { "aria-label": "Pages" }, tabs),
    el("span", { class: "facts" }, `commit ${about.commit}`),
    el("button", { class: "quiet", onclick: keys.help, "aria-label": "Help: all keys", "aria-keyshortcuts": "?" }, "?"));
}

start();
