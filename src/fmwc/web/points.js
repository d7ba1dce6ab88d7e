// Samples in the plane, coloured by confidence. Every point is a few pixels of one image, so 100,000 of them are drawn in
// some milliseconds.

import { el, perFrame } from "./dom.js";
import { fit } from "./canvas.js";
import { ink, inkPixel, LEVELS, onTheme, pixelScale } from "./colour.js";

const REACH = 18; // pixels around the pointer in which a point is found
const BUCKETS = 96; // per side, to find the point under the pointer

export class Points {
  /**
   * @param {import("./ranking.js").Ranking} ranking
   * @param {{open?: (sample: number) => void}} [options] Called on a double click or Enter.
   */
  constructor(ranking, options = {}) {
    Object.assign(this, { ranking, run: ranking.run, options });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.element = el("div", { class: "board" }, this.canvas);
    this.extent = this.#extent();
    this.bounds = this.#index();
    this.draw = perFrame(() => this.#draw());
    for (const name of ["keep", "shown", "select"]) ranking.addEventListener(name, this.draw);
    onTheme(this.element, this.draw);
    new ResizeObserver(this.draw).observe(this.element);
    this.canvas.addEventListener("pointermove", (event) => event.pointerType === "mouse" && event.buttons === 0 && this.#hover(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#pick(event));
    this.canvas.addEventListener("dblclick", () => ranking.selected >= 0 && options.open && options.open(ranking.selected));
  }

  #extent() {
    const { x, support } = this.run;
    const low = [Infinity, Infinity], high = [-Infinity, -Infinity];
    const add = (value, axis) => {
      low[axis] = Math.min(low[axis], value);
      high[axis] = Math.max(high[axis], value);
    };
    if (support.length) for (const [a, b, c, d] of support) [a, b, c, d].forEach((value, k) => add(value, k % 2));
    else {
      const column = (axis) => Float32Array.from({ length: this.run.count }, (_, i) => x.data[2 * i + axis]).filter(Number.isFinite).sort();
      for (const axis of [0, 1]) {
        const values = column(axis); // a far outlier must not shrink all others to a dot
        for (const share of [0.001, 0.999]) add(values[Math.floor(share * (values.length - 1))] ?? 0, axis);
      }
    }
    const half = 0.56 * Math.max(high[0] - low[0], high[1] - low[1], 1e-6);
    return { x: (low[0] + high[0]) / 2, y: (low[1] + high[1]) / 2, half };
  }

  /** Sort the points into square buckets. */
  #index() {
    const { x } = this.run, { half } = this.extent;
    const buckets = Array.from({ length: BUCKETS * BUCKETS }, () => []);
    for (let i = 0; i < this.run.count; i++) {
      const column = Math.floor(((x.data[2 * i] - this.extent.x + half) / (2 * half)) * BUCKETS);
      const row = Math.floor(((x.data[2 * i + 1] - this.extent.y + half) / (2 * half)) * BUCKETS);
      if (column >= 0 && column < BUCKETS && row >= 0 && row < BUCKETS) buckets[row * BUCKETS + column].push(i);
    }
    return buckets;
  }

