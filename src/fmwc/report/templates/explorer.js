// Draws the embedded data of the explorer on two canvases.
"use strict";
for (const root of document.querySelectorAll(".explorer")) {
  const data = JSON.parse(root.querySelector(".data").textContent);
  const find = (name) => root.querySelector(name);
  const board = find(".board"), curve = find(".curve"), slider = find(".keep"), hide = find(".hide-discarded");
  const INK = "#23262d", QUIET = "#5b616c", CELL = "#eef0f4", GONE = "#d3d6dd";
  const number = new Intl.NumberFormat("en");

  function unpack(text, Kind) {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Kind(bytes.buffer);
  }
  const { count, extent, times, stride, colours } = data;
  const points = unpack(data.points, Uint16Array), level = unpack(data.confidence, Uint16Array);
  const codes = unpack(data.curves, Uint8Array), steps = times.length;
  const beside = data.beside && unpack(data.beside, Uint16Array);
  const wrong = unpack(data.bad, Uint8Array);
  const wrongUpTo = new Uint32Array(count + 1); // misplaced among the first n samples, surest first
  for (let i = 0; i < count; i++) wrongUpTo[i + 1] = wrongUpTo[i] + wrong[i];

  const [low, high] = data.logRange;
  const std = (code) => Math.exp(low + (high - low) * code / 255);
  const curveOf = (i) => Array.from(codes.subarray(i / stride * steps, (i / stride + 1) * steps), std);
  const confidence = (i) => level[i] / 65535;
  const colour = (i) => colours[Math.round(confidence(i) * (colours.length - 1))];
  const percent = (part, whole) => (whole ? 100 * part / whole : 0).toFixed(1) + "%";
  find(".scale i").style.background = `linear-gradient(90deg, ${colours.join(",")})`;

  let kept = count, chosen = -1;

  function surface(canvas) { // return a context in CSS pixels, sharp on high-density screens
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    return [pen, width, height];
  }
  const toScreen = (v, size) => (v / 65535) * size;
  const place = (i, size) => [toScreen(points[2 * i], size), size - toScreen(points[2 * i + 1], size)];

  function dot(pen, i, size, radius) {
    const [px, py] = place(i, size);
    pen.moveTo(px + radius, py);
    pen.arc(px, py, radius, 0, 2 * Math.PI);
  }

  function drawBoard() {
    const [pen, size] = surface(board);
    const radius = Math.max(1.1, size / 300), cell = size / (2 * extent);
    pen.fillStyle = CELL;
    for (let row = 0; row < 4; row++)
      for (let column = row % 2; column < 4; column += 2)
        pen.fillRect(size / 2 + (row - 2) * cell, size / 2 - (column - 1) * cell, cell, cell);
    if (!hide.checked) {
      pen.fillStyle = GONE;
      pen.beginPath();
      for (let i = kept; i < count; i++) dot(pen, i, size, radius * 0.75);
      pen.fill();
    }
    pen.strokeStyle = INK;
    pen.lineWidth = 0.7;
    for (let i = 0; i < kept; i++) { // doubtful samples are drawn last, on top
      pen.fillStyle = colour(i);
      pen.beginPath();
      dot(pen, i, size, wrong[i] ? radius * 1.35 : radius);
      pen.fill();
      if (wrong[i]) pen.stroke();
    }
    if (chosen >= 0) {
      const [px, py] = place(chosen, size);
      pen.strokeStyle = "#fff";
      pen.lineWidth = 5;
      pen.beginPath();
      pen.arc(px, py, 9, 0, 2 * Math.PI);
      pen.stroke();
      pen.strokeStyle = INK;
      pen.lineWidth = 2;
      pen.stroke();
    }
  }

  // Medians of the two ends of the ranking, for comparison.
  function median(from, to) {
    const first = Math.ceil(from / stride), last = Math.max(first + 1, Math.floor(to / stride));
    return times.map((_, s) => {
      const column = [];
      for (let k = first; k < last && k * steps < codes.length; k++) column.push(codes[k * steps + s]);
      return std(column.sort((a, b) => a - b)[column.length >> 1]);
    });
  }
  const tenth = Math.max(stride, Math.round(count / 10));
  const ends = [
    { name: "surest 10%", values: median(0, tenth), colour: colours[colours.length - 1] },
    { name: "most doubtful 10%", values: median(count - tenth, count), colour: colours[0] },
  ];
  // A fixed scale that fits most samples.
  const usual = 1.5 * Math.max(...ends[0].values, ...ends[1].values);

  function drawCurve() {
    const [pen, width, height] = surface(curve);
    const selected = chosen >= 0 ? curveOf(chosen) : [];
    const top = Math.max(usual, 1.05 * Math.max(...selected));
    const left = 40, right = width - 12, foot = height - 24, head = 44;
    const px = (t) => left + t * (right - left), py = (v) => foot - (v / top) * (foot - head);
    pen.font = "12px system-ui, sans-serif";
    pen.strokeStyle = "#c4c8d0";
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(left, foot);
    pen.lineTo(right, foot);
    pen.stroke();
    pen.fillStyle = QUIET;
    pen.fillText("noise, t = 0", left, height - 7);
    pen.textAlign = "right";
    pen.fillText("t = 1, sample", right, height - 7);
    const mark = [5, 2, 1].map((m) => m * 10 ** Math.floor(Math.log10(top))).find((m) => m <= top);
    pen.fillText("0", left - 6, foot + 4);
    pen.fillText(String(+mark.toPrecision(1)), left - 6, py(mark) + 4);
    pen.fillRect(left - 3, py(mark), 3, 1);
    pen.textAlign = "left";
    pen.fillStyle = INK;
    pen.fillText("uncertainty of the velocity ‖σₜ‖", 2, 13);
    const trace = (values) => {
      pen.beginPath();
      values.forEach((v, s) => pen.lineTo(px(times[s]), py(v)));
      pen.stroke();
    };
    pen.setLineDash([4, 3]);
    pen.lineWidth = 1.4;
    let offset = 2;
    for (const end of ends) {
      pen.strokeStyle = pen.fillStyle = end.colour;
      trace(end.values);
      pen.fillText(end.name, offset, 32);
      offset += pen.measureText(end.name).width + 14;
    }
    pen.setLineDash([]);
    if (selected.length) {
      pen.lineWidth = 2.6;
      pen.strokeStyle = INK;
      trace(selected);
    }
  }

  function describe() {
    if (chosen < 0) return;
    const verdict = wrong[chosen] ? "misplaced" : "in a cell of the support";
    find(".detail").innerHTML = `<b>${data.label} ${confidence(chosen).toFixed(2)}</b>, ${verdict}<br>` +
      `Rank ${number.format(chosen + 1)} of ${number.format(count)} (1 = surest)` +
      (beside ? `<br>Variance rank: surer than ${percent(beside[chosen], 65535)} of the samples` : "");
  }

  let waiting = false;
  function redraw() { // at most once per frame
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawBoard();
      drawCurve();
      describe();
    });
  }

  function keep() {
    kept = Math.max(1, Math.round(count * slider.value / 100));
    const gone = count - kept, missed = wrongUpTo[count] - wrongUpTo[kept];
    find(".share").textContent = slider.value;
    slider.setAttribute("aria-valuetext", `${slider.value} percent`);
    const caught = gone ? ` Of the ${number.format(gone)} discarded, ${percent(missed, gone)} are misplaced.` : "";
    find(".outcome").innerHTML = `<b>${percent(wrongUpTo[kept], kept)}</b> of the ` +
      `<b>${number.format(kept)}</b> kept are misplaced (${percent(wrongUpTo[count], count)} of all).${caught}`;
    redraw();
  }

  function choose(event) { // the nearest visible sample with a curve
    const box = board.getBoundingClientRect(), size = box.width;
    const mx = event.clientX - box.left, my = event.clientY - box.top;
    let best = -1, nearest = 24 * 24;
    for (let i = 0; i < (hide.checked ? kept : count); i += stride) {
      const [px, py] = place(i, size), d = (px - mx) ** 2 + (py - my) ** 2;
      if (d < nearest) [best, nearest] = [i, d];
    }
    if (best >= 0 && best !== chosen) {
      chosen = best;
      redraw();
    }
  }

  const MOVES = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -100, PageUp: 100 };
  board.addEventListener("keydown", (event) => {
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    const last = Math.floor((count - 1) / stride);
    chosen = stride * Math.min(last, Math.max(0, Math.round(chosen / stride) - MOVES[event.key]));
    redraw();
  });
  board.addEventListener("pointermove", choose);
  board.addEventListener("pointerdown", choose);
  slider.addEventListener("input", keep);
  hide.addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(root);

  chosen = stride * Math.floor((count - 1) / stride); // the most doubtful sample
  keep();
}
