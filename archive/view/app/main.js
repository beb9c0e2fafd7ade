// Starts: asks what is shown, and shows the page that the address names.

import * as address from "./address.js";
import { ask, GONE, Refused } from "./api.js";
import { cut, el, fill } from "./dom.js";
import * as keys from "./keys.js";
import { book } from "./labelbook.js";
import { Live } from "./live.js";
import { saved } from "./saved.js";
import * as sharing from "./sharing.js";
import { clear, say } from "./status.js";

// name -> its module, loaded when it is first shown. `new Page(node, about, given, signal)` is there until the signal:
// nothing of it is drawn, asked or bound to a key after that. `load()` resolves when keys may come; `update(given)`, if it
// is there, changes what is shown, or says that it cannot; `news(about)` shows a newer commit.
const PAGES = {
  episodes: () => import("./episodes.js"),
  episode: () => import("./episode.js"),
  together: () => import("./together.js"),
  checkpoints: () => import("./checkpoints.js"),
  compare: () => import("./compare.js"),
  wall: () => import("./wall.js"),
};
const TABS = [
  ["episodes", "Episodes"],
  ["checkpoints", "Checkpoints"],
  ["compare", "Side by side"],
  ["wall", "Newest"],
];

const SERVED = [
  { keys: ["f"], does: "follow new commits, or no longer", run: () => live.toggle() },
  { keys: ["e"], does: "save what is on screen as a single page", run: () => void sharing.save() },
];
const MOST = 1000; // characters of a reason

let about = null;
let live = null;
let byWall = false; // new commits are followed because the wall is shown, not because somebody asked for it
let shown = { key: null, name: null, page: null, loaded: null, stop: new AbortController() };

async function start() {
  document.body.classList.toggle("saved", Boolean(saved));
  if (saved) address.start(saved.at);
  // the token has opened the page: it need not stay in the address bar, nor in the history
  else if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  try {
    about = await ask("about", { commit: address.read().given.commit });
  } catch (error) {
    addEventListener("hashchange", start, { once: true });
    return cannot(error, start);
  }
  if (!saved) document.title = `${about.url} · archive`;
  live = new Live({ commit: about.newest, onnews: news, onstate: () => top() });
  if (!saved) book.start(about);
  book.follow((commit) => commit !== undefined && labelled(commit));
  keys.bind("Everywhere", [
    { keys: ["?"], does: "this help", soon: true, run: keys.help },
    { keys: ["l"], does: "copy the command that leads back here", run: () => void sharing.link(about) },
    ...(saved ? [] : SERVED),
  ]);
  addEventListener("hashchange", show);
  addEventListener("popstate", show);
  await show();
}

async function show() {
  address.arrived();
  const { page: name, given } = address.read();
  const key = JSON.stringify([name, given]);
  if (key === shown.key) return keys.resume();
  clear();
  if (shown.name === name && shown.page?.update?.(given)) {
    shown.key = key; // the page itself knows what changed
    top();
    return keys.resume();
  }
  shown.stop.abort();
  const mine = (shown = { key, name, page: null, loaded: null, stop: new AbortController() });
  keys.wait();
  fill(document.getElementById("main"));
  top();
  try {
    await (mine.loaded = open(mine, given));
    if (mine === shown) keys.ready();
  } catch (error) {
    if (mine !== shown) return undefined; // somebody went on
    mine.stop.abort();
    mine.page = null;
    keys.ready(false);
    cannot(error, again);
  }
  return undefined;
}

async function open(mine, given) {
  const main = document.getElementById("main");
  const { Page } = await loaded(mine.name);
  mine.stop.signal.throwIfAborted();
  mine.page = new Page(main, about, given, mine.stop.signal);
  await mine.page.load();
  mine.stop.signal.throwIfAborted();
  follow(mine.name);
  if (document.activeElement === document.body) main.focus(); // the page it was on is gone
}

/** Labels were saved, which is a commit that is no news to this page. */
async function labelled(commit) {
  live.known(commit);
  about = { ...about, commit };
  top();
  if (!about.pinned) about = await ask("about").catch(() => about); // there may be labels that there were not
}

async function loaded(page) {
  try {
    return await (Object.hasOwn(PAGES, page) ? PAGES[page] : PAGES.episodes)();
  } catch {
    throw new Refused(GONE, 0, "Gone");
  }
}

/** The wall follows new commits by itself, as long as it is shown. */
function follow(page) {
  const wall = page === "wall" && !about.pinned;
  if (wall && !live.on) byWall = true;
  else if (wall || !byWall) return;
  else byWall = false;
  if (live.on !== wall) live.toggle();
}

function again() {
  shown.key = shown.name = null;
  return show();
}

/** Says in the page's place why it is not there, and what else there is. */
function cannot(error, retry) {
  const { given } = address.read();
  const ways = el(
    "p.ways",
    el("button", { onclick: retry }, "Try again"),
    el("a", { href: address.of("episodes", { ...address.scope(given), where: "" }) }, "Episodes"),
    given.commit || given.checkpoint
      ? el("a", { href: address.of("episodes") }, "Episodes of the newest commit")
      : null,
  );
  fill(
    document.getElementById("main"),
    el(
      "section.failed.ready",
      { role: "alert" },
      el("h1", "This cannot be shown"),
      el("p", cut(error.message, MOST)),
      ways,
    ),
  );
}

/** A newer commit is there: pages that can show it do so. */
async function news(commit) {
  if (address.read().given.commit) return; // somebody looks at an older one
  about = await ask("about");
  top();
  say(`commit ${commit} is there`);
  const mine = shown;
  await mine.loaded?.catch(() => {}); // what it came with may be older
  if (mine === shown) await mine.page?.news?.(about);
}

function top() {
  const { page, given } = address.read();
  const tabs = TABS.filter(([name]) => !saved || saved.pages.includes(name)).map(([name, title]) =>
    el("a", { href: address.of(name, address.scope(given)), "aria-current": name === page ? "page" : null }, title),
  );
  const at = given.commit ? `as of commit ${given.commit}` : `commit ${about.commit}`;
  const bar = document.getElementById("top");
  const focused = [...bar.querySelectorAll("a, button")].indexOf(document.activeElement);
  fill(
    bar,
    el("strong.url", { title: about.url }, about.url),
    el("nav", { "aria-label": "Pages" }, tabs),
    el("span.commit", at),
    saved ? el("span.quiet-text", "saved page") : _following(),
    el("button.quiet", { onclick: keys.help, "aria-label": "Help: all keys", "aria-keyshortcuts": "?" }, "?"),
  );
  bar.querySelectorAll("a, button")[focused]?.focus(); // who pressed one of them is still there
}

function _following() {
  return el(
    "button",
    { "aria-pressed": String(live.on), disabled: about.pinned, "aria-keyshortcuts": "f", onclick: () => live.toggle() },
    live.on ? "● live" : "○ live",
  );
}

start();
