// The frame of the studio: header, list of models and runs, keyboard shortcuts, and which view is shown.

import { theme } from "../colour.js";
import { el, fill } from "../dom.js";
import { address } from "./api.js";
import { drawView } from "./draw.js";
import { runView } from "./run.js";
import { sampleView } from "./sample.js";
import { startView } from "./start.js";
import { stateOf, store } from "./store.js";

const VIEWS = { "": startView, draw: drawView, run: runView, sample: sampleView };
const SHORTCUTS = [
  ["← → ↑ ↓", "move through the gallery; in a sample: previous and next sample, surest first"],
  ["Enter", "open the selected sample"],
  ["Esc", "go back, or close a window"],
  ["[ and ]", "keep one percent less or more"],
  ["/", "find by text"],
  [", and .", "move the time cursor one step"],
  ["Space", "play or stop the path of a sample"],
  ["e", "export"],
  ["d", "draw with this model"],
  ["t", "switch between light and dark"],
  ["?", "show this list"],
];

const main = document.getElementById("main"), rail = document.getElementById("rail"), dialog = document.getElementById("dialog");
let view = null, shown = null;

/** Open a view, such as `run/ID`. */
function go(path) {
  location.hash = address(path);
}

/** Show a window with a title. */
function open(title, ...parts) {
  const close = el("button", { type: "button", class: "quiet small", "aria-label": "Close", on: { click: () => dialog.close() } }, "✕");
  fill(dialog, el("div", { class: "dialog-head" }, el("h2", { id: "dialog-title" }, title), close), ...parts);
  if (!dialog.open) dialog.showModal();
}

const studio = { go, open, close: () => dialog.open && dialog.close() };

function route() {
  const path = new URLSearchParams(location.hash.slice(1)).get("view") || "";
  if (path === shown || !store.ready) return;
  const [name, ...rest] = path.split("/");
  if (view && view.close) view.close();
  dialog.open && dialog.close();
  shown = path;
  view = (VIEWS[name] || startView)(studio, ...rest);
  fill(main, view.element);
  document.title = `${view.title} · fmwc studio`;
  window.scrollTo(0, 0);
  rail.classList.remove("open");
  drawRail();
  if (document.activeElement === document.body || !document.activeElement.isConnected) main.focus({ preventScroll: true });
}

// ---- header and list ---------------------------------------------------------------------------------------------------

function drawTop() {
  const menu = el("button", { type: "button", class: "quiet small menu", "aria-controls": "rail", "aria-expanded": "false" }, "Menu");
  menu.addEventListener("click", () => menu.setAttribute("aria-expanded", String(rail.classList.toggle("open"))));
  const problem = el("p", { class: "offline", role: "status" });
  store.addEventListener("connection", () => fill(problem, store.problem));
  fill(
    document.getElementById("top"),
    menu,
    el("a", { class: "brand", href: address(""), "aria-label": "fmwc studio, start" }, el("b", {}, "fmwc"), " studio"),
    problem,
    el("span", { class: "spring" }),
    el("button", { type: "button", class: "quiet small", "aria-label": "Switch between light and dark", on: { click: switchTheme } }, "◐"),
    el("button", { type: "button", class: "quiet small", "aria-label": "Keyboard shortcuts", on: { click: help } }, "?"),
  );
}

function drawRail() {
  const link = (path, ...parts) => el("a", { href: address(path), "aria-current": shown === path || (shown && shown.split("/")[1] === path.split("/")[1]) ? "page" : null }, ...parts);
  const drawn = store.runs.filter((run) => !run.parent);
  fill(
    rail,
    el("h2", {}, "Draw"),
    el("ul", {}, ...store.fields.map((field) => el("li", {}, link(`draw/${field.name}`, field.title)))),
    el("h2", {}, "Runs"),
    drawn.length ? el("ul", { class: "runs" }, ...drawn.map((run) => el("li", {}, link(`run/${run.id}`, run.title, el("small", {}, stateOf(run)))))) : el("p", { class: "hint" }, "Nothing drawn yet."),
  );
}

function switchTheme() {
  const next = theme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("fmwc-theme", next);
}

function help() {
  open("Keyboard shortcuts", el("dl", { class: "keys" }, ...SHORTCUTS.flatMap(([key, text]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)])));
}

// ---- keyboard ------------------------------------------------------------------------------------------------------------

function press(event) {
  const typing = event.target.closest("input:not([type=range]):not([type=checkbox]), textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || dialog.open || event.defaultPrevented) return;
  const general = { "?": help, t: switchTheme, "/": () => (document.getElementById("search") || {}).focus?.() };
  const act = (view && view.keys && view.keys[event.key]) || general[event.key];
  if (!act) return;
  if (event.key === " " && event.target.closest("button, a, summary")) return;
  if (event.key.startsWith("Arrow") && event.target.closest("input, .stage")) return;
  event.preventDefault();
  act();
}

function begin() {
  const chosen = localStorage.getItem("fmwc-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  drawTop();
  window.addEventListener("hashchange", route);
  document.addEventListener("keydown", press);
  fill(main, el("p", { class: "hint" }, "Connecting …"));
  store.addEventListener("connection", () => !store.ready && store.problem && fill(main, el("h1", {}, "No connection"), el("p", { role: "alert" }, store.problem)));
  store.addEventListener("state", () => {
    const path = new URLSearchParams(location.hash.slice(1)).get("view");
    if (path === null && store.start) return go(store.run(store.start) ? `run/${store.start}` : `draw/${store.start}`);
    drawRail();
    return route();
  });
  for (const name of ["run", "job", "removed"]) store.addEventListener(name, drawRail);
  store.follow();
}

begin();
