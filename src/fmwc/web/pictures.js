// Small images: tiles of a wall, and single pictures.

import { inkPixel, LEVELS, pixelScale, themeColour } from "./colour.js";

/** Paints the images of a run as tiles: the picture, its confidence as a bar, and a frame if it failed. */
export class PicturePainter {
  sizes = [8, 14, 28, 56, 112];
  foot = 5;

  /** @param {import("./samples.js").Samples} run */
  constructor(run) {
    this.run = run;
    this.size = run.count > 4000 ? 14 : run.count > 800 ? 28 : 56;
    this.levels = [levelOf(run.x)];
  }

  /** Return the smallest copy of the images that is at least `size` pixels wide. */
  #copy(size) {
    while (true) {
      const last = this.levels.at(-1);
      if (last.width <= size || last.width % 2 || last.height % 2 || last.width < 6) break;
      this.levels.push(half(last));
    }
    return this.levels.findLast((level) => level.width >= size) || this.levels[0];
  }

  paint(tiles, { canvas, pen, scale, size, keeps, failed }) {
    const image = pen.createImageData(canvas.width, canvas.height), pixels = new Uint32Array(image.data.buffer);
    pixels.fill(inkPixel("--panel"));
    const copy = this.#copy(size), shades = shadesOf(), colours = pixelScale(), bad = inkPixel("--bad");
    const bar = size / scale >= 24 ? Math.round(3 * scale) : 0, across = mapping(copy.width, size), down = mapping(copy.height, size);
    for (const { sample, x, y } of tiles) {
      const kept = keeps(sample);
      blit(pixels, canvas, x, y, copy, sample, across, down, kept ? shades.kept : shades.dropped);
      if (failed(sample)) frame(pixels, canvas, x, y, size, Math.max(1, Math.round(size / 24)), bad);
      const level = this.run.level ? this.run.level[sample] : NaN;
      if (bar && kept && Number.isFinite(level)) {
        const colour = colours[Math.round(Math.min(1, Math.max(0, level)) * (LEVELS - 1))];
        rectangle(pixels, canvas, x, y + size + Math.round(scale), Math.max(2, Math.round(size * level)), bar, colour);
      }
    }
    pen.putImageData(image, 0, 0);
  }
}

/** Draw one image (bytes, `shape` of height, width and perhaps 3 colours) on a canvas of the same size. */
export function drawPicture(canvas, data, [height, width, colours = 1], dim = false) {
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d"), image = pen.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
  const shades = shadesOf()[dim ? "dropped" : "kept"];
  const copy = { data, height, width, colours };
  blit(pixels, canvas, 0, 0, copy, 0, mapping(width, width), mapping(height, height), shades);
  pen.putImageData(image, 0, 0);
}

function levelOf({ shape, data }) {
  const [, height, width, colours = 1] = shape;
  return { data, height, width, colours };
}

/** Return images of half the size, each pixel the mean of four. */
function half({ data, height, width, colours }) {
  const [h, w] = [height / 2, width / 2], count = data.length / (height * width * colours), out = new Uint8Array(count * h * w * colours);
  for (let row = 0, to = 0; row < count * h; row++)
    for (let column = 0; column < w; column++)
      for (let c = 0; c < colours; c++, to++) {
        const from = (2 * row * width + 2 * column) * colours + c, below = from + width * colours;
        out[to] = (data[from] + data[from + colours] + data[below] + data[below + colours]) >> 2;
      }
  return { data: out, height: h, width: w, colours };
}

/** Return for each target pixel the source pixel. */
function mapping(source, target) {
  return Uint16Array.from({ length: target }, (_, i) => Math.min(source - 1, Math.floor(((i + 0.5) * source) / target)));
}

/** Return grey values as pixels: ink on paper for kept samples, paler for dropped ones. */
function shadesOf() {
  const ramp = (from, to) =>
    Uint32Array.from({ length: 256 }, (_, i) => {
      const [r, g, b] = from.map((part, k) => Math.round(part + ((to[k] - part) * i) / 255));
      return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
    });
  const [paper, dark, panel, pale] = ["--paper-low", "--picture", "--panel", "--gone"].map(themeColour);
  return { kept: ramp(paper, dark), dropped: ramp(panel, pale) };
}

function blit(pixels, { width: wide, height: tall }, x, y, { data, height, width, colours }, sample, across, down, shades) {
  const begin = sample * height * width * colours;
  for (let row = 0; row < down.length; row++) {
    const py = y + row;
    if (py < 0 || py >= tall) continue;
    const from = begin + down[row] * width * colours, to = py * wide + x;
    for (let column = 0; column < across.length && x + column < wide; column++) {
      if (colours === 1) pixels[to + column] = shades[data[from + across[column]]];
      else {
        const at = from + across[column] * 3;
        pixels[to + column] = ((255 << 24) | (data[at + 2] << 16) | (data[at + 1] << 8) | data[at]) >>> 0;
      }
    }
  }
}

function rectangle(pixels, { width, height }, x, y, wide, tall, colour) {
  for (let row = Math.max(0, y); row < Math.min(height, y + tall); row++) pixels.fill(colour, row * width + x, row * width + Math.min(width, x + wide));
}

function frame(pixels, canvas, x, y, size, thick, colour) {
  rectangle(pixels, canvas, x, y, size, thick, colour);
  rectangle(pixels, canvas, x, y + size - thick, size, thick, colour);
  rectangle(pixels, canvas, x, y, thick, size, colour);
  rectangle(pixels, canvas, x + size - thick, y, thick, size, colour);
}
