// Crystals: their geometry, and pictures of them in parallel projection for the tiles of a wall.

import { colourOf, ink, theme, themeColour } from "./colour.js";
import { short } from "./dom.js";
import { element } from "./elements.js";
import { crystalOf } from "./samples.js";

const BALL = 0.52; // radius of a sphere, in covalent radii
const BOND = [0.5, 1.15]; // range of the length of a bond, in sums of covalent radii
const FACE = 0.3; // Å; an atom this close to a face is repeated on the opposite face
const TURN = [0.42, 0.24]; // viewing angles of a picture, radians

/**
 * @typedef {object} Scene
 * @property {{place: number[], species: number, index: number, radius: number}[]} atoms Centred; with images on faces.
 * @property {number[][]} corners Of the cell, in the order 000, 001, 010, …
 * @property {[number, number][]} edges Pairs of corners.
 * @property {[number, number][]} bonds Pairs of atoms.
 * @property {number} reach Largest distance from the centre, Å.
 */

/**
 * Return the atoms, bonds and cell of a crystal in Å; null if the cell or a coordinate is not finite.
 *
 * @returns {Scene|null}
 */
export function sceneOf({ lattice, species, coord }) {
  const cell = upright(lattice);
  if (!cell || !coord.flat().every(Number.isFinite)) return null;
  const place = (f) => [0, 1, 2].map((k) => f[0] * cell[0][k] + f[1] * cell[1][k] + f[2] * cell[2][k]);
  const lengths = cell.map((row) => Math.hypot(...row)), centre = place([0.5, 0.5, 0.5]);
  const centred = (f) => place(f).map((value, k) => value - centre[k]);
  const corners = [...Array(8).keys()].map((i) => centred([i >> 2, (i >> 1) & 1, i & 1]));
  const atoms = [];
  coord.forEach((raw, index) => {
    const f = raw.map((value) => value - Math.floor(value));
    const shifts = f.map((value, k) => {
      const near = Math.min(0.1, FACE / lengths[k]);
      return value < near ? [0, 1] : value > 1 - near ? [0, -1] : [0];
    });
    for (const a of shifts[0]) for (const b of shifts[1]) for (const c of shifts[2])
      atoms.push({ place: centred([f[0] + a, f[1] + b, f[2] + c]), species: species[index], index, radius: BALL * element(species[index]).radius });
  });
  const edges = [];
  for (let i = 0; i < 8; i++) for (const bit of [1, 2, 4]) if (!(i & bit)) edges.push([i, i | bit]);
  const reach = Math.max(...corners.map((corner) => Math.hypot(...corner)), ...atoms.map((atom) => Math.hypot(...atom.place) + atom.radius));
  return { atoms, corners, edges, bonds: bondsOf(atoms), reach };
}

/** Turn the cell so that c points up and a towards the viewer; null if it spans no volume. */
function upright(lattice) {
  if (!lattice.flat().every(Number.isFinite)) return null;
  const [a, b, c] = lattice, dot = (u, v) => u[0] * v[0] + u[1] * v[1] + u[2] * v[2];
  const cross = (u, v) => [u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2], u[0] * v[1] - u[1] * v[0]];
  const unit = (u) => u.map((value) => value / Math.hypot(...u));
  const lengths = Math.hypot(...a) * Math.hypot(...b) * Math.hypot(...c);
  if (!(Math.abs(dot(a, cross(b, c))) > 1e-6 * lengths)) return null;
  const up = unit(c), towards = unit(a.map((value, k) => value - dot(a, up) * up[k])), right = cross(up, towards);
  return lattice.map((row) => [dot(row, right), dot(row, up), dot(row, towards)]);
}

