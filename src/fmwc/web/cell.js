// One crystal that can be turned: a WebGL view by 3Dmol.js, or a drawing that turns where there is no WebGL.

import { surface } from "./canvas.js";
import { colourOf, ink, onTheme } from "./colour.js";
import { drawCrystal, sceneOf } from "./crystal.js";
import { calm, el, fill } from "./dom.js";
import { element } from "./elements.js";

let loading = null;

/** Load 3Dmol.js once; a report page already contains it. Return null if that fails or there is no WebGL. */
function threeD() {
  loading ||= new Promise((done) => {
    const probe = document.createElement("canvas");
    if (!(probe.getContext("webgl2") || probe.getContext("webgl"))) return done(null);
    if (globalThis.$3Dmol) return done(globalThis.$3Dmol);
    const script = el("script", { src: "/web/vendor/3Dmol-min.js" });
    script.addEventListener("load", () => done(globalThis.$3Dmol || globalThis["3Dmol"] || null));
    script.addEventListener("error", () => done(null));
    document.head.append(script);
  });
  return loading;
}

export class Cell {
  #viewer = null;
  #scene = null;
  #doubt = null;
  #turn = [0.42, 0.24];

  /** @param {{label?: string}} [options] The name for screen readers. */
  constructor({ label = "Crystal structure; drag, or use the arrow keys, to turn it" } = {}) {
    this.stage = el("div", { class: "stage" });
    this.legend = el("div", { class: "atoms" });
    this.element = el("div", { class: "cell" }, this.stage, this.legend);
    this.stage.setAttribute("role", "img");
    this.stage.setAttribute("tabindex", "0");
    this.stage.setAttribute("aria-label", label);
    this.stage.addEventListener("keydown", (event) => this.#key(event));
    onTheme(this.element, () => this.#render(false));
    this.ready = this.#start();
  }

  /**
   * Show a structure.
   *
   * @param {{lattice: number[][], species: number[], coord: number[][]}} crystal
   * @param {{doubt?: ArrayLike<number>|null, still?: boolean}} [options] Doubt per atom in [0, 1], to colour the atoms by; whether
   *   to keep the view.
   */
  show(crystal, { doubt = null, still = false } = {}) {
    this.#scene = sceneOf(crystal);
    this.#doubt = doubt;
    this.#explain(crystal.species);
    this.#render(!still);
  }

  /** Free the WebGL context. */
  close() {
    const canvas = this.stage.querySelector("canvas"), context = canvas && (canvas.getContext("webgl2") || canvas.getContext("webgl"));
    const lose = context && context.getExtension && context.getExtension("WEBGL_lose_context");
    if (lose) lose.loseContext();
  }

  async #start() {
    const [library] = await Promise.all([threeD(), sized(this.stage)]);
    if (library) {
      const host = el("div", { class: "webgl" });
      this.stage.append(host);
      try {
        this.#viewer = library.createViewer(host, { backgroundAlpha: 0, antialias: true, orthographic: true, disableFog: true });
      } catch {
        host.remove();
      }
    }
    if (!this.#viewer) this.#flat();
    else new ResizeObserver(() => this.#resize()).observe(this.stage);
    this.#render(true);
  }

  #resize() {
    this.#viewer.resize();
    this.#render(true);
  }

  /** Draw on a plain canvas that turns when it is dragged. */
  #flat() {
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.stage.append(this.canvas);
    this.canvas.addEventListener("pointerdown", (event) => this.canvas.setPointerCapture(event.pointerId));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.#rotate(event.movementX, event.movementY));
    new ResizeObserver(() => this.#render(false)).observe(this.stage);
  }

  #rotate(right, down) {
    if (this.#viewer) {
      this.#viewer.rotate(right, "y");
      this.#viewer.rotate(down, "x");
      return this.#viewer.render();
    }
    this.#turn = [this.#turn[0] + right / 100, Math.max(-1.5, Math.min(1.5, this.#turn[1] + down / 100))];
    return this.#render(false);
  }

  #key(event) {
    const turns = { ArrowLeft: [-12, 0], ArrowRight: [12, 0], ArrowUp: [0, -12], ArrowDown: [0, 12] };
    if (!(event.key in turns) || !this.#scene) return;
    event.preventDefault();
    event.stopPropagation();
    this.#rotate(...turns[event.key]);
  }

  #explain(species) {
    const counts = new Map();
    for (const z of species) counts.set(z, (counts.get(z) || 0) + 1);
    const items = [...counts].map(([z, n]) => {
      const dot = el("i");
      dot.style.background = element(z).colour;
      return el("span", {}, dot, `${element(z).symbol} ${n}`);
    });
    fill(this.legend, ...(this.#doubt ? [el("span", {}, "Atoms are coloured by doubt.")] : items));
  }

  #render(again) {
    const scene = this.#scene;
    if (this.canvas) {
      const [pen, width, height] = surface(this.canvas), size = Math.min(width, height);
      if (scene) drawCrystal(pen, scene, { x: (width - size) / 2, y: (height - size) / 2, size, turn: this.#turn, doubt: this.#doubt });
    } else if (this.#viewer) this.#renderWebgl(scene, again);
    this.stage.classList.toggle("empty", !scene);
  }

  #renderWebgl(scene, again) {
    const viewer = this.#viewer;
    viewer.removeAllShapes();
    viewer.setBackgroundColor(hex(ink("--panel")), 1);
    if (scene) {
      const colour = (atom) => (this.#doubt ? hex(colourOf(1 - this.#doubt[atom.index])) : element(atom.species).colour);
      const point = ([x, y, z]) => ({ x, y, z }), middle = (a, b) => a.map((value, k) => (value + b[k]) / 2);
      for (const atom of scene.atoms) viewer.addSphere({ center: point(atom.place), radius: atom.radius, color: colour(atom), quality: 3 });
      for (const pair of scene.bonds) {
        const [a, b] = pair.map((i) => scene.atoms[i]), half = middle(a.place, b.place);
        for (const atom of [a, b]) viewer.addCylinder({ start: point(atom.place), end: point(half), radius: 0.11, color: colour(atom) });
      }
      const edge = hex(ink("--quiet"));
      for (const [i, j] of scene.edges) viewer.addCylinder({ start: point(scene.corners[i]), end: point(scene.corners[j]), radius: 0.035, color: edge, fromCap: 2, toCap: 2 });
      if (again) {
        viewer.setView([0, 0, 0, 0, 0, 0, 0, 1]);
        viewer.zoomTo();
        const [left, right] = [-scene.reach, scene.reach].map((x) => viewer.modelToScreen({ x, y: 0, z: 0 }).x);
        viewer.zoom((0.94 * Math.min(this.stage.clientWidth, this.stage.clientHeight)) / Math.abs(right - left));
        viewer.rotate(-24, "y");
        viewer.rotate(14, "x");
      }
    }
    viewer.render();
  }

  /** Turn the crystal slowly, or stop; does nothing if the user asks for less motion. */
  spin(on) {
    if (this.#viewer && !calm()) this.#viewer.spin(on ? "y" : false, 0.4);
  }
}

/** Wait until an element has a size: WebGL cannot draw on a canvas without pixels. */
function sized(node) {
  return new Promise((done) => {
    const observer = new ResizeObserver(() => {
      if (!node.clientWidth) return;
      observer.disconnect();
      done();
    });
    observer.observe(node);
  });
}

function hex(colour) {
  return `#${colour.match(/\d+/g).slice(0, 3).map((part) => Number(part).toString(16).padStart(2, "0")).join("")}`;
}
