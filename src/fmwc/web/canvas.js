// Canvases that are sharp on every screen.

/**
 * Return a context in CSS pixels, cleared, and the size of the canvas.
 *
 * @param {HTMLCanvasElement} canvas
 * @returns {[CanvasRenderingContext2D, number, number]}
 */
export function surface(canvas) {
  const scale = fit(canvas);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  const width = canvas.width / scale, height = canvas.height / scale;
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${getComputedStyle(canvas).fontFamily}`;
  pen.lineJoin = "round";
  return [pen, width, height];
}

/** Match the pixels of a canvas to its size on the screen; return the pixels per CSS pixel. */
export function fit(canvas) {
  const scale = Math.min(2, window.devicePixelRatio || 1);
  const width = Math.max(1, Math.round(canvas.clientWidth * scale));
  const height = Math.max(1, Math.round(canvas.clientHeight * scale));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  return scale;
}
