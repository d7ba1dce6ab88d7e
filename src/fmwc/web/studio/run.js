// One run: its progress while it is drawn, then its gallery.

import { el, fill, percent } from "../dom.js";
import { Gallery } from "../gallery.js";
import { confirmRemoval, drawAgain } from "./actions.js";
import { get } from "./api.js";
import { exportDialog } from "./export.js";
import { Preview } from "./preview.js";
import { progress } from "./progress.js";
import { store } from "./store.js";

const shares = new Map(); // the share kept of each run, while the page is open
const selected = new Map();

/** Return the view of a run. */
export function runView(studio, id) {
  const head = el("div", { class: "run-head" }), work = el("div", {}), body = el("div", {});
  const view = { title: "Run", element: el("div", { class: "run" }, head, work, body), close, keys: {} };
  let gallery = null, bar = null, preview = null, shown = "";

  function look() {
    const run = store.run(id);
    if (!run) return fill(body, el("h1", {}, "This run does not exist"), el("p", {}, "It was deleted, or belongs to another studio folder."));
    view.title = run.title;
    header(run);
    working(run);
    if (run.data > 0) return show(run);
    if (["waiting", "drawing", "judging"].includes(run.state)) {
      preview ||= new Preview(run);
      if (preview.element.parentNode !== body) fill(body, preview.element);
      return undefined;
    }
    return fill(body, el("p", { class: "problem", role: "alert" }, run.error || `This run was ${run.state}.`));
  }

  function header(run) {
    const field = store.field(run.field), busy = Boolean(store.work(run));
    const facts = [(field || { title: run.field }).title, ...Object.entries(run.options || {}).filter(([name, value]) => !["count", "seed"].includes(name) && value !== "" && value !== "euler").map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`)];
    const note = run.order && run.order.note;
    fill(
      head,
      el("div", {}, el("h1", {}, run.title), el("p", { class: "hint" }, facts.join(" · ")), note && el("p", { class: "note-line" }, note),
        run.score && run.data > 0 && el("p", { class: "hint" }, run.score.sentence || run.score.title)),
      el("div", { class: "actions" },
        run.data > 0 && el("button", { type: "button", class: "primary", on: { click: () => exporting(run) } }, "Export"),
        run.source === "drawn" && !busy && el("button", { type: "button", on: { click: () => drawAgain(studio, run).catch((error) => fill(work, el("p", { class: "problem", role: "alert" }, error.message))) } }, run.state === "done" ? "Draw again" : "Resume"),
        run.source !== "opened" && !busy && el("button", { type: "button", class: "quiet", on: { click: () => confirmRemoval(studio, run) } }, "Delete")),
    );
  }

  function working(run) {
    const job = store.work(run);
    if (job && (!bar || bar.id !== job.id)) {
      if (bar) bar.close();
      bar = Object.assign(progress(job.id), { id: job.id });
      fill(work, bar.element);
    } else if (!job && bar) {
      bar.close();
      bar = null;
      fill(work);
    }
  }

  async function show(run) {
    const key = `${run.data} ${run.judged}`;
    if (shown === key) return;
    shown = key;
    if (preview) preview = preview.close();
    if (!gallery) fill(body, el("p", { class: "hint" }, "Loading the samples …"));
    try {
      const samples = await store.samples(run);
      if (shown !== key || !view.element.isConnected) return;
      if (gallery) gallery.close();
      const share = gallery ? gallery.ranking.kept / samples.count : (shares.get(id) ?? 1);
      const open = (sample) => studio.go(`sample/${id}/${sample}`);
      gallery = new Gallery(samples, { open, share, extra: [promise(run, (value) => gallery.keep.set(value))] });
      gallery.ranking.addEventListener("keep", () => shares.set(id, gallery.ranking.kept / samples.count));
      gallery.ranking.addEventListener("select", () => gallery.ranking.selected >= 0 && selected.set(id, gallery.ranking.selected));
      fill(body, gallery.element);
      if (selected.has(id)) gallery.ranking.select(selected.get(id));
    } catch (error) {
      fill(body, el("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  function exporting(run) {
    exportDialog(studio, run, gallery ? gallery.ranking.kept : run.count);
  }

  function close() {
    if (bar) bar.close();
    if (preview) preview.close();
    if (gallery) gallery.close();
    for (const name of ["run", "job", "state", "removed"]) store.removeEventListener(name, look);
  }

  const arrow = (key) => () => gallery && gallery.press(key);
  view.keys = {
    ...Object.fromEntries(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "Enter"].map((key) => [key, arrow(key)])),
    "[": () => gallery && gallery.keep.step(-1),
    "]": () => gallery && gallery.keep.step(1),
    e: () => gallery && exporting(store.run(id)),
    d: () => studio.go(`draw/${store.run(id).field}`),
    Escape: () => studio.go(""),
  };
  for (const name of ["run", "job", "state", "removed"]) store.addEventListener(name, look);
  look();
  return view;
}

/** Return the panel that asks which failure rate can be guaranteed. */
function promise(run, apply) {
  if (!run.judged || run.count < 2) return null;
  const word = store.word(run);
  const risk = el("input", { type: "number", id: "promise-risk", min: 0.1, max: 99, step: "any", value: 5 });
  const probability = el("input", { type: "number", id: "promise-probability", min: 50, max: 99.9, step: "any", value: 90 });
  const answer = el("p", { class: "answer", role: "status" }), ask = el("button", { type: "submit" }, "Guarantee");
  const node = el("form", { class: "promise-form" },
    el("label", { for: "promise-risk" }, `At most … % ${word}`), risk,
    el("label", { for: "promise-probability" }, "with … % probability"), probability, ask);
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    ask.disabled = true;
    try {
      const found = await get(`runs/${run.id}/promise?max_risk=${risk.value / 100}&probability=${probability.value / 100}`);
      if (found.problem) fill(answer, found.problem);
      else {
        const use = el("button", { type: "button", class: "small", on: { click: () => apply(found.share) } }, `Keep these ${percent(found.share, 1, 0)}`);
        fill(answer, found.sentence, " ", found.kept > 0 && use);
      }
    } catch (error) {
      fill(answer, error.message);
    }
    ask.disabled = false;
  });
  return el("section", { "aria-label": "Guarantee" }, el("details", {}, el("summary", {}, "Guarantee a failure rate"), node, answer));
}
