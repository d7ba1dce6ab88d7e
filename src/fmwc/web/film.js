// The way of one sample from noise: its state at a time, what the flow predicts from there, and where the doubt sits.

import { fit, surface } from "./canvas.js";
import { Cell } from "./cell.js";
import { colourOf, ink, themeColour } from "./colour.js";
import { drawCrystal, sceneOf } from "./crystal.js";
import { el } from "./dom.js";
import { drawPicture } from "./pictures.js";

/**
 * @typedef {object} Trace The path of one sample, as tensors by name: `grid`, `times`, `std`, `doubt`, `states` (or the
 *   channels of a crystal), `guess`.
 */

/** Return the index of the entry of a rising list that is closest to a time. */
export function nearest(times, t) {
  let best = 0;
  for (let i = 1; i < times.length; i++) if (Math.abs(times[i] - t) < Math.abs(times[best] - t)) best = i;
  return best;
}

/** Return the largest doubt of all times, so that one scale serves them all. */
function largest(doubt) {
  let top = 1e-12;
  for (const value of doubt ? doubt.data : []) if (value > top) top = value;
  return top;
}

function captioned(canvas, title) {
  return el("figure", {}, canvas, el("figcaption", {}, title));
}

/** The state of an image, the predicted image, and the doubt of each pixel. */
class ImageFilm {
  constructor(trace) {
    this.trace = trace;
    this.shape = trace.states.shape.slice(1);
    const canvas = (label) => el("canvas", { class: "pixels", role: "img", "aria-label": label });
    this.canvases = ["State of the image", "Image that the flow predicts", "Doubt of each pixel"].map(canvas);
    const titles = ["state at t", "predicted image", "doubt per pixel"];
    this.element = el("div", { class: "panes" }, ...this.canvases.map((one, i) => captioned(one, titles[i])));
    this.top = largest(trace.doubt);
  }

  show(t) {
    const { states, guess, doubt, grid, times } = this.trace, size = this.shape.reduce((a, b) => a * b, 1), i = nearest(grid.data, t);
    drawPicture(this.canvases[0], states.data.subarray(i * size, (i + 1) * size), this.shape);
    const reading = nearest(times.data, t);
    if (guess) drawPicture(this.canvases[1], guess.data.subarray(reading * size, (reading + 1) * size), this.shape);
    this.canvases[1].closest("figure").hidden = !guess;
    this.canvases[2].closest("figure").hidden = !doubt;
    if (doubt) drawDoubt(this.canvases[2], doubt, reading, this.top);
  }

  thumb(canvas, i) {
    const size = this.shape.reduce((a, b) => a * b, 1);
    drawPicture(canvas, this.trace.states.data.subarray(i * size, (i + 1) * size), this.shape);
  }
}

