// The panel that takes a sample back to a time, changes it there, and lets the flow finish it again.

import { el, fill } from "../dom.js";
import { post } from "./api.js";
import { form } from "./forms.js";
import { store } from "./store.js";

const LAST = 0.985; // beyond it, there is no step left to integrate

/**
 * Return the panel.
 *
 * @param {{go: (path: string) => void}} studio
 * @param {any} run
 * @param {number} sample
 * @param {number} critical The time at which the uncertainty is largest; used while the cursor is at the end, where no
 *   other time was measured to be better.
 * @param {(job: any) => Node} bar Returns the progress of a job.
 */
export function editPanel(studio, run, sample, critical, bar) {
  const place = el("div", { role: "status" }), clock = el("output", {}, "t = 1.00"), hint = el("small", {});
  const start = (t) => (t > LAST ? Math.min(LAST, usual().at ?? critical) : t);
  let at = 1;
  const panel = form(run.edits || [], {
    action: "Edit from here",
    skip: ["at"],
    async send(values) {
      const made = await post(`runs/${run.id}/samples/${sample}/edits`, { ...values, at: Math.round(1e4 * start(at)) / 1e4 });
      store.add(made);
      fill(place, bar(made.job));
      store.finished(made.job.id).then(
        () => place.isConnected && studio.go(`sample/${made.run.id}/0`),
        (error) => fill(place, el("p", { class: "problem", role: "alert" }, error.message)),
      );
    },
  });
  const changed = panel.inputs.get("channel"), strength = panel.inputs.get("scale").input;
  /** Return the time and the strength that are the default of the chosen channel. */
  function usual() {
    return changed ? changed.control.choices.find((one) => one.value === changed.input.value) : {};
  }
  if (changed) changed.input.addEventListener("change", () => {
    strength.value = String(usual().scale);
    tell();
  });
  function tell() {
    fill(clock, `t = ${start(at).toFixed(2)}`);
    const why = usual().at ? "the usual time for this" : "the time of largest uncertainty";
    fill(hint, at > LAST ? `, ${why}; move the cursor to choose another.` : "");
  }
  const element = el(
    "section", { class: "panel", "aria-label": "Edit" },
    el("h2", {}, "Edit and rewind"),
    el("p", { class: "hint" }, "Goes back to the time of the cursor, changes the state there, and lets the flow finish it again."),
    el("p", { class: "edit-time" }, "From ", clock, hint),
    panel.element,
    place,
  );
  return {
    element,
    /** Follow the cursor. */
    at(t) {
      at = t;
      tell();
    },
  };
}
