// A small picture for each kind of model, drawn and not loaded.

import { surface } from "../canvas.js";
import { colourOf, ink } from "../colour.js";
import { drawCrystal, sceneOf } from "../crystal.js";

const PEROVSKITE = {
  lattice: [[4, 0, 0], [0, 4, 0], [0, 0, 4]],
  species: [38, 22, 8, 8, 8],
  coord: [[0, 0, 0], [0.5, 0.5, 0.5], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]],
};

/** Return a repeatable sequence of numbers in [0, 1). */
function dice(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 4294967296;
  };
}

const MOTIFS = {
  points(pen, width, height) {
    const roll = dice(7), size = height / 4, columns = Math.ceil(width / size);
    pen.fillStyle = ink("--cell");
    for (let row = 0; row < 4; row++) for (let column = row % 2; column < columns; column += 2) pen.fillRect(column * size, row * size, size, size);
    for (let n = 0; n < 420; n++) {
      const x = roll() * width, y = roll() * height, column = Math.floor(x / size), row = Math.floor(y / size);
      const inside = (row + column) % 2 === 0, edge = Math.min(x % size, size - (x % size), y % size, size - (y % size)) / size;
      if (!inside && roll() < 0.93) continue;
      pen.fillStyle = colourOf(inside ? Math.min(1, 0.35 + 3 * edge) : 0.05);
      pen.beginPath();
      pen.arc(x, y, 2.1, 0, 2 * Math.PI);
      pen.fill();
    }
  },
  images(pen, width, height) {
    const size = 14, small = Object.assign(document.createElement("canvas"), { width: size, height: size }), brush = small.getContext("2d");
    const roll = dice(3), tall = height / 3, columns = Math.ceil(width / tall);
    pen.imageSmoothingEnabled = false;
    for (let row = 0; row < 3; row++)
      for (let column = 0; column < columns; column++) {
        brush.clearRect(0, 0, size, size);
        const sure = 1 - (row * columns + column) / (3 * columns);
        Object.assign(brush, { font: "600 13px Georgia, serif", textAlign: "center", textBaseline: "middle", fillStyle: colourOf(sure) });
        brush.setTransform(1, 0, (1 - sure) * (roll() - 0.5), 1, size / 2, size / 2 + 1);
        brush.fillText(String(Math.floor(roll() * 10)), 0, 0);
        brush.setTransform(1, 0, 0, 1, 0, 0);
        pen.drawImage(small, column * tall, row * tall, tall, tall);
      }
  },
  crystals(pen, width, height) {
    const size = height * 1.02;
    drawCrystal(pen, sceneOf(PEROVSKITE), { x: (width - size) / 2, y: (height - size) / 2, size, turn: [0.5, 0.3] });
  },
  vectors(pen, width, height) {
    const roll = dice(5);
    pen.lineWidth = 1.6;
    for (let n = 0; n < 9; n++) {
      pen.strokeStyle = colourOf(1 - n / 8);
      pen.beginPath();
      const [a, b, c] = [roll(), 1 + 2 * roll(), roll() * 6];
      for (let x = 0; x <= width; x += 4) pen.lineTo(x, height * (0.5 + 0.3 * (a - 0.5) + 0.25 * Math.sin((b * x * 6) / width + c)));
      pen.stroke();
    }
  },
};

/** Draw the motif of a kind of sample. */
export function drawMotif(canvas, kind) {
  const [pen, width, height] = surface(canvas);
  (MOTIFS[kind] || MOTIFS.vectors)(pen, width, height);
}
