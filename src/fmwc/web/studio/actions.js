// What can be done with a whole run.

import { el, fill } from "../dom.js";
import { post, remove } from "./api.js";
import { store } from "./store.js";

/** Ask before a run is deleted. */
export function confirmRemoval(studio, run) {
  const problem = el("p", { class: "problem", role: "alert" });
  const yes = el("button", { type: "button", class: "primary" }, "Delete");
  yes.addEventListener("click", async () => {
    try {
      await remove(`runs/${run.id}`);
      studio.close();
      studio.go("");
    } catch (error) {
      fill(problem, error.message);
    }
  });
  studio.open("Delete this run?", el("p", {}, `${run.title}: its samples and its edits are deleted from the studio's folder. Exported folders stay.`), problem, el("div", { class: "actions" }, yes));
}

/** Draw the same options again as a new run. */
export async function drawAgain(studio, run) {
  const made = await post(`runs/${run.id}/again`);
  store.add(made);
  studio.go(`run/${made.run.id}`);
}
