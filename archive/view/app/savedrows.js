// Answers of a page that was saved with a table of episodes: which rows are meant, in which order, how they are spread.

import { condition } from "./where.js";

const BARS = 30; // as archive/view/tables.py has it
const MOST_VALUES = 12;
const MOST_GROUPS = 16;
const QUARTILES = [0, 0.25, 0.5, 0.75, 1];
const LIST = "model_weights_uuids";

const scopes = new Map(); // what is asked -> rows, in the order of writing

/** The answer to a question about the table; undefined for what it does not say. */
export function answerOf(path, given, table) {
  return Object.hasOwn(ANSWERS, path) ? ANSWERS[path](given, new Rows(table)) : undefined;
}

const ANSWERS = { episodes, histograms, distributions, check, names, values, said };

class Rows {
  constructor({ columns, count, types }) {
    Object.assign(this, { columns, count, types });
  }

  /** f(row) -> value, null where there is none. */
  column(name) {
    if (!Object.hasOwn(this.columns, name)) return undefined;
    const values = this.columns[name];
    if (name === LIST) return (row) => (values[row] === null ? null : (JSON.parse(values[row])[0] ?? null));
    return this.types[name] === "double"
      ? (row) => (Number.isNaN(values[row]) ? null : values[row])
      : (row) => values[row];
  }

  /** The rows that are meant. */
  of({ run, buffer, weights, where }) {
    const key = JSON.stringify([run, buffer, weights, where]);
    if (!scopes.has(key)) scopes.set(key, this.meant({ run, buffer }, weights, where));
    return scopes.get(key);
  }

  meant(equal, weights, where) {
    const tests = Object.entries(equal).flatMap(([name, value]) =>
      value ? [(row) => this.columns[name][row] === value] : [],
    );
    if (weights) tests.push((row) => JSON.parse(this.columns[LIST][row] ?? "[]").includes(weights));
    if (where) tests.push(condition(where, (name) => this.column(name)));
    return Uint32Array.from(every(this.count).filter((row) => tests.every((test) => test(row) === true)));
  }

  /** The same in the order of a column; those without a value come last. */
  ordered({ sort, descending, ...given }) {
    const rows = this.of(given);
    if (!sort) return descending ? rows.toReversed() : rows;
    const value = this.column(sort);
    const known = rows.filter((row) => value(row) !== null);
    known.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a - b));
    return Uint32Array.from([...(descending ? known.reverse() : known), ...rows.filter((row) => value(row) === null)]);
  }

  known(name, rows) {
    const value = this.column(name);
    return Array.from(rows, value).filter((one) => one !== null);
  }
}

function every(count) {
  return Array.from({ length: count }, (_, row) => row);
}

function episodes({ start, stop, columns: wanted, ...given }, table) {
  const all = table.ordered({ ...given, descending: given.descending && given.descending !== "0" });
  const rows = all.slice(start, stop);
  const columns = {};
  for (const name of wanted.filter((one) => one in table.columns)) {
    const values = table.columns[name];
    columns[name] = Array.from(rows, (row) => values[row]);
  }
  return { columns, count: rows.length, facts: { count: all.length, all: table.count, start } };
}

function check(given, table) {
  return { count: table.of(given).length, notes: [] };
}

function names(given, table) {
  return Object.keys(table.columns);
}

function values({ name, text }, table) {
  if (table.types[name] !== "text" || name === LIST) return [];
  const found = new Set(table.known(name, every(table.count)).filter((one) => one.startsWith(text)));
  const quoted = (one) => `'${one.replaceAll("\\", "\\\\").replaceAll("'", "\\'")}'`;
  return [...found].sort().slice(0, 20).map(quoted);
}

function said({ id }, table) {
  const row = table.columns.episode_id.indexOf(id);
  const labels = Object.keys(table.columns).filter((name) => name.startsWith("label."));
  const own = labels.map((name) => [name.slice("label.".length), table.column(name)(row)]);
  return { id, labels: Object.fromEntries(own.filter(([, value]) => value !== null)) };
}

