// The colours of confidence and of the theme, for canvases.
//
// Both scales run from doubtful to sure. They differ in hue (orange to blue) and in lightness, so they can be told apart
// with every common form of colour blindness. The light one is a slice of plasma, which the figures of the reports use.

const SCALES = {
  light: ["#fca636", "#f3854b", "#e26660", "#cd4a76", "#b42e8d", "#9613a1", "#7201a8", "#4b03a1", "#20068f"],
  dark: ["#e2661c", "#e57345", "#e48267", "#df9188", "#d7a0a9", "#cdb0c8", "#c3c1e3", "#bfd2f6", "#c8e4ff"],
};
export const LEVELS = 256;

const tables = Object.fromEntries(Object.entries(SCALES).map(([theme, stops]) => [theme, interpolate(stops)]));

function rgb(hex) {
  const value = parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function interpolate(stops) {
  const colours = stops.map(rgb);
  return Array.from({ length: LEVELS }, (_, i) => {
    const place = (i / (LEVELS - 1)) * (colours.length - 1);
    const low = Math.min(Math.floor(place), colours.length - 2);
    return colours[low].map((part, k) => Math.round(part + (colours[low + 1][k] - part) * (place - low)));
  });
}

/** Return `light` or `dark`: the theme that the page shows. */
export function theme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

const listeners = new Set();

/** Call `listener` when the theme changes, as long as `node` is part of the page. */
export function onTheme(node, listener) {
  if (!listeners.size) {
    const tell = () => {
      for (const one of listeners) one.node.isConnected ? one.listener() : listeners.delete(one);
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
    new MutationObserver(tell).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }
  listeners.add({ node, listener });
}

/** Return red, green and blue (0–255) of a confidence in [0, 1]. */
export function partsOf(level) {
  const place = Number.isFinite(level) ? Math.round(Math.min(1, Math.max(0, level)) * (LEVELS - 1)) : 0;
  return tables[theme()][place];
}

/** Return the CSS colour of a confidence in [0, 1]. */
export const colourOf = (level) => `rgb(${partsOf(level).join(" ")})`;

/** Return the scale as pixels for an image's 32-bit view. */
export function pixelScale() {
  return Uint32Array.from(tables[theme()], ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
}

/** Return the scale as a CSS gradient from doubtful to sure. */
export const gradient = () => `linear-gradient(90deg, ${SCALES[theme()].join(", ")})`;

let probe = null;

/** Return a colour of the theme (a CSS variable such as `--ink`) as red, green and blue. */
export function themeColour(name) {
  if (!probe) {
    probe = document.createElement("span");
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
}

/** Return a colour of the theme for a canvas. */
export const ink = (name) => `rgb(${themeColour(name).join(" ")})`;

/** Return a colour of the theme as one pixel of an image's 32-bit view. */
export function inkPixel(name) {
  const [r, g, b] = themeColour(name);
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}
