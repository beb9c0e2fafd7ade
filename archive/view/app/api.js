// Questions to the server this page came from, with the token that the page was given, or one of this browser before it. A
// page that was saved is its own answer.

import { readArrow } from "./arrow.js";
import { answer, saved } from "./saved.js";

export const GONE = "the viewer does not answer: is `archive view` still running?";

const NOT_SAVED = "this page was saved without it: `archive view` shows all of the archive";
const TOKEN = saved ? "" : _token();

/** What the server refused, in its words. */
export class Refused extends Error {
  constructor(message, status, kind) {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

// A page that is opened by its cookie is given none: cookies go to all ports of a host, what is stored here to this alone.
function _token() {
  const { content } = document.querySelector('meta[name="token"]');
  try {
    if (content) localStorage.setItem("token", content);
    return content || localStorage.getItem("token") || "";
  } catch {
    return content; // within a notebook whose browser lets nothing be stored
  }
}

async function _fetched(path, given, how = {}) {
  const url = new URL(`api/${path}`, document.baseURI.split("#")[0]);
  for (const [key, value] of Object.entries(given ?? {})) {
    if (value === undefined || value === null || value === "" || value === false) continue;
    url.searchParams.set(key, value === true ? "1" : Array.isArray(value) ? JSON.stringify(value) : value);
  }
  const headers = { Authorization: `Bearer ${TOKEN}`, ...how.headers };
  let reply;
  try {
    reply = await fetch(url, { ...how, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(GONE, 0, "Gone");
  }
  if (reply.ok) return reply;
  const text = await reply.text();
  let told = { error: text.trim() };
  try {
    told = JSON.parse(text);
  } catch {
    // a text is a reason, too
  }
  throw new Refused(told.error, reply.status, told.kind);
}

async function _found(path, given, signal) {
  const found = await answer(path, given).catch((error) => {
    throw new Refused(error.message, error.status ?? 0, "Saved");
  });
  signal?.throwIfAborted();
  if (found === undefined) throw new Refused(NOT_SAVED, 0, "Saved");
  return found;
}

/** A JSON document. `given` are the parameters; lists go as JSON. `signal` takes the question back. */
export async function ask(path, given, signal) {
  if (saved) return _found(path, given, signal);
  return (await _fetched(path, given, { signal })).json();
}

/** A table: {columns: {name: values}, count, facts}. */
export async function askTable(path, given, signal) {
  if (saved) return _found(path, given, signal);
  const reply = await _fetched(path, given, { signal });
  return { ...readArrow(await reply.arrayBuffer()), facts: _facts(reply) };
}

/** Bytes, and the facts beside them. */
export async function askBytes(path, given, signal) {
  if (saved) return _found(path, given, signal);
  const reply = await _fetched(path, given, { signal });
  return { bytes: new Uint8Array(await reply.arrayBuffer()), facts: _facts(reply) };
}

/** Sends a change, a JSON document; what became of it comes back. `how`: {keepalive} of a page that closes. */
export async function tell(path, document_, given, how) {
  const headers = { "Content-Type": "application/json" };
  return (await _fetched(path, given, { ...how, method: "POST", headers, body: JSON.stringify(document_) })).json();
}

function _facts(reply) {
  const out = {};
  for (const [key, value] of reply.headers) {
    if (key.startsWith("x-") && key !== "x-content-type-options") out[key.slice(2)] = JSON.parse(value);
  }
  return out;
}
