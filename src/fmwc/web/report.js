// The galleries of a report page, which contains their data.

import { Curve } from "./curve.js";
import { Gallery } from "./gallery.js";
import { samplesOf } from "./samples.js";
import { bytesOf, readTensors } from "./tensors.js";

const TITLES = { "": "this sample", type: "atom types", coord: "coordinates", lattice: "lattice" };

/** Return a function from a sample to its variance over time, with the medians of both ends of the ranking. */
function curvesOf({ times, stride, range: [low, high] }, tensors, ranking) {
  const names = Object.keys(tensors).filter((name) => name.startsWith("curve.")), steps = times.length;
  const std = (code) => Math.exp(low + ((high - low) * code) / 255);
  const row = (name, k) => Array.from(tensors[name].data.subarray(k * steps, (k + 1) * steps), std);
  const rows = tensors[names[0]].shape[0], tenth = Math.max(1, Math.round(rows / 10));
  const median = (from, to) =>
    times.map((_, s) => {
      const column = [];
      for (let k = from; k < to; k++) column.push(tensors[names[0]].data[k * steps + s]);
      return std(column.sort((a, b) => a - b)[column.length >> 1]);
    });
  const aside = names.length > 1 ? [] : [
    { name: "median of the surest 10 %", values: median(0, tenth), aside: true, colour: "--sure" },
    { name: "of the most doubtful 10 %", values: median(rows - tenth, rows), aside: true, colour: "--doubtful" },
  ];
  return (sample) => {
    const k = Math.min(rows - 1, Math.round(ranking().place[sample] / stride));
    return { times, lines: [...names.map((name) => ({ name: TITLES[name.slice(6)] || name.slice(6), values: row(name, k) })), ...aside] };
  };
}

for (const root of document.querySelectorAll(".gallery-root")) {
  const { about, table, tensors: packed } = JSON.parse(root.querySelector(".gallery-data").textContent);
  const { tensors } = readTensors(bytesOf(packed)), samples = samplesOf(about, tensors, table);
  let gallery = null;
  const ranking = () => (gallery ? gallery.ranking : { place: new Uint32Array(samples.count) });
  gallery = new Gallery(samples, {
    share: about.share,
    link: (sample) => about.links[sample] || "",
    ...(about.curves ? { plot: new Curve(), curve: curvesOf(about.curves, tensors, ranking) } : {}),
  });
  root.replaceChildren(gallery.element);
}
