// The slider that keeps the surest samples, and what the judge says of those kept and dropped.

import { surface } from "./canvas.js";
import { gradient, ink, onTheme } from "./colour.js";
import { count, el, fill, percent, perFrame } from "./dom.js";

/**
 * Return the slider of a ranking.
 *
 * @param {import("./ranking.js").Ranking} ranking
 * @param {{share?: number}} [options] The share kept at first.
 */
export function keepSlider(ranking, { share = 1 } = {}) {
  const input = el("input", { type: "range", min: 1, max: 100, step: 1, value: Math.round(100 * share), id: "keep-share" });
  const number = el("output", { for: "keep-share", class: "share" });
  const scale = el("i", { "aria-hidden": "true" });
  const sides = { kept: el("div", { class: "side kept" }), dropped: el("div", { class: "side dropped" }) };
  const saying = el("p", { class: "sr-only", "aria-live": "polite" });
  const curve = el("canvas", { class: "retention", role: "img", "aria-label": "Share of failures among the kept samples, by the share kept" });
  const { word } = ranking.run, judged = ranking.judgedUpTo[ranking.run.count] > 0;
  let waiting = 0;

  function describe() {
    const outcome = ranking.outcome(), value = `${input.value} percent, ${count(outcome.kept.count)} samples`;
    number.textContent = `${input.value} %`;
    input.setAttribute("aria-valuetext", value);
    for (const [name, side] of Object.entries(sides)) fill(side, ...sideOf(name, outcome[name], outcome.all, word));
    clearTimeout(waiting); // speak when the slider rests
    waiting = setTimeout(() => (saying.textContent = sentence(outcome, word)), 500);
    redraw();
  }
  const redraw = perFrame(() => judged && drawRetention(curve, ranking));
  const paint = () => (scale.style.background = gradient());
  input.addEventListener("input", () => ranking.keep(input.value / 100));
  ranking.addEventListener("keep", describe);
  new ResizeObserver(redraw).observe(curve);
  paint();
  const element = el(
    "section", { class: "keep", "aria-label": "Keep the surest samples" },
    el("div", { class: "keep-head" }, el("label", { for: "keep-share" }, "Keep the surest"), number),
    el("div", { class: "track" }, input),
    el("div", { class: "scale" }, el("span", {}, "doubtful"), scale, el("span", {}, "sure")),
    el("div", { class: "sides" }, sides.kept, sides.dropped),
    judged && curve,
    saying,
  );
  onTheme(element, () => {
    paint();
    redraw();
  });
  ranking.keep(share);
  describe();
  return {
    element,
    /** Move the slider by steps of one percent. */
    step(by) {
      input.value = String(Number(input.value) + by);
      ranking.keep(input.value / 100);
    },
    /** Keep exactly this share. */
    set(value) {
      input.value = String(Math.round(100 * value));
      ranking.keep(value);
    },
  };
}

function sideOf(name, side, all, word) {
  const title = name === "kept" ? "Kept" : "Dropped";
  const rate = side.judged ? percent(side.failed, side.judged) : side.count ? "not judged" : "none";
  const bar = el("i", { class: "bar", "aria-hidden": "true" });
  bar.style.setProperty("--part", side.judged ? side.failed / side.judged : 0);
  const whole = all.judged ? ` · ${percent(all.failed, all.judged)} of all` : "";
  return [
    el("span", { class: "title" }, `${title} ${count(side.count)}`),
    all.judged > 0 && el("b", {}, rate),
    all.judged > 0 && bar,
    all.judged > 0 && el("span", { class: "note" }, side.judged ? `${word}${name === "kept" ? whole : ""}` : ""),
  ];
}

function sentence({ kept, dropped, all }, word) {
  if (!all.judged) return `${count(kept.count)} samples kept, ${count(dropped.count)} dropped.`;
  const of = dropped.judged ? ` Of the ${count(dropped.count)} dropped, ${percent(dropped.failed, dropped.judged)} are ${word}.` : "";
  return `${percent(kept.failed, kept.judged)} of the ${count(kept.count)} kept are ${word}.${of}`;
}

/** Draw the share of failures among the surest n, for all n, with the slider's place marked. */
function drawRetention(canvas, { failedUpTo, judgedUpTo, run, kept }) {
  const [pen, width, height] = surface(canvas), all = failedUpTo[run.count] / judgedUpTo[run.count];
  const first = Math.max(1, Math.round(run.count / 50)), rate = (n) => failedUpTo[n] / Math.max(1, judgedUpTo[n]);
  let top = 1.25 * all;
  for (let n = first; n <= run.count; n += Math.max(1, Math.floor(run.count / 200))) top = Math.max(top, 1.1 * rate(n));
  const left = 46, right = width - 8, head = 10, foot = height - 22;
  const px = (n) => left + (n / run.count) * (right - left), py = (v) => foot - (v / Math.max(top, 1e-9)) * (foot - head);
  const [line, quiet, main, text] = ["--line", "--quiet", "--accent", "--ink"].map(ink);
  Object.assign(pen, { strokeStyle: line, fillStyle: quiet, lineWidth: 1, textAlign: "right", textBaseline: "middle" });
  for (const [value, dash] of [[0, []], [all, [4, 3]]]) {
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(left, py(value));
    pen.lineTo(right, py(value));
    pen.stroke();
    pen.fillText(percent(value, 1, value && value < 0.095 ? 1 : 0), left - 6, py(value));
  }
  pen.setLineDash([]);
  Object.assign(pen, { textAlign: "left", textBaseline: "alphabetic" });
  pen.fillText("kept: 0 %", left, height - 5);
  pen.textAlign = "right";
  pen.fillText("100 %", right, height - 5);
  Object.assign(pen, { strokeStyle: main, lineWidth: 2 });
  pen.beginPath();
  for (let n = first; n <= run.count; n += Math.max(1, Math.floor(run.count / 400))) pen.lineTo(px(n), py(rate(n)));
  pen.stroke();
  Object.assign(pen, { strokeStyle: text, fillStyle: text, lineWidth: 1 });
  pen.beginPath();
  pen.moveTo(px(kept), head);
  pen.lineTo(px(kept), foot);
  pen.stroke();
  pen.beginPath();
  pen.arc(px(kept), py(rate(kept)), 4, 0, 2 * Math.PI);
  pen.fill();
}