function bondsOf(atoms) {
  const bonds = [];
  for (let i = 0; i < atoms.length; i++)
    for (let j = i + 1; j < atoms.length; j++) {
      const [u, v] = [atoms[i], atoms[j]], [p, q] = [element(u.species), element(v.species)];
      if (!p.binds && !q.binds) continue;
      const apart = Math.hypot(u.place[0] - v.place[0], u.place[1] - v.place[1], u.place[2] - v.place[2]) / (p.radius + q.radius);
      if (apart > BOND[0] && apart < BOND[1]) bonds.push([i, j]);
    }
  return bonds;
}

/**
 * Draw a crystal.
 *
 * @param {CanvasRenderingContext2D} pen
 * @param {Scene} scene
 * @param {{x: number, y: number, size: number, turn?: number[], doubt?: ArrayLike<number>, pale?: boolean}} view Where, from which
 *   angles (radians), and, per atom, a doubt in [0, 1] to colour it by instead of its element.
 */
export function drawCrystal(pen, scene, { x, y, size, turn = TURN, doubt, pale = false }) {
  const [cosA, sinA, cosB, sinB] = [Math.cos(turn[0]), Math.sin(turn[0]), Math.cos(turn[1]), Math.sin(turn[1])];
  const unit = (0.47 * size) / scene.reach, line = Math.max(1, size / 160);
  const project = ([u, v, w]) => {
    const [right, deep] = [cosA * u - sinA * w, sinA * u + cosA * w];
    return [x + size / 2 + unit * right, y + size / 2 - unit * (cosB * v - sinB * deep), sinB * v + cosB * deep];
  };
  const [sky, edge] = [themeColour("--panel"), themeColour("--quiet")];
  const far = (depth) => (0.42 * (scene.reach - depth)) / (2 * scene.reach) + (pale ? 0.55 : 0);
  const mix = (colour, share) => `rgb(${colour.map((part, k) => Math.round(part + (sky[k] - part) * share)).join(" ")})`;
  const drawn = [];
  const stroke = (from, to, wide, colour, depth) =>
    drawn.push([depth, () => {
      Object.assign(pen, { strokeStyle: mix(colour, far(depth)), lineWidth: wide, lineCap: "round" });
      pen.beginPath();
      pen.moveTo(from[0], from[1]);
      pen.lineTo(to[0], to[1]);
      pen.stroke();
    }]);
  for (const pair of scene.edges) {
    const ends = pair.map((i) => scene.corners[i]), pieces = 8;
    for (let k = 0; k < pieces; k++) {
      const [from, to] = [k, k + 1].map((n) => project(ends[0].map((value, axis) => value + ((ends[1][axis] - value) * n) / pieces)));
      stroke(from, to, line, edge, (from[2] + to[2]) / 2);
    }
  }
  const colours = scene.atoms.map((atom) => parts(doubt ? colourOf(1 - doubt[atom.index]) : element(atom.species).colour));
  for (const [i, j] of scene.bonds) {
    const [from, to] = [scene.atoms[i], scene.atoms[j]].map((atom) => project(atom.place)), middle = from.map((value, k) => (value + to[k]) / 2);
    stroke(from, middle, unit * 0.2, colours[i], (from[2] + middle[2]) / 2 - 0.05);
    stroke(to, middle, unit * 0.2, colours[j], (to[2] + middle[2]) / 2 - 0.05);
  }
  scene.atoms.forEach((atom, i) => {
    const [px, py, depth] = project(atom.place), radius = Math.max(2, unit * atom.radius);
    drawn.push([depth, () => {
      const share = far(depth), light = pen.createRadialGradient(px - 0.35 * radius, py - 0.4 * radius, 0.05 * radius, px, py, radius);
      light.addColorStop(0, mix(colours[i].map((part) => part + (255 - part) * 0.65), share));
      light.addColorStop(0.45, mix(colours[i], share));
      light.addColorStop(1, mix(colours[i].map((part) => part * 0.62), share));
      pen.fillStyle = light;
      pen.beginPath();
      pen.arc(px, py, radius, 0, 2 * Math.PI);
      pen.fill();
    }]);
  });
  drawn.sort((u, v) => u[0] - v[0]).forEach(([, draw]) => draw());
}

