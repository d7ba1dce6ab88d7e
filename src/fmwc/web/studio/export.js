// The window that exports the kept samples and shows how to make them without the studio.

import { copyButton, count, el, fill } from "../dom.js";
import { download, post } from "./api.js";
import { progress } from "./progress.js";
import { store } from "./store.js";

/**
 * Open the window.
 *
 * @param {{open: Function}} studio
 * @param {any} run
 * @param {number} kept The number of surest samples that the slider keeps.
 */
export function exportDialog(studio, run, kept) {
  const button = el("button", { type: "button", class: "primary" }, "Export"), place = el("div", { class: "export-result", role: "status" }), code = el("div", {}, el("p", { class: "hint" }, "…"));
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      const { job } = await post(`runs/${run.id}/export`, { kept });
      store.add({ job });
      const bar = progress(job.id);
      fill(place, bar.element);
      const done = await store.finished(job.id);
      bar.close();
      written(done.result);
    } catch (error) {
      fill(place, el("p", { class: "problem" }, error.message));
    }
    button.disabled = false;
  });
  function written({ export: name, folder, files }) {
    const load = el("button", { type: "button" }, "Download as zip");
    load.addEventListener("click", () => download(`exports/${name}`).catch((error) => fill(place, el("p", { class: "problem" }, error.message))));
    fill(place, el("p", {}, "Written to ", el("code", {}, folder), " ", copyButton(folder, "Copy the path")), el("p", { class: "hint" }, files.slice(0, 8).join(", "), files.length > 8 && ` and ${files.length - 8} more`), load);
  }
  const block = (title, text) => el("section", { class: "code" }, el("div", { class: "code-head" }, el("h3", {}, title), copyButton(text)), el("pre", { tabindex: 0, "aria-label": title }, text));
  post(`runs/${run.id}/recipe`, { kept }).then(
    ({ command, python, note }) => fill(code, note && el("p", { class: "hint" }, note), command && block("Command", command), python && block("Python", python)),
    (error) => fill(code, el("p", { class: "problem" }, error.message)),
  );
  studio.open(
    kept < run.count ? `Export the surest ${count(kept)} of ${count(run.count)}` : `Export ${count(run.count)} samples`,
    el("p", {}, "Writes a folder like that of fmwc sample. Change the share with the slider of the gallery."),
    el("div", { class: "actions left" }, button),
    place,
    el("h2", { class: "sub" }, "Make the same without the studio"),
    code,
  );
}
