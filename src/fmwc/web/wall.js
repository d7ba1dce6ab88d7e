// A wall of tiles in one canvas. Only the visible tiles are drawn, so 10,000 of them scroll and sort smoothly.

import { el, perFrame } from "./dom.js";
import { fit } from "./canvas.js";
import { ink, onTheme } from "./colour.js";

/**
 * @typedef {object} Painter Draws the tiles of a wall.
 * @property {number[]} sizes Sizes of a tile to choose from, CSS pixels.
 * @property {number} size The size at first.
 * @property {number} foot Space below the picture, CSS pixels.
 * @property {(tiles: {sample: number, x: number, y: number}[], view: View) => void} paint Draw tiles at positions in
 *   pixels of the canvas.
 *
 * @typedef {object} View
 * @property {HTMLCanvasElement} canvas
 * @property {CanvasRenderingContext2D} pen
 * @property {number} scale Pixels of the canvas per CSS pixel.
 * @property {number} size Width and height of a picture in pixels of the canvas.
 * @property {(sample: number) => boolean} keeps
 * @property {(sample: number) => boolean|null} failed
 */

export class Wall {
  /**
   * @param {import("./ranking.js").Ranking} ranking
   * @param {Painter} painter
   * @param {{open?: (sample: number) => void}} [options] Called on a double click.
   */
  constructor(ranking, painter, options = {}) {
    Object.assign(this, { ranking, painter, size: painter.size });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.spacer = el("div", { class: "spacer" }, this.canvas);
    this.element = el("div", { class: "wall" }, this.spacer);
    this.draw = perFrame(() => this.#draw());
    this.element.addEventListener("scroll", this.draw, { passive: true });
    this.canvas.addEventListener("click", (event) => ranking.select(this.#at(event)));
    this.canvas.addEventListener("dblclick", (event) => {
      const sample = this.#at(event);
      if (sample >= 0 && options.open) options.open(sample);
    });
    ranking.addEventListener("keep", this.draw);
    ranking.addEventListener("shown", () => {
      this.element.scrollTop = 0;
      this.draw();
    });
    ranking.addEventListener("select", () => {
      this.#reveal();
      this.draw();
    });
    onTheme(this.element, this.draw);
    new ResizeObserver(this.draw).observe(this.element);
  }

  /** Change the size of the tiles; the first visible one stays in view. */
  resize(size) {
    const { columns, step } = this.#grid(), first = Math.floor(this.element.scrollTop / step.y) * columns;
    this.size = size;
    const after = this.#grid();
    this.spacer.style.height = `${after.height}px`;
    this.element.scrollTop = Math.floor(first / after.columns) * after.step.y;
    this.draw();
  }

  #grid() {
    const { foot } = this.painter, gap = this.size < 20 ? 1 : this.size < 60 ? 4 : 10;
    const step = { x: this.size + gap, y: this.size + foot * (this.size >= 24) + gap };
    const columns = Math.max(1, Math.floor((this.spacer.clientWidth + gap) / step.x));
    const rows = Math.ceil(this.ranking.shown.length / columns);
    return { gap, step, columns, rows, height: Math.max(1, rows * step.y) };
  }

  #draw() {
    const { element, canvas, ranking, size } = this, { step, columns, height } = this.#grid();
    this.spacer.style.height = `${height}px`;
    canvas.style.height = `${Math.min(element.clientHeight, height)}px`;
    const scale = fit(canvas), top = element.scrollTop, tiles = [];
    const firstRow = Math.floor(top / step.y), lastRow = Math.ceil((top + element.clientHeight) / step.y);
    for (let n = firstRow * columns; n < Math.min(ranking.shown.length, lastRow * columns); n++)
      tiles.push({
        sample: ranking.shown[n],
        x: Math.round((n % columns) * step.x * scale),
        y: Math.round((Math.floor(n / columns) * step.y - top) * scale),
      });
    const pen = canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    const view = { canvas, pen, scale, size: Math.round(size * scale), keeps: (i) => ranking.keeps(i), failed: (i) => ranking.failed(i) };
    this.painter.paint(tiles, view);
    const chosen = tiles.find((tile) => tile.sample === ranking.selected);
    if (chosen) this.#ring(pen, chosen, view);
  }

  #ring(pen, { x, y }, { scale, size }) {
    const tall = size + this.painter.foot * scale * (this.size >= 24);
    for (const [colour, wide, out] of [["--panel", 4, 1], ["--accent", 2, 1]]) {
      Object.assign(pen, { strokeStyle: ink(colour), lineWidth: wide * scale });
      pen.strokeRect(x - out * scale + scale, y - out * scale + scale, size + 2 * (out - 1) * scale, tall + 2 * (out - 1) * scale);
    }
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect(), { step, columns } = this.#grid();
    const column = Math.floor((event.clientX - box.left) / step.x), row = Math.floor((event.clientY - box.top + this.element.scrollTop) / step.y);
    const sample = column < columns ? this.ranking.shown[row * columns + column] : undefined;
    return sample === undefined ? -1 : sample;
  }

  #reveal() {
    const n = this.ranking.shown.indexOf(this.ranking.selected);
    if (n < 0) return;
    const { step, columns } = this.#grid(), { element } = this, y = Math.floor(n / columns) * step.y;
    if (y < element.scrollTop) element.scrollTop = y;
    else if (y + step.y > element.scrollTop + element.clientHeight) element.scrollTop = y + step.y - element.clientHeight;
  }

  /** How many steps each key moves the selection. */
  steps() {
    const { columns, step } = this.#grid(), page = columns * Math.max(1, Math.floor(this.element.clientHeight / step.y));
    return { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -page, PageDown: page };
  }
}
