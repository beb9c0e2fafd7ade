"use strict";
// One step is shown at a time: the slider, the play button and the arrow keys choose it.
const data = JSON.parse(document.getElementById("data").textContent);
const slider = document.getElementById("step");
const play = document.getElementById("play");
const speed = document.getElementById("speed");

async function inflated(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function painter(canvas, film, bytes) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(film.width, film.height);
  const pixels = film.width * film.height;
  return (step) => {
    const frame = Math.min(Math.floor(step / film.every), film.count - 1);
    for (let i = 0, from = frame * pixels * 3; i < pixels; i++, from += 3) {
      image.data.set([bytes[from], bytes[from + 1], bytes[from + 2], 255], i * 4);
    }
    context.putImageData(image, 0, 0);
  };
}

function showCurves(step) {
  const share = data.steps > 1 ? step / (data.steps - 1) : 0.5;
  for (const cursor of document.querySelectorAll(".curve .cursor")) {
    cursor.style.left = `${share * 100}%`;
  }
}

function showTexts(step) {
  for (const place of document.querySelectorAll("pre.text")) {
    const texts = data.texts[place.dataset.field];
    place.textContent = step < texts.length ? texts[step] : "";
  }
}

async function start() {
  const painters = [];
  for (const canvas of document.querySelectorAll("canvas.frames")) {
    const film = data.films[canvas.dataset.field];
    painters.push(painter(canvas, film, await inflated(film.pixels)));
  }
  const show = () => {
    const step = Number(slider.value);
    document.getElementById("at").textContent = `step ${step} of ${data.steps}`;
    for (const paint of painters) paint(step);
    showCurves(step);
    showTexts(step);
  };
  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const forward = () => {
    slider.value = Number(slider.value) + 1 >= data.steps ? 0 : Number(slider.value) + 1;
    show();
  };
  const run = () => {
    play.textContent = "Pause";
    timer = setInterval(forward, 1000 / Number(speed.value));
  };
  play.addEventListener("click", () => (timer === null ? run() : stop()));
  speed.addEventListener("change", () => {
    if (timer !== null) {
      stop();
      run();
    }
  });
  slider.addEventListener("input", show);
  show();
  document.body.dataset.ready = "yes";
}

start();
