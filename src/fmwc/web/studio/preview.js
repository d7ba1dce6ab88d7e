// The samples of a run while they are integrated.

import { el, fill } from "../dom.js";
import { PicturePainter } from "../pictures.js";
import { CrystalPainter } from "../crystal.js";
import { Points } from "../points.js";
import { Ranking } from "../ranking.js";
import { samplesOf } from "../samples.js";
import { Vectors } from "../vectors.js";
import { Wall } from "../wall.js";
import { tensors } from "./api.js";
import { store } from "./store.js";

export class Preview {
  #busy = false;

  constructor(run) {
    this.run = run;
    this.host = el("div", { class: "view preview" }, el("p", { class: "hint waiting" }, "The samples appear here as they are integrated."));
    this.text = el("p", { class: "status" });
    this.element = el("div", {}, this.host, this.text);
    this.heard = ({ detail }) => detail.run === run.id && this.#fetch();
    store.addEventListener("preview", this.heard);
    this.#fetch();
  }

  close() {
    store.removeEventListener("preview", this.heard);
    return null;
  }

  async #fetch() {
    if (this.#busy) return;
    this.#busy = true;
    try {
      const { tensors: found, metadata } = await tensors(`runs/${this.run.id}/preview`);
      this.#show(found, metadata);
    } catch {
      // There is no picture yet.
    }
    this.#busy = false;
  }

  #show(found, { t, done }) {
    const about = { kind: this.run.kind, label: "confidence", word: "", support: store.support(this.run) };
    const samples = samplesOf(about, found, { columns: {} }), ranking = new Ranking(samples);
    const view = { points: () => new Points(ranking), images: () => new Wall(ranking, new PicturePainter(samples)), crystals: () => new Wall(ranking, new CrystalPainter(samples)), vectors: () => new Vectors(ranking) }[this.run.kind]();
    fill(this.host, view.element);
    fill(this.text, Number(done) > 0 ? `${done} of ${this.run.count} finished; the next ones are at t = ${Number(t).toFixed(2)}.` : `All are at t = ${Number(t).toFixed(2)} (0: noise, 1: sample).`);
  }
}