function histograms({ columns, ...given }, table) {
  const meant = table.of(given);
  const there = columns.filter((name) => Object.hasOwn(table.columns, name));
  return Object.fromEntries(there.map((name) => [name, histogram(name, meant, table)]));
}

function histogram(name, meant, table) {
  const [all, some] = [table.known(name, every(table.count)), table.known(name, meant)];
  const none = { none: meant.length - some.length, none_all: table.count - all.length };
  if (table.types[name] !== "double") return { ...frequent(all, some), ...none };
  const edges = edgesOf(all);
  const ends = edges.length ? { least: least(all), most: -least(all.map((one) => -one)) } : {};
  return { kind: "number", edges, ...ends, counts: counted(some, edges), all: counted(all, edges), ...none };
}

function least(known) {
  return known.reduce((a, b) => Math.min(a, b), Infinity);
}

function edgesOf(known) {
  const finite = known.filter(Number.isFinite);
  if (!finite.length) return [];
  const [low, high] = [least(finite), -least(finite.map((one) => -one))];
  const between = (bars, wide) => Array.from({ length: bars + 1 }, (_, i) => low + i * wide);
  if (Math.max(-low, high) < 2 ** 50 && finite.every(Number.isInteger)) {
    const wide = Math.max(1, Math.ceil((high - low + 1) / BARS));
    return between(Math.ceil((high - low + 1) / wide), wide);
  }
  return high > low ? between(BARS, (high - low) / BARS) : [low - 0.5, low + 0.5];
}

function counted(known, edges) {
  const out = Array(Math.max(0, edges.length - 1)).fill(0);
  const scale = out.length / (edges.at(-1) - edges[0]);
  for (const one of known.filter(Number.isFinite))
    out[Math.min(out.length - 1, Math.max(0, Math.floor((one - edges[0]) * scale)))] += 1;
  return out;
}

function frequent(all, some) {
  const count = (known) => known.reduce((out, one) => out.set(one, (out.get(one) ?? 0) + 1), new Map());
  const [every_, now] = [count(all), count(some)];
  const chosen = [...every_].sort((a, b) => b[1] - a[1]).slice(0, MOST_VALUES);
  return {
    kind: "text",
    values: chosen.map(([value]) => value),
    all: chosen.map(([, n]) => n),
    counts: chosen.map(([value]) => now.get(value) ?? 0),
    others: every_.size - chosen.length,
  };
}

function distributions({ column, by = "run", ...given }, table) {
  const [value, group] = [table.column(column), table.column(by)];
  if (!value || !group) return undefined; // the groups are not rows of this table, as checkpoints
  const found = new Map();
  for (const row of table.of(given)) {
    const name = group(row) ?? "none";
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(value(row));
  }
  const numbers = ([name, all]) => [
    name,
    all
      .filter((one) => one !== null)
      .map(Number)
      .sort((a, b) => a - b),
  ];
  const groups = [...found].map(numbers).sort((a, b) => b[1].length - a[1].length);
  const chosen = groups.slice(0, MOST_GROUPS);
  const edges = edgesOf(chosen.flatMap(([, known]) => known));
  const told = chosen.map(([name, known]) => ({
    name: String(name),
    count: known.length,
    counts: counted(known, edges),
    mean: known.length ? known.reduce((a, b) => a + b, 0) / known.length : null,
    quartiles: known.length ? QUARTILES.map((part) => quantile(known, part)) : null,
  }));
  return { edges, groups: told, others: groups.length - chosen.length };
}

function quantile(sorted, part) {
  const at = part * (sorted.length - 1);
  const [low, high] = [sorted[Math.floor(at)], sorted[Math.ceil(at)]];
  return low + (high - low) * (at - Math.floor(at));
}
