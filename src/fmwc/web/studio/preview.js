// The samples of a run while they are integrated.

import { el, fill } from "../dom.js";
import { viewOf } from "../gallery.js";
import { Ranking } from "../ranking.js";
import { samplesOf } from "../samples.js";
import { tensors } from "./api.js";
import { store } from "./store.js";

export class Preview {
  #busy = false;
  #missed = false; // whether the samples changed while they were fetched

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
    this.#missed = true;
    if (this.#busy) return;
    this.#busy = true;
    while (this.#missed) {
      this.#missed = false;
      try {
        const file = await tensors(`runs/${this.run.id}/preview`);
        if (file) this.#show(file.tensors, file.metadata);
      } catch (error) {
        fill(this.text, error.message);
      }
    }
    this.#busy = false;
  }

  #show(found, { t, done }) {
    const about = { kind: this.run.kind, label: "confidence", word: "", support: store.support(this.run) };
    const samples = samplesOf(about, found, { columns: {} }), ranking = new Ranking(samples);
    const { element } = viewOf(ranking, {}), { scrollTop } = this.host.firstChild;
    fill(this.host, element);
    element.scrollTop = scrollTop;
    fill(this.text, Number(done) > 0 ? `${done} of ${this.run.count} finished; the next ones are at t = ${Number(t).toFixed(2)}.` : `All are at t = ${Number(t).toFixed(2)} (0: noise, 1: sample).`);
  }
}
