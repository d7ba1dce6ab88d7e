// Forms from the server's description of their controls.

import { el, fill } from "../dom.js";

/**
 * @typedef {{name: string, title: string, sentence: string, kind: "whole"|"number"|"choice"|"text"|"flag", default: any,
 *   min?: number, max?: number, step?: number, choices?: {value: string, title: string, sentence: string}[],
 *   advanced?: boolean, optional?: boolean}} Control
 */

let serial = 0;

/**
 * Return a form.
 *
 * @param {Control[]} controls
 * @param {{action: string, send: (values: Record<string, any>) => Promise<void>, values?: Record<string, any>,
 *   skip?: string[], short?: boolean}} options The name of the button, what it does, values to start with, controls that
 *   are shown elsewhere, and whether to leave out the sentences.
 */
export function form(controls, { action, send, values = {}, skip = [], brief = false }) {
  const inputs = new Map(), problem = el("p", { class: "problem", role: "alert" }), button = el("button", { type: "submit", class: "primary" }, action);
  const rows = (advanced) => controls.filter((one) => !skip.includes(one.name) && Boolean(one.advanced) === advanced).map((one) => row(one, inputs, values, brief));
  const more = rows(true);
  const node = el(
    "form", { class: "form", novalidate: true },
    ...rows(false),
    more.length > 0 && el("details", {}, el("summary", {}, "More"), ...more),
    problem,
    el("div", { class: "actions" }, button),
  );
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    fill(problem);
    for (const { input } of inputs.values()) input.removeAttribute("aria-invalid");
    const wrong = [...inputs.values()].find(({ input }) => !input.checkValidity());
    if (wrong) return complain(wrong, `${wrong.control.title}: ${wrong.input.validationMessage}`);
    button.disabled = true;
    try {
      await send(read(inputs));
    } catch (error) {
      complain(inputs.get(error.control), error.message);
    }
    button.disabled = false;
  });
  function complain(at, text) {
    fill(problem, text);
    if (!at) return;
    const fold = at.input.closest("details");
    if (fold) fold.open = true;
    at.input.setAttribute("aria-invalid", "true");
    at.input.focus();
  }
  return { element: node, inputs, read: () => read(inputs) };
}

function row(control, inputs, values, brief) {
  const id = `control-${++serial}`, hint = `${id}-hint`, value = values[control.name] ?? control.default ?? "";
  const input = inputOf(control, id, value);
  if (control.sentence && !brief) input.setAttribute("aria-describedby", hint);
  inputs.set(control.name, { control, input });
  const label = el("label", { for: id }, control.title), note = control.sentence && !brief && el("small", { id: hint }, control.sentence);
  return el("div", { class: `row ${control.kind}` }, ...(control.kind === "flag" ? [el("span", {}, input, label), note] : [label, input, note]));
}

function inputOf(control, id, value) {
  if (control.kind === "choice") {
    const select = el("select", { id }, ...control.choices.map((choice) => el("option", { value: choice.value, title: choice.sentence || null }, choice.title)));
    select.value = String(value);
    return select;
  }
  if (control.kind === "flag") {
    const box = el("input", { id, type: "checkbox" });
    box.checked = Boolean(value);
    return box;
  }
  if (control.kind === "text") return el("input", { id, type: "text", maxlength: control.max, value, autocomplete: "off", spellcheck: "false" });
  const step = control.kind === "whole" ? 1 : control.step || "any";
  return el("input", { id, type: "number", inputmode: control.kind === "whole" ? "numeric" : "decimal", min: control.min, max: control.max, step, value, required: !control.optional });
}

function read(inputs) {
  const values = {};
  for (const [name, { control, input }] of inputs) {
    if (control.kind === "flag") values[name] = input.checked;
    else if (control.kind === "choice" || control.kind === "text") values[name] = input.value;
    else if (input.value !== "") values[name] = Number(input.value);
  }
  return values;
}
