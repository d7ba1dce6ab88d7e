// The progress of a job, with the time left and a button that cancels it.

import { duration, el, fill } from "../dom.js";
import { post } from "./api.js";
import { store } from "./store.js";

/** Return a progress bar that follows a job. */
export function progress(id) {
  const bar = el("progress", { max: 1, "aria-label": "Progress" }), text = el("span", { class: "stage-text", "aria-live": "polite" }), left = el("span", { class: "left" });
  const cancel = el("button", { type: "button", class: "quiet small" }, "Cancel");
  const node = el("div", { class: "progress" }, el("div", { class: "line" }, text, left, cancel), bar);
  cancel.addEventListener("click", async () => {
    cancel.disabled = true;
    fill(text, "Cancelling …");
    await post(`jobs/${id}/cancel`).catch(() => {});
  });
  function look() {
    const job = store.job(id);
    if (!job) return;
    node.hidden = !["waiting", "running"].includes(job.state);
    const wait = job.place === 1 ? "after one other job" : `after ${job.place} other jobs`;
    const words = job.state === "waiting" ? (job.place ? `Waiting, ${wait}` : "Waiting") : `${job.title}${job.stage ? `: ${job.stage}` : ""}`;
    if (!cancel.disabled && text.textContent !== words) fill(text, words);
    fill(left, job.state === "running" && job.left !== null ? `about ${duration(job.left)} left` : "");
    if (job.state === "running" && job.share > 0) bar.value = job.share;
    else bar.removeAttribute("value");
  }
  store.addEventListener("job", look);
  store.addEventListener("state", look);
  look();
  return {
    element: node,
    close() {
      store.removeEventListener("job", look);
      store.removeEventListener("state", look);
    },
  };
}