/** Draw the doubt of each pixel from paper to orange. */
function drawDoubt(canvas, { shape: [, height, width], data }, reading, top) {
  Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d"), image = pen.createImageData(width, height), size = width * height;
  const from = themeColour("--paper-low"), to = colourOf(0).match(/\d+/g).map(Number), ends = themeColour("--ink");
  for (let k = 0; k < size; k++) {
    const share = Math.sqrt(Math.min(1, data[reading * size + k] / top)), low = share < 0.7;
    const [a, b, s] = low ? [from, to, share / 0.7] : [to, ends, ((share - 0.7) / 0.3) * 0.75];
    for (let c = 0; c < 3; c++) image.data[4 * k + c] = a[c] + (b[c] - a[c]) * s;
    image.data[4 * k + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
}

/** The path of a point over the plane, and the spread that the flow predicts from its place. */
class PointFilm {
  constructor(trace, support) {
    Object.assign(this, { trace, support });
    this.canvas = el("canvas", { role: "img", "aria-label": "Path of the point from noise to sample" });
    this.element = el("div", { class: "panes one" }, captioned(this.canvas, "Path from noise to sample. The ellipse is the doubt of the velocity, carried on to t = 1."));
    const values = Array.from(trace.states.data).concat(support.flat()).filter(Number.isFinite);
    this.half = 1.08 * Math.max(1e-6, ...values.map(Math.abs));
    new ResizeObserver(() => this.show(this.time ?? 1)).observe(this.canvas);
  }

  show(t) {
    this.time = t;
    const { states, guess, doubt, grid, times } = this.trace, [pen, width, height] = surface(this.canvas), place = this.#place(width, height);
    const i = nearest(grid.data, t), at = (k) => place(states.data[2 * k], states.data[2 * k + 1]);
    this.#cells(pen, place);
    this.#path(pen, at, 0, i, ink("--accent"), 2.2);
    this.#path(pen, at, i, grid.data.length - 1, ink("--gone"), 1.6);
    if (guess && doubt && t < 1) {
      const r = nearest(times.data, t), unit = (Math.min(width, height) / (2 * this.half)) * (1 - t);
      const [gx, gy] = place(guess.data[2 * r], guess.data[2 * r + 1]);
      Object.assign(pen, { strokeStyle: ink("--doubtful"), fillStyle: ink("--doubtful"), lineWidth: 2 });
      pen.beginPath();
      pen.ellipse(gx, gy, Math.max(3, unit * doubt.data[2 * r]), Math.max(3, unit * doubt.data[2 * r + 1]), 0, 0, 2 * Math.PI);
      pen.globalAlpha = 0.18;
      pen.fill();
      pen.globalAlpha = 1;
      pen.stroke();
    }
    dot(pen, at(i), 6, ink("--ink"));
  }

  thumb(canvas, i) {
    const [pen, width, height] = surface(canvas), place = this.#place(width, height), { data } = this.trace.states;
    this.#cells(pen, place);
    this.#path(pen, (k) => place(data[2 * k], data[2 * k + 1]), 0, i, ink("--accent"), 1.5);
    dot(pen, place(data[2 * i], data[2 * i + 1]), 3, ink("--ink"));
  }

  #place(width, height) {
    const unit = Math.min(width, height) / (2 * this.half);
    return (x, y) => [width / 2 + unit * x, height / 2 - unit * y];
  }

  #cells(pen, place) {
    pen.fillStyle = ink("--cell");
    for (const [left, bottom, right, top] of this.support) {
      const [x0, y1] = place(left, bottom), [x1, y0] = place(right, top);
      pen.fillRect(x0, y0, x1 - x0, y1 - y0);
    }
  }

  #path(pen, at, from, to, colour, wide) {
    Object.assign(pen, { strokeStyle: colour, lineWidth: wide });
    pen.beginPath();
    for (let k = from; k <= to; k++) pen.lineTo(...at(k));
    pen.stroke();
  }
}

function dot(pen, [x, y], radius, colour) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}

/**
 * A crystal on its way, with atoms coloured by their element or by their doubt. The uncertainty of an atom is relative to
 * the largest in this crystal, so it is multiplied by the doubt of the whole crystal: a sure crystal has no doubtful atoms.
 */
class CrystalFilm {
  constructor(trace, support, level) {
    this.trace = trace;
    this.doubt = 1 - (level ?? 0);
    this.cell = new Cell({ label: "The crystal at the chosen time; drag, or use the arrow keys, to turn it" });
    this.box = el("input", { type: "checkbox", id: "by-doubt" });
    this.box.addEventListener("change", () => this.show(this.time ?? 1));
    this.element = el("div", { class: "panes one crystal" }, this.cell.element, trace.doubt && el("p", { class: "check" }, this.box, el("label", { for: "by-doubt" }, "Colour the atoms by doubt")));
    this.top = largest(trace.doubt);
  }

  at(i) {
    const { lattice, species, coord } = this.trace, atoms = coord.shape[1];
    return {
      lattice: [0, 3, 6].map((row) => Array.from(lattice.data.subarray(9 * i + row, 9 * i + row + 3))),
      species: Array.from(species.data.subarray(i * atoms, (i + 1) * atoms)),
      coord: Array.from({ length: atoms }, (_, k) => Array.from(coord.data.subarray(3 * (i * atoms + k), 3 * (i * atoms + k) + 3))),
    };
  }

