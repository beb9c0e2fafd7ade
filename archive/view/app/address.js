// The address says all that is shown, so that a link brings it back: #/episodes?where=...&sort=return

let kept = null; // the address of a page that was saved, in whose frame a notebook's browser may keep none

/** The address, as of a link: "#/episodes?...". */
export function hash() {
  return kept ?? location.hash;
}

/** A page that was saved begins here; its links are followed by itself, as a frame without an address leads elsewhere. */
export function start(at) {
  kept = location.hash || at;
  addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    open(link.getAttribute("href"));
  });
  addEventListener("hashchange", () => (kept = location.hash || at));
}

function _show(next, how) {
  if (kept !== null) kept = next;
  try {
    history[how](null, "", next);
  } catch {
    // a frame of a notebook
  }
}

/** {page, given}: what the address says. */
export function read() {
  const text = hash().replace(/^#\/?/, "");
  const [path, query] = [text.split("?")[0], text.slice(text.indexOf("?") + 1)];
  const given = text.includes("?") ? Object.fromEntries(new URLSearchParams(query)) : {};
  return { page: _decoded(path) || "episodes", given };
}

function _decoded(path) {
  try {
    return decodeURIComponent(path);
  } catch {
    return path;
  }
}

/** The address of a page; what is empty is left out. */
export function of(page, given = {}) {
  const kept = Object.entries(given).filter(([, v]) => v !== undefined && v !== null && v !== "" && v !== false);
  const query = new URLSearchParams(kept.map(([k, v]) => [k, v === true ? "1" : String(v)])).toString();
  return `#/${encodeURIComponent(page)}${query ? `?${query}` : ""}`;
}

/** Goes to a page, at once; "back" comes back from it. */
export function go(page, given) {
  open(of(page, given));
}

/** Goes to an address. */
export function open(next) {
  if (next === hash()) return;
  _show(next, "pushState");
  dispatchEvent(new PopStateEvent("popstate"));
}

/** Changes some parameters of the page as it shows others, as while scrubbing: no entry of "back" for each. */
export function change(given) {
  if (moved()) return; // it is another page's by now
  const now = read();
  _show(of(now.page, { ...now.given, ...given }), "replaceState");
  arrived();
}

/** Has the page show what some other parameters say; "back" comes back from that. */
export function turn(given) {
  const now = read();
  go(now.page, { ...now.given, ...given });
}

let seen = hash();

/** What the address says is shown, or on its way. */
export function arrived() {
  seen = hash();
}

/** Whether the address says more than anybody has looked at yet: browsers change it first. */
export function moved() {
  return hash() !== seen;
}

// what says which episodes are meant, wherever they are shown
const SCOPE = ["commit", "run", "checkpoint", "buffer", "weights", "where"];

/** The parameters that say which episodes are meant. */
export function scope(given = read().given) {
  return Object.fromEntries(SCOPE.filter((name) => given[name]).map((name) => [name, given[name]]));
}
