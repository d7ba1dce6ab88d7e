// Build elements and format numbers. Text always becomes a text node, so data cannot inject markup.

/**
 * Return a new element.
 *
 * @param {string} tag
 * @param {Record<string, any>} [options] Attributes; `class`, `on` (listeners by event) and Boolean values are special.
 * @param {...(Node|string|number|null|undefined|false)} children Nodes, or text.
 * @returns {HTMLElement}
 */
export function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
  return node;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** Replace the children of an element. */
export function fill(node, ...children) {
  node.replaceChildren(...children.filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
  return node;
}

const whole = new Intl.NumberFormat("en");

/** Format a whole number with thousands separators. */
export const count = (value) => whole.format(value);

/** Format a share as a percentage; a dash if there is nothing to share. */
export const percent = (part, all, digits = 1) => (all ? `${((100 * part) / all).toFixed(digits)} %` : "—");

/** Format a number with `digits` significant digits; a dash if it is missing. */
export function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "—";
  if (typeof value !== "number") return String(value);
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return value.toExponential(digits - 1);
  return String(+value.toPrecision(digits)).replace("-", "−");
}

/** Format any value; yes or no for a Boolean. */
export const say = (value) => (value === true ? "yes" : value === false ? "no" : short(value));

/** Format a duration in words, such as "2 min 5 s". */
export function duration(seconds) {
  const all = Math.max(0, Math.round(seconds));
  if (all < 60) return `${all} s`;
  return all < 3600 ? `${Math.floor(all / 60)} min ${all % 60} s` : `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
}

/** Return a function that runs `task` at most once per frame. */
export function perFrame(task) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      task();
    });
  };
}

/** Whether the user asks for less motion. */
export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Copy text to the clipboard; return whether that worked. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** Return a button that copies text and says so. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "quiet small" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text)) ? "Copied" : "Select the text and copy it";
    setTimeout(() => (button.textContent = label), 1600);
  });
  return button;
}