  #draw() {
    const { canvas, ranking, run } = this, scale = fit(canvas);
    const { width, height } = canvas, pen = canvas.getContext("2d");
    const image = pen.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    this.#cells(pixels, width, height);
    const radius = scale * Math.max(0.9, Math.min(3.2, (0.36 * canvas.clientWidth) / Math.sqrt(run.count)));
    const colours = pixelScale(), gone = inkPixel("--gone"), outline = inkPixel("--ink");
    const sprite = disc(radius, width), rim = disc(radius + 1.1 * scale, width), small = disc(radius * 0.8, width);
    const margin = Math.ceil(radius + 1.1 * scale) + 2;
    const places = this.#places(width, height, margin);
    const put = (sample, { solid, edge, cover }, colour) => {
      const at = places[sample];
      if (at < 0) return;
      for (let k = 0; k < solid.length; k++) pixels[at + solid[k]] = colour;
      for (let k = 0; k < edge.length; k++) pixels[at + edge[k]] = blend(pixels[at + edge[k]], colour, cover[k]);
    };
    const { order, shown } = ranking, all = shown.length === order.length && ranking.filter === "all";
    const visible = all ? null : new Uint8Array(run.count);
    if (visible) for (const sample of shown) visible[sample] = 1;
    for (let n = order.length - 1; n >= ranking.kept; n--) if (!visible || visible[order[n]]) put(order[n], small, gone);
    for (let n = 0; n < ranking.kept; n++) { // the doubtful ones last, on top
      const sample = order[n];
      if (visible && !visible[sample]) continue;
      if (run.bad && run.bad[sample] === 1) put(sample, rim, outline);
      const level = run.level ? run.level[sample] : 1;
      put(sample, sprite, colours[Math.round(Math.min(1, Math.max(0, level || 0)) * (LEVELS - 1))]);
    }
    pen.putImageData(image, 0, 0);
    if (ranking.selected >= 0) this.#mark(pen, scale);
  }

  /** Return the pixel of each point, or −1 outside; computed again only if the size of the canvas changes. */
  #places(width, height, margin) {
    if (this.places && this.places.width === width && this.places.height === height) return this.places.found;
    const found = new Int32Array(this.run.count);
    for (let i = 0; i < found.length; i++) {
      const [px, py] = this.#pixel(i, width, height), inside = px >= margin && py >= margin && px < width - margin && py < height - margin;
      found[i] = inside ? py * width + px : -1;
    }
    this.places = { width, height, found };
    return found;
  }

  #cells(pixels, width, height) {
    const cell = inkPixel("--cell");
    pixels.fill(inkPixel("--panel"));
    for (const [left, bottom, right, top] of this.run.support) {
      const [x0, y1] = this.#place(left, bottom, width, height), [x1, y0] = this.#place(right, top, width, height);
      for (let row = Math.max(0, Math.round(y0)); row < Math.min(height, Math.round(y1)); row++)
        pixels.fill(cell, row * width + Math.max(0, Math.round(x0)), row * width + Math.min(width, Math.round(x1)));
    }
  }

  #mark(pen, scale) {
    const [px, py] = this.#pixel(this.ranking.selected, this.canvas.width, this.canvas.height);
    for (const [colour, wide] of [["--panel", 5], ["--ink", 2]]) {
      Object.assign(pen, { strokeStyle: ink(colour), lineWidth: wide * scale });
      pen.beginPath();
      pen.arc(px, py, 9 * scale, 0, 2 * Math.PI);
      pen.stroke();
    }
  }

  #place(x, y, width, height) {
    const { half } = this.extent, size = Math.min(width, height);
    return [width / 2 + ((x - this.extent.x) / half) * (size / 2), height / 2 - ((y - this.extent.y) / half) * (size / 2)];
  }

  #pixel(sample, width, height) {
    const { data } = this.run.x;
    return this.#place(data[2 * sample], data[2 * sample + 1], width, height).map(Math.round);
  }

  #nearest(event) {
    const box = this.canvas.getBoundingClientRect(), size = Math.min(box.width, box.height);
    const mx = event.clientX - box.left, my = event.clientY - box.top, span = Math.ceil((REACH / size) * BUCKETS);
    const column = Math.floor((0.5 + (mx - box.width / 2) / size) * BUCKETS), row = Math.floor((0.5 - (my - box.height / 2) / size) * BUCKETS);
    let best = -1, least = REACH * REACH;
    for (let r = Math.max(0, row - span); r <= Math.min(BUCKETS - 1, row + span); r++)
      for (let c = Math.max(0, column - span); c <= Math.min(BUCKETS - 1, column + span); c++)
        for (const sample of this.bounds[r * BUCKETS + c]) {
          const [px, py] = this.#place(this.run.x.data[2 * sample], this.run.x.data[2 * sample + 1], box.width, box.height);
          const far = (px - mx) ** 2 + (py - my) ** 2;
          if (far < least) [best, least] = [sample, far];
        }
    return best;
  }

  #hover(event) {
    if (this.pinned) return;
    const sample = this.#nearest(event);
    if (sample >= 0) this.ranking.select(sample);
  }

  /** A click keeps the selection in place until the next click. */
  #pick(event) {
    const sample = this.#nearest(event);
    this.pinned = sample >= 0;
    this.ranking.select(sample);
  }

  /** How many steps each key moves the selection. */
  steps() {
    return { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, PageUp: -100, PageDown: 100 };
  }
}

/** Return the pixels of a disc as offsets in an image of this width: those that it covers, and those at its edge. */
function disc(radius, width) {
  const solid = [], edge = [], cover = [], reach = Math.ceil(radius + 0.5);
  for (let y = -reach; y <= reach; y++)
    for (let x = -reach; x <= reach; x++) {
      const part = Math.min(1, Math.max(0, radius + 0.5 - Math.hypot(x, y)));
      if (part >= 0.95) solid.push(y * width + x);
      else if (part > 0.05) {
        edge.push(y * width + x);
        cover.push(Math.round(256 * part));
      }
    }
  return { solid: Int32Array.from(solid), edge: Int32Array.from(edge), cover: Uint16Array.from(cover) };
}

/** Mix two opaque pixels; `cover` is the share of the second in 256ths. Red and blue are mixed together. */
function blend(under, over, cover) {
  const rest = 256 - cover;
  const pair = (((under & 0xff00ff) * rest + (over & 0xff00ff) * cover) >>> 8) & 0xff00ff;
  const green = (((under & 0xff00) * rest + (over & 0xff00) * cover) >>> 8) & 0xff00;
  return (0xff000000 | pair | green) >>> 0;
}
