// The first view: the models to draw with, and the runs.

import { el, fill } from "../dom.js";
import { address } from "./api.js";
import { drawMotif } from "./motif.js";
import { stateOf, store } from "./store.js";

/** Return the view of all models and runs. */
export function startView() {
  const cards = el("div", { class: "cards" }), runs = el("div", {}), motifs = [];
  function look() {
    fill(cards, ...store.fields.map(card));
    motifs.forEach((draw) => requestAnimationFrame(draw));
    list();
  }
  function card(field) {
    const canvas = el("canvas", { class: "motif", "aria-hidden": "true" });
    motifs.push(() => canvas.isConnected && drawMotif(canvas, field.kind));
    const last = store.runs.find((run) => run.field === field.name && run.state === "done" && !run.parent);
    return el(
      "article", { class: "card" }, canvas,
      el("div", { class: "words" },
        el("h2", {}, field.title),
        el("p", {}, field.sentence),
        field.problem ? el("p", { class: "problem" }, field.problem) : null,
        el("div", { class: "actions" },
          !field.problem && el("a", { class: "button primary-link", href: address(`draw/${field.name}`), "aria-label": `Draw with ${field.title}` }, "Draw"),
          last && el("a", { class: "button", href: address(`run/${last.id}`), "aria-label": `Open the latest run of ${field.title}` }, "Latest run"))),
    );
  }
  function list() {
    const drawn = store.runs.filter((run) => !run.parent);
    const row = (run) => el("tr", {},
      el("td", {}, el("a", { href: address(`run/${run.id}`) }, run.title)),
      el("td", {}, (store.field(run.field) || { title: run.field }).title),
      el("td", {}, stateOf(run)));
    fill(runs, drawn.length > 0 && el("h2", {}, "Runs"), drawn.length > 0 && el("div", { class: "scroll" }, el("table", { class: "list" },
      el("thead", {}, el("tr", {}, ...["Run", "Model", "State"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...drawn.slice(0, 50).map(row)))));
  }
  look();
  store.addEventListener("state", look);
  store.addEventListener("run", list);
  store.addEventListener("removed", list);
  const again = new ResizeObserver(() => motifs.forEach((draw) => draw()));
  again.observe(cards);
  return {
    title: "Start",
    element: el("div", { class: "start" },
      el("h1", {}, "Draw samples and see how far to trust each of them"),
      el("p", { class: "lead" }, "Choose a model. Everything is computed on this machine, and finished runs stay here."),
      cards, runs),
    close() {
      again.disconnect();
      store.removeEventListener("state", look);
      store.removeEventListener("run", list);
      store.removeEventListener("removed", list);
    },
  };
}