  show(t) {
    const { grid, times, doubt } = this.trace, still = this.time !== undefined;
    this.time = t;
    const row = doubt && nearest(times.data, t), wide = doubt && doubt.shape[1];
    const share = doubt && this.box.checked ? Array.from(doubt.data.subarray(row * wide, (row + 1) * wide), (value) => this.doubt * Math.sqrt(value / this.top)) : null;
    this.cell.show(this.at(nearest(grid.data, t)), { doubt: share, still });
  }

  thumb(canvas, i) {
    const [pen, width, height] = surface(canvas), scene = sceneOf(this.at(i)), size = Math.min(width, height);
    if (scene) drawCrystal(pen, scene, { x: (width - size) / 2, y: (height - size) / 2, size });
  }

  close() {
    this.cell.close();
  }
}

/** The coordinates of a vector and their doubt. */
class VectorFilm {
  constructor(trace) {
    this.trace = trace;
    this.canvas = el("canvas", { role: "img", "aria-label": "Coordinates at the chosen time, with their doubt" });
    this.element = el("div", { class: "panes one flat" }, captioned(this.canvas, "Coordinates at t; the band is the doubt of the velocity."));
    const finite = Array.from(trace.states.data).filter(Number.isFinite);
    this.low = finite.reduce((a, b) => Math.min(a, b), 0);
    this.high = finite.reduce((a, b) => Math.max(a, b), 1e-6);
  }

  show(t) {
    const { states, doubt, grid, times } = this.trace, i = nearest(grid.data, t);
    this.#line(this.canvas, states, i, doubt, doubt && nearest(times.data, t));
  }

  thumb(canvas, i) {
    this.#line(canvas, this.trace.states, i, null, 0);
  }

  #line(canvas, states, i, doubt, reading) {
    const [pen, width, height] = surface(canvas), wide = states.shape[1], py = (v) => height - ((v - this.low) / (this.high - this.low)) * height * 0.86 - 0.07 * height;
    const px = (k) => ((k + 0.5) / wide) * width;
    if (doubt) {
      pen.fillStyle = ink("--wash");
      pen.beginPath();
      for (let k = 0; k < wide; k++) pen.lineTo(px(k), py(states.data[i * wide + k] + doubt.data[reading * wide + k]));
      for (let k = wide - 1; k >= 0; k--) pen.lineTo(px(k), py(states.data[i * wide + k] - doubt.data[reading * wide + k]));
      pen.fill();
    }
    Object.assign(pen, { strokeStyle: ink("--accent"), lineWidth: 2 });
    pen.beginPath();
    for (let k = 0; k < wide; k++) pen.lineTo(px(k), py(states.data[i * wide + k]));
    pen.stroke();
  }
}

const FILMS = { points: PointFilm, images: ImageFilm, crystals: CrystalFilm, vectors: VectorFilm };

/** Return the film of a trace. */
/** `level` is the confidence or the rank of the sample, in [0, 1]. */
export const filmOf = (kind, trace, support, level) => new FILMS[kind](trace, support, level);

/**
 * Return a strip of small pictures at even times; a click moves the cursor.
 *
 * @param {{thumb: (canvas: HTMLCanvasElement, index: number) => void}} film
 * @param {ArrayLike<number>} grid
 * @param {(t: number) => void} move
 */
export function strip(film, grid, move, frames = 9) {
  const places = [...new Set(Array.from({ length: frames }, (_, k) => nearest(grid, k / (frames - 1))))];
  const buttons = places.map((i) => {
    const canvas = el("canvas", { "aria-hidden": "true", class: "pixels" });
    const button = el("button", { type: "button", class: "frame", "aria-label": `Go to t = ${grid[i].toFixed(2)}` }, canvas, el("span", {}, grid[i].toFixed(2)));
    button.addEventListener("click", () => move(grid[i]));
    return { button, canvas, i };
  });
  const paint = () => buttons.forEach(({ canvas, i }) => canvas.isConnected && (fit(canvas), film.thumb(canvas, i)));
  const element = el("div", { class: "strip" }, ...buttons.map(({ button }) => button));
  new ResizeObserver(paint).observe(element);
  return { element, paint };
}
