// The panel that starts a run.

import { el } from "../dom.js";
import { post } from "./api.js";
import { form } from "./forms.js";
import { store } from "./store.js";

const memory = new Map(); // the latest values of each form, while the page is open

/** Return the view that draws with one model. */
export function drawView(studio, name) {
  const field = store.field(name);
  if (!field) return { title: "Unknown model", element: el("div", {}, el("h1", {}, "This model is not open"), el("p", {}, "Start the studio with its folder: fmwc studio FOLDER")) };
  const panel = form(field.controls, {
    action: "Draw",
    values: memory.get(name),
    async send(options) {
      memory.set(name, options);
      const made = await post("runs", { field: name, options });
      store.add(made);
      studio.go(`run/${made.run.id}`);
    },
  });
  const facts = [field.judge && field.judge.sentence, !field.ready && "The weights are loaded when you draw for the first time."];
  return {
    title: `Draw ${field.title}`,
    element: el(
      "div", { class: "draw" },
      el("h1", {}, `Draw: ${field.title}`),
      el("p", { class: "lead" }, field.sentence),
      field.problem ? el("p", { class: "problem", role: "alert" }, field.problem) : el("section", { class: "panel", "aria-label": "Options" }, panel.element),
      ...facts.filter(Boolean).map((text) => el("p", { class: "hint" }, text)),
    ),
  };
}
