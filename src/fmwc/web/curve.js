// The variance over time, with a cursor.

import { surface } from "./canvas.js";
import { ink, onTheme } from "./colour.js";
import { el, perFrame, short } from "./dom.js";

const SERIES = ["--accent", "--series-2", "--series-3", "--series-4"];
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];

/**
 * @typedef {object} Line
 * @property {string} name
 * @property {ArrayLike<number>} values ‖σ_t‖ at the times.
 * @property {boolean} [aside] Whether the line is for comparison only.
 * @property {string} [colour] A CSS variable.
 */

export class Curve {
  #times = [];
  #lines = [];
  #cursor = null;
  #marks = [];

  /** @param {{move?: (time: number) => void, label?: string}} [options] Called when the cursor is moved. */
  constructor({ move = null, label = "Uncertainty of the velocity over time" } = {}) {
    this.canvas = el("canvas", { role: "img", "aria-label": label });
    this.key = el("div", { class: "key", "aria-hidden": "true" });
    this.element = el("div", { class: move ? "curve movable" : "curve" }, this.key, this.canvas);
    this.draw = perFrame(() => this.#draw());
    onTheme(this.canvas, this.draw);
    new ResizeObserver(this.draw).observe(this.canvas);
    if (!move) return;
    const to = (event) => move(this.#timeAt(event));
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      to(event);
    });
    this.canvas.addEventListener("pointermove", (event) => event.buttons && to(event));
  }

  /**
   * Show lines over time.
   *
   * @param {ArrayLike<number>} times
   * @param {Line[]} lines
   * @param {{time: number, name: string}[]} [marks] Times to mark.
   */
  show(times, lines, marks = []) {
    this.#times = Array.from(times);
    this.#lines = lines;
    this.#marks = marks;
    this.key.replaceChildren(...(lines.length > 1 ? lines.map((line, i) => this.#entry(line, i)) : []));
    this.draw();
  }

  /** Move the cursor to a time. */
  set cursor(time) {
    this.#cursor = time;
    this.draw();
  }

  #entry(line, i) {
    const sample = el("i");
    sample.style.borderTop = `${line.aside ? 2 : 3}px ${["solid", "dashed", "dotted", "dashed"][i % 4]} var(${line.colour || SERIES[i % 4]})`;
    return el("span", {}, sample, line.name);
  }

  #frame() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    return { left: 46, right: width - 14, head: 12, foot: height - 38 };
  }

  #timeAt(event) {
    const box = this.canvas.getBoundingClientRect(), { left, right } = this.#frame();
    return Math.max(0, Math.min(1, (event.clientX - box.left - left) / (right - left)));
  }

  #draw() {
    const [pen, width, height] = surface(this.canvas), { left, right, head, foot } = this.#frame();
    const top = 1.08 * Math.max(1e-12, ...this.#lines.flatMap((line) => Array.from(line.values)).filter(Number.isFinite));
    const px = (t) => left + t * (right - left), py = (v) => foot - (v / top) * (foot - head);
    const [line, quiet, main] = ["--line", "--quiet", "--ink"].map(ink);
    Object.assign(pen, { strokeStyle: line, fillStyle: quiet, lineWidth: 1, textBaseline: "middle", textAlign: "right" });
    const unit = tick(top);
    for (let n = 0; n * unit <= top; n++) {
      pen.beginPath();
      pen.moveTo(left, py(n * unit));
      pen.lineTo(right, py(n * unit));
      pen.stroke();
      pen.fillText(short(n * unit, 2), left - 7, py(n * unit));
    }
    Object.assign(pen, { textBaseline: "alphabetic", textAlign: "center" });
    for (const t of [0, 0.25, 0.5, 0.75, 1]) pen.fillText(String(t), px(t), foot + 16);
    pen.fillText("time t (0: noise, 1: sample)", (left + right) / 2, height - 4);
    for (const { time } of this.#marks) {
      Object.assign(pen, { strokeStyle: quiet, lineWidth: 1 });
      pen.setLineDash([2, 3]);
      pen.beginPath();
      pen.moveTo(px(time), head);
      pen.lineTo(px(time), foot);
      pen.stroke();
    }
    this.#lines.forEach((one, i) => {
      Object.assign(pen, { strokeStyle: ink(one.colour || SERIES[i % 4]), lineWidth: one.aside ? 1.5 : 2.4 });
      pen.setLineDash(DASHES[i % 4]);
      pen.beginPath();
      this.#times.forEach((t, k) => Number.isFinite(one.values[k]) && pen.lineTo(px(t), py(one.values[k])));
      pen.stroke();
    });
    pen.setLineDash([]);
    if (this.#cursor !== null) {
      Object.assign(pen, { strokeStyle: main, lineWidth: 1.5, fillStyle: main });
      pen.beginPath();
      pen.moveTo(px(this.#cursor), head - 4);
      pen.lineTo(px(this.#cursor), foot);
      pen.stroke();
      pen.beginPath();
      pen.arc(px(this.#cursor), head - 4, 5, 0, 2 * Math.PI);
      pen.fill();
    }
  }
}

/** Return a round distance of two to four lines up to `top`. */
function tick(top) {
  const power = 10 ** Math.floor(Math.log10(top));
  return [2, 1, 0.5, 0.25, 0.2].map((m) => m * power).find((unit) => top / unit >= 2) || power;
}
