// The gallery of a run: the wall or board, the slider, and the selected sample. The studio and the report pages use it.

import { Cell } from "./cell.js";
import { colourOf, onTheme } from "./colour.js";
import { CrystalPainter, subscripted } from "./crystal.js";
import { count, el, fill, say, short } from "./dom.js";
import { keepSlider } from "./keep.js";
import { drawPicture, PicturePainter } from "./pictures.js";
import { Points } from "./points.js";
import { Ranking, SEARCHED } from "./ranking.js";
import { crystalOf, opposite } from "./samples.js";
import { Vectors } from "./vectors.js";
import { Wall } from "./wall.js";

const HIDDEN = new Set(["name", "rank", "score", "confidence"]); // columns that the details show elsewhere, or not at all

const VIEWS = {
  points: (ranking, options) => new Points(ranking, options),
  images: (ranking, options) => new Wall(ranking, new PicturePainter(ranking.run), options),
  crystals: (ranking, options) => new Wall(ranking, new CrystalPainter(ranking.run), options),
  vectors: (ranking, options) => new Vectors(ranking, options),
};

/** Return the wall or board of a ranking. */
export const viewOf = (ranking, options) => VIEWS[ranking.run.kind](ranking, options);

export class Gallery {
  /**
   * @param {import("./samples.js").Samples} run
   * @param {object} [options]
   * @param {(sample: number) => void} [options.open] Opens a sample; without it there is no button for that.
   * @param {(sample: number) => string} [options.link] Address of a sample's file.
   * @param {Node[]} [options.extra] Further parts below the slider.
   * @param {(sample: number) => {times: ArrayLike<number>, lines: object[]}|null} [options.curve] Its variance over time.
   * @param {import("./curve.js").Curve} [options.plot] Where that is drawn.
   * @param {number} [options.share] The share kept at first.
   */
  constructor(run, options = {}) {
    Object.assign(this, { run, options, ranking: new Ranking(run) });
    this.view = viewOf(this.ranking, options);
    this.keep = keepSlider(this.ranking, options);
    this.status = el("p", { class: "status", "aria-live": "polite" });
    this.picture = el("div", { class: "portrait" });
    this.facts = el("div", { class: "detail" });
    this.stage = el("div", { class: "view", tabindex: 0, role: "group", "aria-label": this.#label(), "aria-describedby": "gallery-keys" }, this.view.element);
    this.stage.addEventListener("keydown", (event) => this.#key(event));
    this.element = el(
      "div", { class: `gallery ${run.kind}` },
      el("div", { class: "main" }, this.#bar(), this.stage,
        el("p", { class: "sr-only", id: "gallery-keys" }, "The arrow keys move through the samples, surest first. Enter opens the selected one."),
        this.status),
      el("aside", { class: "side-panel", "aria-label": "Selection" },
        this.keep.element, ...(options.extra || []),
        el("section", { class: "selected", "aria-label": "Selected sample", "aria-live": "polite" }, this.picture, this.facts, options.plot && options.plot.element)),
    );
    this.ranking.addEventListener("select", () => this.#describe());
    for (const name of ["keep", "shown"]) this.ranking.addEventListener(name, () => this.#count());
    onTheme(this.element, () => this.#describe());
    this.#count();
    this.#describe();
    if (run.count) this.ranking.select(run.order[0]);
  }

  /** Move the selection as a key of the gallery does; return whether the key has a meaning. */
  press(key) {
    const steps = this.view.steps();
    if (key in steps) this.ranking.move(steps[key]);
    else if (key === "Home") this.ranking.select(this.ranking.shown[0] ?? -1);
    else if (key === "End") this.ranking.select(this.ranking.shown.at(-1) ?? -1);
    else if (key === "Enter" && this.options.open && this.ranking.selected >= 0) this.options.open(this.ranking.selected);
    else return false;
    return true;
  }

  /** Free what the selected sample's view holds. */
  close() {
    if (this.cell) this.cell.close();
  }

  #key(event) {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && this.press(event.key)) event.preventDefault();
  }

  #label() {
    const what = { points: "Points", images: "Images", crystals: "Crystals", vectors: "Samples" }[this.run.kind];
    return `${what}, ${count(this.run.count)}, surest first`;
  }

  /** Return the bar that sorts, filters and sets the size of tiles. */
  #bar() {
    const { run, ranking } = this, columns = Object.keys(run.columns).filter((name) => sortable(run.columns[name]) && !["rank", "confidence", "score"].includes(name));
    const by = el("select", { id: "sort-by" }, el("option", { value: "" }, run.label), ...columns.map((name) => el("option", { value: name }, run.titles[name] || words(name))));
    const turn = el("button", { type: "button", class: "quiet small", "aria-pressed": "false", "aria-label": "Reverse the order" }, "↓");
    turn.addEventListener("click", () => {
      turn.textContent = ranking.rising ? "↑" : "↓";
      turn.setAttribute("aria-pressed", String(ranking.rising));
      ranking.sort(by.value, !ranking.rising);
    });
    by.addEventListener("change", () => ranking.sort(by.value, ranking.rising));
    const judged = run.bad ? [["failed", run.word], ["good", opposite(run.word)]] : [];
    const filter = el("select", { id: "filter" }, ...[["all", "all"], ["kept", "kept"], ["dropped", "dropped"], ...judged].map(([value, name]) => el("option", { value }, name)));
    filter.addEventListener("change", () => ranking.show(filter.value));
    const texts = SEARCHED.some((name) => run.columns[name] && typeof run.columns[name][0] === "string");
    const search = el("input", { type: "search", id: "search", placeholder: run.columns.formula ? "formula or name" : "name", "aria-label": "Find by text", value: "" });
    search.addEventListener("input", () => ranking.show(filter.value, search.value));
    return el(
      "div", { class: "bar-row" },
      run.kind !== "points" && el("span", { class: "field" }, el("label", { for: "sort-by" }, "Sort by"), by, turn),
      el("span", { class: "field" }, el("label", { for: "filter" }, "Show"), filter),
      texts && search,
      this.view.resize && this.#sizes(),
    );
  }

  #sizes() {
    const { sizes } = this.view.painter, smaller = el("button", { type: "button", class: "quiet small", "aria-label": "Smaller tiles" }, "−");
    const larger = el("button", { type: "button", class: "quiet small", "aria-label": "Larger tiles" }, "+");
    const change = (by) => {
      const next = sizes[Math.max(0, Math.min(sizes.length - 1, sizes.indexOf(this.view.size) + by))];
      this.view.resize(next);
    };
    smaller.addEventListener("click", () => change(-1));
    larger.addEventListener("click", () => change(1));
    return el("span", { class: "field sizes" }, smaller, larger);
  }

  #count() {
    const { ranking, run } = this, { length } = ranking.shown;
    this.status.textContent = length === run.count ? `${count(run.count)} samples, ${ranking.by ? `by ${run.titles[ranking.by] || words(ranking.by)}` : "surest first"}.` : `${count(length)} of ${count(run.count)} samples.`;
  }

  #describe() {
    const { run, ranking, options } = this, sample = ranking.selected;
    if (sample < 0) {
      this.picture.hidden = true;
      fill(this.facts, el("p", { class: "hint" }, run.kind === "points" ? "Point at a sample, or use the arrow keys." : "Select a sample."));
      return;
    }
    this.picture.hidden = false;
    this.#portray(sample);
    const level = run.level ? run.level[sample] : NaN, failed = ranking.failed(sample);
    const dot = el("i", { class: "dot", "aria-hidden": "true" });
    dot.style.background = colourOf(level);
    const name = run.columns.formula ? subscripted(run.columns.formula[sample]) : `Sample ${run.columns.name ? run.columns.name[sample] : sample}`;
    const link = options.link && options.link(sample);
    fill(
      this.facts,
      el("h2", {}, name, " ", failed !== null && el("span", { class: failed ? "tag bad" : "tag good" }, failed ? run.word : opposite(run.word))),
      el("p", { class: "level" }, dot, run.level ? `${run.label} ${short(level)}` : "no confidence", el("span", { class: "quiet-text" }, ` · ${count(ranking.place[sample] + 1)} of ${count(run.count)}`)),
      el("dl", {}, ...this.#facts(sample).flatMap(([title, value]) => [el("dt", {}, title), el("dd", {}, value)])),
      link && el("p", {}, el("a", { href: link, download: "" }, "File of this sample")),
      options.open && el("button", { type: "button", class: "primary", on: { click: () => options.open(sample) } }, "Open"),
    );
    const curve = options.curve && options.curve(sample);
    if (curve) options.plot.show(curve.times, curve.lines);
  }

  #facts(sample) {
    const { columns, titles } = this.run;
    const shown = Object.keys(columns).filter((name) => !HIDDEN.has(name) && name !== "formula" && present(columns[name][sample]));
    return shown.slice(0, 12).map((name) => [titles[name] || words(name), say(columns[name][sample])]);
  }

