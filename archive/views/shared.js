"use strict";
// What all pages share: what they were given to show, how it is packed, and numbers as people read them.
const data = JSON.parse(document.getElementById("data").textContent);

function decoded(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

async function inflated(text) {
  const stream = new Blob([decoded(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function readable(value) {
  if (value === null) return "-";
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(5)));
}
