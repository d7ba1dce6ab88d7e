// One sample: its way through time, why it is doubted, and what edits make of it.

import { colourOf, onTheme } from "../colour.js";
import { Curve } from "../curve.js";
import { calm, el, fill, say, short } from "../dom.js";
import { filmOf, nearest, strip } from "../film.js";
import { subscripted } from "../crystal.js";
import { opposite } from "../samples.js";
import { address, get, post, tensors } from "./api.js";
import { editPanel } from "./edit.js";
import { portrait } from "./portrait.js";
import { progress } from "./progress.js";
import { store } from "./store.js";

const SECONDS = 4; // of an animation

/** Return the view of one sample of a run. */
export function sampleView(studio, id, number) {
  const sample = Number(number), run = store.run(id);
  const parts = Object.fromEntries(["head", "pair", "path", "scores", "edit", "history"].map((name) => [name, el("div", { class: `sample-${name}` })]));
  const view = {
    title: `Sample ${number}`,
    element: el("div", { class: "sample" }, parts.head, el("div", { class: "columns" }, el("div", {}, parts.pair, parts.path), el("div", { class: "side-panel" }, parts.scores, parts.edit, parts.history))),
    keys: {},
    close,
  };
  if (!run) {
    fill(parts.head, el("h1", {}, "This run does not exist"));
    return view;
  }
  const back = run.parent ? `sample/${run.parent.run}/${run.parent.sample}` : `run/${id}`;
  view.keys = {
    ArrowLeft: () => turn(-1), ArrowUp: () => turn(-1), ArrowRight: () => turn(1), ArrowDown: () => turn(1),
    Escape: () => studio.go(back),
    d: () => studio.go(`draw/${run.field}`),
    " ": toggle,
    ",": () => move(grid[Math.max(0, nearest(grid, time) - 1)]),
    ".": () => move(grid[Math.min(grid.length - 1, nearest(grid, time) + 1)]),
  };
  let film = null, frame = 0, time = 1, grid = [0, 1], editor = null, told = null, closed = false;
  const bars = new Set(), drawn = [];
  const curve = new Curve({ move: (t) => move(t) });
  const slider = el("input", { type: "range", min: 0, max: 1, step: 0.01, value: 1, "aria-label": "Time" });
  const clock = el("output", { class: "clock" }), play = el("button", { type: "button", class: "quiet", "aria-label": "Play the path" }, "▶");
  let frames = null;
  slider.addEventListener("input", () => move(Number(slider.value)));
  play.addEventListener("click", toggle);

  /** Go to the next surer (−1) or more doubtful (1) sample. */
  async function turn(step) {
    const { order } = await store.samples(run), next = order[order.indexOf(sample) + step];
    if (next !== undefined && !closed) studio.go(`sample/${id}/${next}`);
  }

  function close() {
    closed = true;
    cancelAnimationFrame(frame);
    for (const bar of bars) bar.close();
    for (const part of [film, ...drawn]) if (part && part.close) part.close();
  }

  function move(t) {
    time = grid[nearest(grid, Math.max(0, Math.min(1, t)))];
    slider.value = String(time);
    slider.setAttribute("aria-valuetext", `t = ${time.toFixed(2)}`);
    fill(clock, `t = ${time.toFixed(2)}`);
    curve.cursor = time;
    if (film) film.show(time);
    if (frames) for (const button of frames.element.children) button.toggleAttribute("data-now", button.lastChild.textContent === grid[nearest(grid, time)].toFixed(2));
    if (editor) editor.at(Math.min(time, 0.99));
  }

  function toggle() {
    if (frame) return halt();
    const start = performance.now(), from = time >= 1 ? 0 : time, pace = calm() ? 8 : 400; // calm: a few jumps instead of a film
    fill(play, "❚❚");
    play.setAttribute("aria-label", "Stop");
    const step = (now) => {
      const t = from + Math.floor(((now - start) / 1000 / SECONDS) * pace) / pace;
      move(Math.min(1, t));
      frame = t >= 1 ? 0 : requestAnimationFrame(step);
      if (!frame) halt();
    };
    frame = requestAnimationFrame(step);
    return undefined;
  }

  function halt() {
    cancelAnimationFrame(frame);
    frame = 0;
    fill(play, "▶");
    play.setAttribute("aria-label", "Play the path");
  }

  // ---- what is known at once ---------------------------------------------------------------------------------------------

  async function begin() {
    try {
      const samples = await store.samples(run);
      told = await get(`runs/${id}/samples/${sample}`);
      if (closed) return;
      heading(samples);
      scores();
      history();
      await pair();
      if (told.problem) fill(parts.path, still(samples), el("p", { class: "hint" }, told.problem));
      else await path(samples);
    } catch (error) {
      if (!closed) fill(parts.path, el("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  const bar = (job) => {
    const made = progress(job.id);
    bars.add(made);
    return made.element;
  };

  function still(samples) {
    const made = portrait(samples, sample);
    drawn.push(made);
    return el("div", { class: "panel still" }, made.element);
  }

  function heading(samples) {
    const place = samples.order.indexOf(sample);
    const formula = samples.columns.formula && samples.columns.formula[sample];
    const title = formula ? subscripted(formula) : `Sample ${told.name}`;
    view.title = title;
    fill(
      parts.head,
      el("nav", { class: "crumbs", "aria-label": "Way back" },
        el("a", { href: address(back) }, run.parent ? "← Original" : `← ${run.title}`)),
      el("div", { class: "run-head" },
        el("h1", {}, title, " ", told.failed !== null && told.failed !== undefined && el("span", { class: told.failed ? "tag bad" : "tag good" }, told.failed ? store.word(run) : opposite(store.word(run)))),
        samples.count > 1 && el("div", { class: "actions" },
          el("button", { type: "button", disabled: place === 0, on: { click: () => turn(-1) } }, "← Surer"),
          el("button", { type: "button", disabled: place === samples.count - 1, on: { click: () => turn(1) } }, "More doubtful →"))),
    );
  }

  function scores() {
    const level = told.confidence ?? told.rank, dot = el("i", { class: "dot", "aria-hidden": "true" });
    const paint = () => (dot.style.background = colourOf(level));
    paint();
    onTheme(dot, paint);
    const score = ({ title, value, place, sentence }) => {
      const meter = el("i", { class: "place", "aria-hidden": "true" });
      meter.style.setProperty("--place", place ?? 0);
      return el("div", { class: "score" }, el("div", { class: "line" }, el("span", {}, title), el("b", {}, short(value))),
        place !== null && place !== undefined && run.count > 1 && el("div", { class: "line note" }, meter, el("span", {}, `surer than ${Math.round(100 * place)} % of this run`)), el("p", {}, sentence));
    };
    const word = told.confidence === null || told.confidence === undefined ? "rank in this run" : "confidence";
    fill(
      parts.scores,
      el("section", { class: "panel", "aria-label": "Scores" },
        level !== null && level !== undefined && el("p", { class: "big-level" }, dot, el("b", {}, short(level)), ` ${word}`),
        told.verdict && el("p", {}, told.verdict),
        told.rival && el("p", { class: "rival" }, el("b", {}, "Rival: "), told.rival.sentence),
        ...told.scores.map(score),
        told.facts.length > 0 && el("dl", { class: "facts" }, ...told.facts.flatMap(({ title, value }) => [el("dt", {}, title), el("dd", {}, say(value))]))),
    );
  }

  // ---- history -------------------------------------------------------------------------------------------------------------

  function history() {
    const { chain, edits } = told, before = chain.at(-2);
    const link = (entry, now) => el("li", { "aria-current": now ? "step" : null }, now ? entry.title : el("a", { href: address(`sample/${entry.run}/${entry.sample}`) }, entry.title));
    if (chain.length < 2 && !edits.length) return fill(parts.history);
    return fill(
      parts.history,
      el("section", { class: "panel", "aria-label": "History" },
        el("h2", {}, "History"),
        el("ol", { class: "chain" }, ...chain.map((entry, i) => link(entry, i === chain.length - 1))),
        before && el("button", { type: "button", on: { click: () => studio.go(`sample/${before.run}/${before.sample}`) } }, "Undo: back to the state before"),
        edits.length > 0 && el("h3", {}, "Edits of this sample"),
        edits.length > 0 && el("ul", { class: "chain" }, ...edits.map((one) => link({ ...one, sample: 0 }, false)))),
    );
  }

  async function pair() {
    const whole = run.parent ? await get(`runs/${id}`) : null;
    if (!whole || !whole.pair) return;
    const parent = store.run(run.parent.run);
    const sides = [["before", parent, run.parent.sample, whole.pair.before], ["after", run, sample, whole.pair.after]];
    const cards = await Promise.all(sides.map(async ([name, of, index, found]) => {
      const picture = of && portrait(await store.samples(of), index);
      if (picture) drawn.push(picture);
      const better = name === "after" && whole.pair.before.confidence !== null && found.confidence !== whole.pair.before.confidence;
      const change = better ? (found.confidence > whole.pair.before.confidence ? " ▲ surer" : " ▼ more doubtful") : "";
      const judged = found.failed === null || found.failed === undefined ? null : el("span", { class: found.failed ? "tag bad" : "tag good" }, found.failed ? store.word(run) : opposite(store.word(run)));
      return el("figure", { class: name }, picture && picture.element,
        el("figcaption", {}, el("b", {}, name === "before" ? "Before" : "After"), judged,
          el("span", {}, found.confidence === null || found.confidence === undefined ? `score ${short(found.score)}` : `confidence ${short(found.confidence)}`, change),
          found.verdict && el("small", {}, found.verdict)));
    }));
    if (!closed) fill(parts.pair, el("section", { class: "panel pair", "aria-label": "Before and after the edit" }, el("div", { class: "both" }, ...cards), whole.pair.note && el("p", { class: "hint" }, whole.pair.note)));
  }

  // ---- path ------------------------------------------------------------------------------------------------------------------

  async function path(samples) {
    const asked = await post(`runs/${id}/samples/${sample}/trace`);
    if (!asked.ready) {
      store.add({ job: asked.job });
      fill(parts.path, still(samples), el("p", { class: "hint" }, "Computing the path of this sample …"), bar(asked.job));
      await store.finished(asked.job.id);
    }
    const { tensors: trace, metadata } = await tensors(`runs/${id}/samples/${sample}/trace`);
    if (closed) return;
    grid = Array.from(trace.grid.data);
    film = filmOf(run.kind, trace, samples.support, told.confidence ?? told.rank);
    frames = strip(film, grid, move);
    const names = Object.keys(trace).filter((name) => name.startsWith("std."));
    const titles = Object.fromEntries((run.channels || []).map((channel) => [channel.name, channel.title]));
    const lines = [{ name: names.length ? "all channels" : "this sample", values: trace.std.data }, ...names.map((name) => ({ name: titles[name.slice(4)] || name.slice(4), values: trace[name].data }))];
    const critical = Number(metadata.critical);
    curve.show(trace.times.data, lines, Number.isFinite(critical) ? [{ time: critical, name: "critical" }] : []);
    slider.step = String(1 / (grid.length - 1));
    fill(
      parts.path,
      el("section", { class: "panel", "aria-label": "Path from noise to sample" },
        film.element, frames.element,
        el("div", { class: "player" }, play, slider, clock),
        el("h2", { class: "sub" }, "Uncertainty of the velocity over time"), curve.element,
        Number.isFinite(critical) && el("p", { class: "hint" }, `The uncertainty is largest at t = ${critical.toFixed(2)} (dotted line): there the sample is decided. `,
          el("button", { type: "button", class: "quiet small", on: { click: () => move(critical) } }, "Go there"))),
    );
    onTheme(film.element, () => {
      film.show(time);
      frames.paint();
    });
    editor = editPanel(studio, run, sample, Number.isFinite(critical) ? critical : 0.5, bar);
    fill(parts.edit, editor.element);
    move(1);
  }

  begin();
  return view;
}
