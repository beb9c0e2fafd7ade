"use strict";
// The table of episodes: only the rows in sight are in the document. Sorted by a column, filtered by several; the
// histograms show all rows in grey and those that pass the filters in colour, and a press on a bar filters by it.
const ROW = 24; // pixels; as in page.css
const BARS = 24;
const SVG = "http://www.w3.org/2000/svg";
const place = document.getElementById("rows");
let columns = [];
let order = new Uint32Array(0); // rows that pass the filters, as they are shown
let sorted = { column: -1, down: false };

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function cell(column, row) {
  const value = column.values[row];
  if (value === null) return "-";
  if (column.kind === "name") return column.names[value];
  if (column.kind === "flag") return value ? "yes" : "no";
  return column.kind === "number" ? readable(value) : value;
}

// What a filter's text means: null for nothing, else whether a row passes.
function test(column, text) {
  text = text.trim();
  if (!text) return null;
  if (column.kind === "number") return numeric(column.values, text);
  const wanted = text.toLowerCase();
  if (column.kind === "text") return (row) => (column.values[row] ?? "").toLowerCase().includes(wanted);
  if (column.kind === "flag") return (row) => (column.values[row] ? "yes" : "no").startsWith(wanted);
  const passes = column.names.map((name) => name.toLowerCase().includes(wanted));
  return (row) => column.values[row] !== null && passes[column.values[row]];
}

function numeric(values, text) {
  const range = text.match(/^(-?[\d.e+-]*?)\.\.(-?[\d.e+-]*)$/i);
  if (range) {
    const low = range[1] === "" ? -Infinity : Number(range[1]);
    const high = range[2] === "" ? Infinity : Number(range[2]);
    if (Number.isNaN(low) || Number.isNaN(high)) return undefined;
    return (row) => values[row] !== null && values[row] >= low && values[row] <= high;
  }
  const found = text.match(/^(<=|>=|<|>|=)?\s*(-?[\d.]+(?:e[+-]?\d+)?)$/i);
  if (!found) return undefined;
  const bound = Number(found[2]);
  const compare = {
    "<": (v) => v < bound, "<=": (v) => v <= bound, ">": (v) => v > bound, ">=": (v) => v >= bound, "=": (v) => v === bound,
  }[found[1] ?? "="];
  return (row) => values[row] !== null && compare(values[row]);
}

function filtered(count) {
  const tests = [];
  for (const column of columns) {
    const passes = test(column, column.input.value);
    column.input.classList.toggle("wrong", passes === undefined);
    if (passes) tests.push(passes);
  }
  const out = new Uint32Array(count);
  let n = 0;
  for (let row = count - 1; row >= 0; row--) if (tests.every((passes) => passes(row))) out[n++] = row; // newest first
  return out.slice(0, n);
}

function compared(column, down) {
  const { values, kind } = column;
  const way = down ? -1 : 1;
  const keys = kind === "name" ? column.names.map((name) => name) : null;
  const collator = new Intl.Collator(undefined, { numeric: true });
  const ranks = keys && keys.map((_, i) => i).sort((a, b) => collator.compare(keys[a], keys[b]));
  const place = ranks && ranks.reduce((out, code, i) => ((out[code] = i), out), []);
  return (a, b) => {
    const x = values[a], y = values[b];
    if (x === null || y === null) return (x === null) - (y === null); // what is not known comes last
    if (kind === "text") return way * (x < y ? -1 : x > y ? 1 : 0);
    return way * (place ? place[x] - place[y] : x - y);
  };
}

function shown() {
  const body = place.querySelector("tbody");
  const first = Math.max(0, Math.floor(place.scrollTop / ROW) - 10);
  const last = Math.min(order.length, first + Math.ceil(place.clientHeight / ROW) + 30);
  const rows = [element("tr")];
  rows[0].style.height = `${first * ROW}px`;
  for (let i = first; i < last; i++) {
    const tr = element("tr");
    for (const column of columns) {
      const td = element("td", cell(column, order[i]), column.kind === "number" ? { class: "number" } : {});
      td.title = td.textContent;
      tr.append(td);
    }
    rows.push(tr);
  }
  const rest = element("tr");
  rest.style.height = `${(order.length - last) * ROW}px`;
  body.replaceChildren(...rows, rest);
}

function counted(count) {
  const steps = columns.find((column) => column.name === "steps");
  const total = steps ? order.reduce((sum, row) => sum + (steps.values[row] ?? 0), 0) : 0;
  const of = order.length === count ? "" : ` of ${count.toLocaleString("en")}`;
  const text = `${order.length.toLocaleString("en")}${of} episodes, ${total.toLocaleString("en")} steps`;
  document.getElementById("count").textContent = text;
}

// -- histograms ----------------------------------------------------------------------------------------------------

