// Values as people read them.

import { cut } from "./dom.js";

const NONE = "–";

/** A number in at most five digits; NaN is a value that is not there. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  const short = Number(value.toPrecision(5));
  return Math.abs(short) >= 1e15 || (short !== 0 && Math.abs(short) < 1e-4) ? short.toExponential() : String(short);
}

/** Thousands apart, for counts. */
export function count(value) {
  return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
}

/** "1 episode", "2 episodes": `what` is one of them. */
export function counted(number, what) {
  return `${count(number)} ${what}${number === 1 ? "" : "s"}`;
}

/** Seconds since 1970 as a time, UTC. */
export function time(seconds) {
  if (seconds === null || Number.isNaN(seconds)) return NONE;
  const when = new Date(seconds * 1000);
  return Number.isNaN(when.getTime()) ? number(seconds) : when.toISOString().slice(0, 19).replace("T", " ");
}

/** Bytes as KB, MB, GB. */
export function size(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let [value, unit] = [bytes, 0];
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/** A long name without its middle: the ends are what tells names apart. */
export function name(text, most = 30) {
  if (text.length <= most) return text;
  const end = Math.ceil(most * 0.6);
  return `${text.slice(0, most - end - 1)}…${text.slice(-end)}`;
}

/** A value of the table of episodes, by the kind of its column. */
export function cell(kind, value) {
  if (value === null || value === undefined) return NONE;
  if (kind === "name") return name(value, 24);
  if (kind === "number") return number(value);
  if (kind === "time") return time(value);
  if (kind === "flag" || typeof value === "boolean") return value ? "yes" : "no";
  if (kind === "list") return _list(value);
  return typeof value === "number" ? number(value) : cut(value, 300);
}

function _list(text) {
  try {
    const values = JSON.parse(text);
    const told = values.length === 1 ? values.map(String) : values.map((one) => cut(one, 9));
    return values.length ? cut(told.join(", "), 300) : NONE;
  } catch {
    return cut(text, 300);
  }
}