function parts(colour) {
  if (colour[0] !== "#") return colour.match(/\d+/g).map(Number);
  const value = parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

const SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉";

/** Return a formula with subscripts. */
export const subscripted = (formula) => String(formula).replace(/\d/g, (digit) => SUBSCRIPTS[digit]);

/** Paints the crystals of a run as tiles: the cell, its formula, its energy and its confidence. */
export class CrystalPainter {
  sizes = [84, 120, 160, 240];
  foot = 44;
  #cache = new Map();

  /** @param {import("./samples.js").Samples} run */
  constructor(run) {
    this.run = run;
    this.size = run.count > 200 ? 120 : 160;
  }

  paint(tiles, view) {
    const { canvas, pen, scale, size, keeps, failed } = view, { level, columns, tensors } = this.run;
    pen.fillStyle = ink("--panel");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    const font = getComputedStyle(canvas).fontFamily, energy = tensors.e_above_hull && tensors.e_above_hull.data;
    const colour = { text: ink("--ink"), quiet: ink("--quiet"), line: ink("--line"), bad: ink("--bad"), good: ink("--good") };
    for (const { sample, x, y } of tiles) {
      const kept = keeps(sample);
      pen.drawImage(this.#picture(sample, size, !kept), x, y);
      pen.globalAlpha = kept ? 1 : 0.45;
      const failure = failed(sample), middle = x + size / 2;
      Object.assign(pen, { textAlign: "center", textBaseline: "top", fillStyle: colour.text, font: `600 ${13 * scale}px ${font}` });
      const formula = columns.formula ? subscripted(columns.formula[sample]) : String(sample);
      pen.fillText(formula, middle, y + size, size);
      Object.assign(pen, { fillStyle: colour.quiet, font: `${11 * scale}px ${font}` });
      const value = energy && Number.isFinite(energy[sample]) ? `${short(energy[sample], 2)} eV/atom` : failure === null ? "" : "not judged";
      pen.fillText(value, middle, y + size + 17 * scale, size);
      if (level && Number.isFinite(level[sample])) {
        const top = y + size + 34 * scale, wide = size * 0.7, left = middle - wide / 2;
        pen.fillStyle = colour.line;
        pen.fillRect(left, top, wide, 4 * scale);
        pen.fillStyle = colourOf(level[sample]);
        pen.fillRect(left, top, wide * level[sample], 4 * scale);
      }
      if (failure !== null) mark(pen, x + 12 * scale, y + 12 * scale, 5 * scale, failure, failure ? colour.bad : colour.good);
      pen.globalAlpha = 1;
    }
  }

  #picture(sample, size, pale) {
    const key = `${sample} ${size} ${pale} ${theme()}`;
    let picture = this.#cache.get(key);
    if (!picture) {
      picture = Object.assign(document.createElement("canvas"), { width: size, height: size });
      const scene = sceneOf(crystalOf(this.run.tensors, sample));
      if (scene) drawCrystal(picture.getContext("2d"), scene, { x: 0, y: 0, size, pale });
      if (this.#cache.size > 400) this.#cache.delete(this.#cache.keys().next().value);
      this.#cache.set(key, picture);
    }
    return picture;
  }
}

/** Draw a cross for a failed sample and a ring for one that passed; the shapes differ, not only the colours. */
function mark(pen, x, y, radius, failed, colour) {
  Object.assign(pen, { strokeStyle: colour, lineWidth: radius * 0.5, lineCap: "round" });
  pen.beginPath();
  if (failed) {
    const r = radius * 0.75;
    pen.moveTo(x - r, y - r);
    pen.lineTo(x + r, y + r);
    pen.moveTo(x + r, y - r);
    pen.lineTo(x - r, y + r);
  } else pen.arc(x, y, radius * 0.85, 0, 2 * Math.PI);
  pen.stroke();
}
