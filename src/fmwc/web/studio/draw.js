// The panel that starts a run.

import { el, fill } from "../dom.js";
import { post } from "./api.js";
import { form } from "./forms.js";
import { store } from "./store.js";

const memory = new Map(); // the latest values of each form, while the page is open

/** Return the view that draws with one model. */
export function drawView(studio, name) {
  const element = el("div", { class: "draw" });
  const look = () => {
    const field = store.field(name);
    fill(element, ...(field ? partsOf(studio, name, field) : [el("h1", {}, "This model is not open"), el("p", {}, "Start the studio with its folder: fmwc studio FOLDER")]));
    if (!field || field.ready) store.removeEventListener("state", look);
  };
  store.addEventListener("state", look);
  look();
  return { title: `Draw ${(store.field(name) || { title: name }).title}`, element, close: () => store.removeEventListener("state", look) };
}

function partsOf(studio, name, field) {
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
  const options = field.ready ? el("section", { class: "panel", "aria-label": "Options" }, panel.element) : el("p", { class: "hint", role: "status" }, "Loading the weights …");
  return [
    el("h1", {}, `Draw: ${field.title}`),
    el("p", { class: "lead" }, field.sentence),
    field.problem ? el("p", { class: "problem", role: "alert" }, field.problem) : options,
    field.judge && el("p", { class: "hint" }, field.judge.sentence),
  ];
}
