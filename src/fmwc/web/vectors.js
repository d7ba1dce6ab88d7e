// Samples without a picture of their own: each is a small curve over its coordinates.

import { el } from "./dom.js";
import { colourOf, ink } from "./colour.js";
import { Wall } from "./wall.js";

class VectorPainter {
  sizes = [56, 112, 168];
  size = 112;
  foot = 4;

  constructor(run) {
    this.run = run;
    const finite = run.x.data.filter(Number.isFinite);
    this.low = finite.reduce((a, b) => Math.min(a, b), Infinity);
    this.high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  }

  paint(tiles, { canvas, pen, scale, size, keeps, failed }) {
    const { data } = this.run.x, wide = data.length / this.run.count, span = this.high - this.low || 1;
    pen.fillStyle = ink("--panel");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    const [paper, gone, bad] = ["--paper-low", "--gone", "--bad"].map(ink);
    for (const { sample, x, y } of tiles) {
      pen.fillStyle = paper;
      pen.fillRect(x, y, size, size);
      const level = this.run.level ? this.run.level[sample] : NaN;
      Object.assign(pen, { strokeStyle: keeps(sample) ? colourOf(level) : gone, lineWidth: 1.5 * scale });
      pen.beginPath();
      for (let k = 0; k < wide; k++) {
        const value = data[sample * wide + k];
        if (Number.isFinite(value)) pen.lineTo(x + ((k + 0.5) / wide) * size, y + size - ((value - this.low) / span) * size * 0.9 - 0.05 * size);
      }
      pen.stroke();
      if (failed(sample)) Object.assign(pen, { strokeStyle: bad, lineWidth: scale }).strokeRect(x, y, size, size);
    }
  }
}

/** A wall of small curves. */
export class Vectors extends Wall {
  constructor(ranking, options) {
    super(ranking, new VectorPainter(ranking.run), options);
    if (ranking.run.x.shape.length < 2) this.element.replaceChildren(el("p", {}, "These samples cannot be drawn."));
  }
}