  #portray(sample) {
    const { run } = this;
    if (run.kind === "images") {
      this.image ||= this.picture.appendChild(el("canvas", { class: "pixels", role: "img", "aria-label": "The selected image" }));
      const size = run.x.data.length / run.count;
      drawPicture(this.image, run.x.data.subarray(sample * size, (sample + 1) * size), run.x.shape.slice(1));
    } else if (run.kind === "crystals") {
      if (!this.cell) this.#addCell();
      this.cell.show(crystalOf(run.tensors, sample), { doubt: this.#doubt(sample) });
    } else this.picture.hidden = true;
  }

  #addCell() {
    this.cell = new Cell();
    this.picture.append(this.cell.element);
    if (!this.run.tensors.doubt) return;
    this.byDoubt = el("input", { type: "checkbox" });
    this.byDoubt.addEventListener("change", () => {
      const sample = this.ranking.selected;
      this.cell.show(crystalOf(this.run.tensors, sample), { doubt: this.#doubt(sample), still: true });
    });
    this.picture.append(el("label", { class: "hint" }, this.byDoubt, " Colour atoms by doubt"));
  }

  /** Return the doubt of each atom of a crystal, if atoms are coloured by it. */
  #doubt(sample) {
    const { doubt, first } = this.run.tensors;
    return this.byDoubt && this.byDoubt.checked ? doubt.data.subarray(first.data[sample], first.data[sample + 1]) : null;
  }
}

const words = (name) => name.replaceAll("_", " ");
const present = (value) => value !== null && value !== undefined && value !== "" && !Number.isNaN(value);
const sortable = (column) => column.some((value) => typeof value === "number" || typeof value === "string");
