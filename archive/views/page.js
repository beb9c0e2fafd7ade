"use strict";
// One step is shown at a time: the slider, the play button, the arrow keys and a press on a curve choose it. What lies
// under the pointer on a curve is shown without going there.
const slider = document.getElementById("step");
const play = document.getElementById("play");
const speed = document.getElementById("speed");

function painter(canvas, film, bytes) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(film.width, film.height);
  const out = image.data;
  const pixels = film.width * film.height;
  return (step) => {
    const frame = Math.min(Math.floor(step / film.every), film.count - 1);
    for (let to = 0, from = frame * pixels * 3; to < pixels * 4; to += 4, from += 3) {
      out[to] = bytes[from];
      out[to + 1] = bytes[from + 1];
      out[to + 2] = bytes[from + 2];
      out[to + 3] = 255;
    }
    context.putImageData(image, 0, 0);
  };
}

// Draws the cursor of one field's curves and says their values there.
function curve(box) {
  const { length, of, every, width, values } = data.curves[box.dataset.field];
  const bytes = decoded(values).buffer;
  const numbers = width === 4 ? new Float32Array(bytes) : new Float64Array(bytes);
  const cursor = box.querySelector(".cursor");
  const places = box.parentNode.querySelectorAll(".keys b");
  return {
    at: (clientX) => {
      const { left, width: wide } = box.getBoundingClientRect();
      const share = Math.min(Math.max((clientX - left) / wide, 0), 1);
      return Math.round(share * (of - 1));
    },
    show: (step) => {
      const place = Math.min(step, of - 1);
      const row = Math.min(Math.floor(place / every), length - 1);
      cursor.style.left = `${of > 1 ? (100 * place) / (of - 1) : 50}%`;
      places.forEach((place, i) => (place.textContent = readable(numbers[i * length + row])));
    },
  };
}

function showTexts(step) {
  for (const place of document.querySelectorAll("pre.text")) {
    const { steps, every } = data.texts[place.dataset.field];
    const row = Math.floor(step / every);
    place.textContent = row < steps.length ? steps[row] : "";
  }
}

async function start() {
  const painters = [];
  for (const canvas of document.querySelectorAll("canvas.frames")) {
    const film = data.films[canvas.dataset.field];
    painters.push(painter(canvas, film, await inflated(film.pixels)));
  }
  const curves = [];
  const show = () => {
    const step = Number(slider.value);
    document.getElementById("at").textContent = `step ${step} of ${data.steps}`;
    for (const paint of painters) paint(step);
    for (const one of curves) one.show(step);
    showTexts(step);
  };
  const goTo = (step) => {
    slider.value = step;
    show();
  };
  for (const box of document.querySelectorAll(".curve")) {
    const one = curve(box);
    curves.push(one);
    box.addEventListener("pointerdown", (event) => goTo(one.at(event.clientX)));
    box.addEventListener("pointermove", (event) => (event.buttons ? goTo : one.show)(one.at(event.clientX)));
    box.addEventListener("pointerleave", () => one.show(Number(slider.value)));
  }
  if (data.rollout) curves.push(conversation(data.rollout, goTo));
  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const forward = () => goTo(Number(slider.value) + 1 >= data.steps ? 0 : Number(slider.value) + 1);
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
  document.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way && event.target === document.body) goTo(Number(slider.value) + way);
  });
  show();
  document.body.dataset.ready = "yes";
}

start();
