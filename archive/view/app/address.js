// The address says all that is shown, so that a link brings it back: #/episodes?where=...&sort=return

/** {page, given}: what the address says. */
export function read() {
  const text = location.hash.replace(/^#\/?/, "");
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

/** Goes to a page; "back" comes back from it. */
export function go(page, given) {
  location.hash = of(page, given);
}

/** Changes what the page shows: some parameters, and no entry of "back" for each (as while scrubbing) unless told so. */
export function change(given, { entry = false } = {}) {
  const now = read();
  const next = of(now.page, { ...now.given, ...given });
  if (next === location.hash) return;
  if (entry) history.pushState(null, "", next);
  else history.replaceState(null, "", next);
}

// what says which episodes are meant, wherever they are shown
const SCOPE = ["commit", "run", "checkpoint", "buffer", "weights", "where"];

/** The parameters that say which episodes are meant. */
export function scope(given = read().given) {
  return Object.fromEntries(SCOPE.filter((name) => given[name]).map((name) => [name, given[name]]));
}
