// A picture of one sample.

import { surface } from "../canvas.js";
import { Cell } from "../cell.js";
import { colourOf, ink, onTheme } from "../colour.js";
import { el } from "../dom.js";
import { drawPicture } from "../pictures.js";
import { crystalOf } from "../samples.js";

/** Return the element that shows a sample, and a function that frees it. */
export function portrait(samples, sample) {
  if (samples.kind === "crystals") {
    const cell = new Cell();
    cell.show(crystalOf(samples.tensors, sample));
    return { element: cell.element, close: () => cell.close() };
  }
  const canvas = el("canvas", { class: samples.kind === "images" ? "pixels" : "plot", role: "img", "aria-label": `Sample ${sample}` });
  const draw = () => DRAWN[samples.kind](canvas, samples, sample);
  onTheme(canvas, draw);
  new ResizeObserver(draw).observe(canvas);
  return { element: canvas, close() {} };
}

const DRAWN = {
  images(canvas, { x, count }, sample) {
    const size = x.data.length / count;
    drawPicture(canvas, x.data.subarray(sample * size, (sample + 1) * size), x.shape.slice(1));
  },
  points(canvas, { x, support, level }, sample) {
    const [pen, width, height] = surface(canvas), own = [x.data[2 * sample], x.data[2 * sample + 1]];
    const half = 1.1 * Math.max(1e-6, ...support.flat().map(Math.abs), ...own.map(Math.abs)), unit = Math.min(width, height) / (2 * half);
    const place = (a, b) => [width / 2 + unit * a, height / 2 - unit * b];
    pen.fillStyle = ink("--cell");
    for (const [left, bottom, right, top] of support) {
      const [x0, y1] = place(left, bottom), [x1, y0] = place(right, top);
      pen.fillRect(x0, y0, x1 - x0, y1 - y0);
    }
    Object.assign(pen, { fillStyle: colourOf(level ? level[sample] : 1), strokeStyle: ink("--ink"), lineWidth: 1.5 });
    pen.beginPath();
    pen.arc(...place(...own), 7, 0, 2 * Math.PI);
    pen.fill();
    pen.stroke();
  },
  vectors(canvas, { x, count }, sample) {
    const [pen, width, height] = surface(canvas), wide = x.data.length / count, values = Array.from(x.data.subarray(sample * wide, (sample + 1) * wide));
    const low = Math.min(...values), span = Math.max(...values) - low || 1;
    Object.assign(pen, { strokeStyle: ink("--accent"), lineWidth: 2 });
    pen.beginPath();
    values.forEach((value, k) => pen.lineTo(((k + 0.5) / wide) * width, height * 0.95 - ((value - low) / span) * height * 0.9));
    pen.stroke();
  },
};
