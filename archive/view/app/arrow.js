// Arrow's IPC stream, as far as the server writes it: columns of double, bool and utf8, no dictionaries or compression.
// The layout is that of arrow.apache.org/docs/format/Columnar.html; messages are flatbuffers, little-endian.

const SCHEMA = 1;
const BATCH = 3;
const TYPES = { 3: "double", 5: "text", 6: "bool" }; // numbers of flatbuffers' union "Type"

/** {count, columns: {name: values}}: Float64Array (a missing value is NaN, and listed in `missing`), or an array. */
export function readArrow(buffer) {
  const view = new DataView(buffer);
  const columns = {};
  let fields = [];
  let count = 0;
  let at = 0;
  while (at + 8 <= buffer.byteLength) {
    if (view.getUint32(at, true) !== 0xffffffff) throw new Error("this is no Arrow stream");
    const size = view.getInt32(at + 4, true);
    if (size === 0) break;
    const start = at + 8;
    const message = _table(view, start + view.getUint32(start, true));
    const kind = message.byte(1);
    const body = start + size;
    if (kind === SCHEMA) {
      fields = _fields(message.table(2));
      for (const field of fields) columns[field.name] = [];
    } else if (kind === BATCH) {
      const batch = message.table(2);
      const rows = Number(batch.long(0));
      _batch(buffer, batch, body, fields, rows).forEach((values, i) => columns[fields[i].name].push(values));
      count += rows;
    }
    at = body + Number(message.long(3));
  }
  for (const field of fields) columns[field.name] = _joined(columns[field.name], field.type);
  return { count, columns, types: Object.fromEntries(fields.map((f) => [f.name, f.type])) };
}

/** A flatbuffers table: field i by its offset in the vtable; 0 where it is left out. */
function _table(view, at) {
  const vtable = at - view.getInt32(at, true);
  const size = view.getUint16(vtable, true);
  const place = (i) => {
    const entry = 4 + 2 * i;
    const offset = entry < size ? view.getUint16(vtable + entry, true) : 0;
    return offset ? at + offset : 0;
  };
  const pointed = (i) => {
    const found = place(i);
    return found ? found + view.getUint32(found, true) : 0;
  };
  return {
    byte: (i) => (place(i) ? view.getUint8(place(i)) : 0),
    long: (i) => (place(i) ? view.getBigInt64(place(i), true) : 0n),
    table: (i) => (pointed(i) ? _table(view, pointed(i)) : null),
    text: (i) => {
      const found = pointed(i);
      const length = found ? view.getUint32(found, true) : 0;
      return new TextDecoder().decode(new Uint8Array(view.buffer, found + 4, length));
    },
    tables: (i) => {
      const found = pointed(i);
      const length = found ? view.getUint32(found, true) : 0;
      return Array.from({ length }, (_, n) => {
        const item = found + 4 + 4 * n;
        return _table(view, item + view.getUint32(item, true));
      });
    },
    structs: (i, bytes) => {
      const found = pointed(i);
      const length = found ? view.getUint32(found, true) : 0;
      return Array.from({ length }, (_, n) => found + 4 + bytes * n);
    },
    at: (place_) => Number(view.getBigInt64(place_, true)),
  };
}

function _fields(schema) {
  return schema.tables(1).map((field) => {
    const type = TYPES[field.byte(2)];
    if (!type) throw new Error(`column ${field.text(0)} has a type that this page does not read`);
    return { name: field.text(0), type };
  });
}

function _batch(buffer, batch, body, fields, rows) {
  const nodes = batch.structs(1, 16).map((place) => ({ rows: batch.at(place), nulls: batch.at(place + 8) }));
  const buffers = batch.structs(2, 16).map((place) => ({ at: body + batch.at(place), size: batch.at(place + 8) }));
  let next = 0;
  return fields.map((field, i) => {
    const valid = buffers[next++];
    const missing = nodes[i].nulls ? (row) => !_bit(buffer, valid.at, row) : () => false;
    if (field.type === "text") {
      const [offsets, data] = [buffers[next++], buffers[next++]];
      return _texts(buffer, offsets, data, rows, missing);
    }
    const data = buffers[next++];
    if (field.type === "bool") {
      return Array.from({ length: rows }, (_, row) => (missing(row) ? null : _bit(buffer, data.at, row)));
    }
    const values = new Float64Array(buffer.slice(data.at, data.at + 8 * rows));
    if (nodes[i].nulls) for (let row = 0; row < rows; row++) if (missing(row)) values[row] = NaN;
    return values;
  });
}

function _bit(buffer, at, row) {
  return Boolean((new Uint8Array(buffer, at + (row >> 3), 1)[0] >> (row & 7)) & 1);
}

function _texts(buffer, offsets, data, rows, missing) {
  if (!rows) return [];
  const ends = new Int32Array(buffer.slice(offsets.at, offsets.at + 4 * (rows + 1)));
  const decoder = new TextDecoder();
  return Array.from({ length: rows }, (_, row) => {
    if (missing(row)) return null;
    return decoder.decode(new Uint8Array(buffer, data.at + ends[row], ends[row + 1] - ends[row]));
  });
}

function _joined(parts, type) {
  if (parts.length === 1) return parts[0];
  if (type !== "double") return parts.flat();
  const out = new Float64Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}