function edges(values) {
  let low = Infinity, high = -Infinity, whole = true;
  for (const v of values) {
    if (v === null) continue;
    if (v < low) low = v;
    if (v > high) high = v;
    whole &&= Number.isInteger(v);
  }
  if (low > high) return null;
  if (whole) {
    const wide = Math.max(1, Math.ceil((high - low + 1) / BARS));
    return { low, high, wide, bars: Math.ceil((high - low + 1) / wide), whole };
  }
  const wide = (high - low) / BARS || 1;
  return { low, high, wide, bars: high > low ? BARS : 1, whole };
}

function counts(values, rows, { low, wide, bars }) {
  const out = new Uint32Array(bars);
  for (const row of rows) if (values[row] !== null) out[Math.min(bars - 1, Math.floor((values[row] - low) / wide))]++;
  return out;
}

function histogram(column, count) {
  const bins = edges(column.values);
  if (!bins) return null;
  const wide = 280, high = 70;
  const all = counts(column.values, Array.from({ length: count }, (_, i) => i), bins);
  const most = Math.max(...all);
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, class: "histogram" }))
    svg.setAttribute(key, value);
  const step = wide / bins.bars;
  const bar = (i, n, kind) => {
    const rect = document.createElementNS(SVG, "rect");
    const tall = n ? Math.max(1, (high * n) / most) : 0;
    const shape = { x: i * step, y: high - tall, width: Math.max(step - 1, 0.5), height: tall, class: kind };
    for (const [key, value] of Object.entries(shape)) rect.setAttribute(key, value);
    return rect;
  };
  const range = (i) => [bins.low + i * bins.wide, Math.min(bins.high, bins.low + (i + 1) * bins.wide - (bins.whole ? 1 : 0))];
  const draw = () => {
    const now = counts(column.values, order, bins);
    svg.replaceChildren();
    for (let i = 0; i < bins.bars; i++) {
      const [from, to] = range(i).map((value) => readable(value));
      const press = bar(i, most, "press"); // as high as the picture
      const title = document.createElementNS(SVG, "title");
      title.textContent = `${from === to ? from : `${from} to ${to}`}: ${now[i]}${now[i] === all[i] ? "" : ` of ${all[i]}`}`;
      press.append(title);
      press.addEventListener("click", () => {
        const [low, high] = range(i).map((value) => Number(value.toPrecision(10)));
        column.input.value = low === high ? `=${low}` : `${low}..${high}`;
        update();
      });
      svg.append(bar(i, all[i], "all"), bar(i, now[i], "now"), press);
    }
  };
  const figure = element("figure");
  const [from] = range(0), [, to] = range(bins.bars - 1);
  figure.append(svg, element("figcaption", `${column.name}: ${readable(from)} … ${readable(to)}`));
  document.getElementById("spread").append(figure);
  return draw;
}

// -- all together --------------------------------------------------------------------------------------------------

let update = () => {};

async function start() {
  const { count, columns: unpackedColumns } = JSON.parse(new TextDecoder().decode(await inflated(data.rows)));
  columns = unpackedColumns;
  const names = element("tr"), filters = element("tr");
  for (const [i, column] of columns.entries()) {
    const head = element("th");
    const button = element("button", column.name, { type: "button" });
    button.addEventListener("click", () => {
      const down = sorted.column === i ? !sorted.down : column.kind === "number";
      sorted = { column: i, down };
      for (const other of names.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      update();
    });
    head.append(button);
    names.append(head);
    column.input = element("input", undefined, { type: "search", "aria-label": `filter by ${column.name}` });
    column.input.addEventListener("input", () => update());
    const below = element("th");
    below.append(column.input);
    filters.append(below);
    let longest = column.name.length + 2;
    const texts = column.names ?? (column.kind === "text" ? column.values : []);
    for (const text of texts) if (text !== null && text.length > longest) longest = text.length;
    const wide = column.kind === "number" ? Math.max(longest, 9) : Math.min(longest, column.name === "metadata" ? 44 : 30);
    head.style.width = `${wide + 1}ch`;
  }
  place.querySelector("thead").append(names, filters);
  const drawn = data.spread.map((name) => columns.find((c) => c.name === name)).filter(Boolean);
  const histograms = drawn.map((column) => histogram(column, count)).filter(Boolean);
  update = () => {
    order = filtered(count);
    if (sorted.column >= 0) order.sort(compared(columns[sorted.column], sorted.down));
    place.scrollTop = 0;
    counted(count);
    for (const draw of histograms) draw();
    shown();
  };
  document.getElementById("clear").addEventListener("click", () => {
    for (const column of columns) column.input.value = "";
    update();
  });
  place.addEventListener("scroll", () => requestAnimationFrame(shown));
  window.addEventListener("resize", shown);
  update();
  document.body.dataset.ready = "yes";
}

start();
