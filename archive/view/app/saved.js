// A page that was saved is this viewer with its answers: what the questions of api.js find here, and nowhere else.

import { readArrow } from "./arrow.js";
import * as format from "./format.js";
import { answerOf } from "./savedrows.js";

const held = document.getElementById("saved");

/** What came with the page: {at, pages, answers, films, curves, texts, table}; null where a server answers. */
export const saved = held ? JSON.parse(held.textContent) : null;

const OF_AN_EPISODE = { pictures, curves, steps, "field-rows": fieldRows };

/** The answer to a question; undefined where the page was saved without it. */
export async function answer(path, given = {}) {
  if (saved.films && OF_AN_EPISODE[path]) return OF_AN_EPISODE[path](given);
  if (saved.table) {
    saved.rows ??= inflated(saved.table).then((bytes) => readArrow(bytes.buffer));
    const found = answerOf(path, given, await saved.rows);
    if (found !== undefined) return found;
  }
  const key = given.number ? `${path} ${given.number}` : path;
  return Object.hasOwn(saved.answers, key) ? structuredClone(saved.answers[key]) : undefined;
}

function decoded(text) {
  return Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
}

async function inflated(text) {
  const stream = new Blob([decoded(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function pictures({ field, start, stop }) {
  const film = Object.hasOwn(saved.films, field) ? saved.films[field] : null;
  if (!film) return undefined;
  film.bytes ??= inflated(film.pixels);
  const bytes = await film.bytes;
  const size = 3 * film.width * film.height;
  const out = new Uint8Array(size * (stop - start));
  for (let step = start; step < stop; step++) {
    const frame = Math.min(Math.floor(step / film.every), film.count - 1);
    out.set(bytes.subarray(size * frame, size * (frame + 1)), size * (step - start));
  }
  return { bytes: out, facts: { shape: [stop - start, film.height, film.width], start, note: film.note, every: 1 } };
}

/** The numbers of a field: {values(part), every}, of one step in `every`. */
function numbers(field) {
  const packed = saved.curves[field];
  const bytes = decoded(packed.values).buffer;
  packed.numbers ??= packed.width === 4 ? new Float32Array(bytes) : new Float64Array(bytes);
  const values = (part) => packed.numbers.subarray(part * packed.length, (part + 1) * packed.length);
  return { ...packed, values };
}

function curves({ fields, start = 0, stop = Infinity, gamma }) {
  if (gamma && Number(gamma) !== saved.gamma) return undefined;
  const chosen = Object.keys(saved.curves).filter(
    (name) => !fields || fields.includes(name) || saved.curves[name].derived,
  );
  const lines = chosen.flatMap((field) => {
    const { parts, every, derived, values } = numbers(field);
    return parts.map((part, i) => {
      const whole = Array.from(values(i));
      const x = every > 1 ? whole.map((_, n) => n * every) : null;
      return { field, part, derived, x, y: every > 1 ? whole : whole.slice(start, stop) };
    });
  });
  return { length: saved.answers.episode.length, start, curves: lines, left_out: [] };
}

function told(field, step) {
  const { parts, every, values } = numbers(field);
  const texts = parts.map((_, i) => format.number(values(i)[Math.floor(step / every)]));
  return { parts, texts };
}

function written(field, step) {
  const { steps: texts, every } = saved.texts[field];
  return texts[Math.floor(step / every)] ?? "";
}

function steps({ start, stop }) {
  const each = Array.from({ length: stop - start }, (_, i) => start + i);
  const values = {};
  for (const field of Object.keys(saved.curves).filter((name) => !saved.curves[name].derived))
    values[field] = each.map((step) => {
      const { texts } = told(field, step);
      return texts.length > 1 ? `[${texts.join(", ")}]` : texts[0];
    });
  for (const field of Object.keys(saved.texts)) values[field] = each.map((step) => written(field, step));
  return { start, stop, values, more: 0 };
}

function fieldRows({ field, start, stop, column = 0 }) {
  const { fields, length, whole } = saved.answers.episode;
  const about = { told: fields.find((one) => one.name === field)?.told ?? "", start, count: length, steps: true };
  const each = Array.from({ length: Math.max(0, Math.min(stop, length) - start) }, (_, i) => start + i);
  if (Object.hasOwn(saved.curves, field)) {
    const columns = saved.curves[field].parts.slice(column);
    const rows = each.map((step) => told(field, step).texts.slice(column));
    return { ...about, columns, all_columns: saved.curves[field].parts.length, rows };
  }
  if (Object.hasOwn(saved.texts, field))
    return { ...about, columns: [""], all_columns: 1, rows: each.map((step) => [written(field, step)]) };
  if (!Object.hasOwn(whole, field)) return undefined;
  return { ...about, steps: false, start: 0, count: 1, columns: [""], all_columns: 1, rows: [[whole[field]]] };
}
