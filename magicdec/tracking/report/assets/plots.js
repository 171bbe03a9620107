"use strict";
// Drawing: from numbers to SVG text. Nothing here knows what a run is.

const COLOURS = ["#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e", "#97bbf5", "#9498a0"];
const WIDTH = 640, HEIGHT = 380, LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 44;
const LOG_FROM = 10; // a range over this ratio is drawn on a logarithmic axis

const escapeText = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const colourOf = (index) => COLOURS[index % COLOURS.length];

function figure(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

const median = (numbers) => {
  const sorted = [...numbers].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
};

// An axis over [low, high]: where a value lies, from 0 to 1, and where its ticks are.
function axis(values, includeZero = false) {
  let low = Infinity, high = -Infinity;
  for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
  const log = low > 0 && high / low > LOG_FROM;
  if (log) { low /= 1.1; high *= 1.1; } else {
    const margin = (high - low || Math.abs(high) || 1) * 0.06;
    low = includeZero || (low > 0 && low < high / 3) ? Math.min(0, low) : low - margin; high += margin;
  }
  const place = log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
  return { low, high, log, place, ticks: log ? logTicks(low, high) : ticks(low, high) };
}

function ticks(low, high) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(10)));
  return found;
}

function logTicks(low, high) {
  const found = [], steps = high / low > 1000 ? [1] : [1, 2, 5];
  for (let p = Math.floor(Math.log10(low)); 10 ** p <= high; p++)
    for (const s of steps) if (s * 10 ** p >= low && s * 10 ** p <= high) found.push(Number((s * 10 ** p).toPrecision(10)));
  return found;
}

// Points, lines and bands in one frame. Thousands of points are one path per colour: that is what keeps it fast.
function chart({ label, xName, yName, x, y, dots = [], lines = [], band = "" }) {
  const px = (v) => LEFT + x.place(v) * (WIDTH - LEFT - RIGHT), py = (v) => HEIGHT - BOTTOM - y.place(v) * (HEIGHT - TOP - BOTTOM);
  const at = (p) => `${px(p[0]).toFixed(1)} ${py(p[1]).toFixed(1)}`;
  let svg = `<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="${escapeText(label)}">`;
  for (const t of x.ticks) svg += `<path class="grid" d="M${px(t).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}"/><text x="${px(t)}" y="${HEIGHT - BOTTOM + 16}" text-anchor="middle">${figure(t)}</text>`;
  for (const t of y.ticks) svg += `<path class="grid" d="M${LEFT} ${py(t).toFixed(1)}H${WIDTH - RIGHT}"/><text x="${LEFT - 7}" y="${py(t) + 4}" text-anchor="end">${figure(t)}</text>`;
  if (band) svg += `<path class="band" d="${band.map((p, i) => (i ? "L" : "M") + at(p)).join("")}Z"/>`;
  for (const d of dots) svg += `<path class="dots" data-points="${d.points.length}" stroke="${d.colour}" stroke-width="${d.size || 5}" d="${d.points.map((p) => `M${at(p)}h0`).join("")}"/>`;
  for (const l of lines) svg += `<path class="front" stroke="${l.colour}" ${l.dashed ? 'stroke-dasharray="5 4"' : ""} d="${l.points.map((p, i) => (i ? "L" : "M") + at(p)).join("")}"/>`;
  svg += `<text class="name" x="${(LEFT + WIDTH - RIGHT) / 2}" y="${HEIGHT - 8}" text-anchor="middle">${escapeText(xName)}</text>`;
  svg += `<text class="name" transform="translate(14 ${(HEIGHT - BOTTOM + TOP) / 2}) rotate(-90)" text-anchor="middle">${escapeText(yName)}</text>`;
  return { svg: svg + "</svg>", px, py };
}

// A bar per name, of parts on top of each other, and a mark across it: `bars` are { name, parts: [[value, colour]], mark, tip }.
function stacks({ label, xName, yName, bars }) {
  const sum = (parts) => parts.reduce((total, [value]) => total + value, 0);
  const high = 1.06 * Math.max(...bars.map((b) => Math.max(sum(b.parts), b.mark || 0))), w = (WIDTH - LEFT - RIGHT) / bars.length, every = Math.ceil(bars.length / 14);
  const py = (v) => HEIGHT - BOTTOM - (v / high) * (HEIGHT - TOP - BOTTOM);
  let svg = `<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="${escapeText(label)}">`;
  for (const t of ticks(0, high)) svg += `<path class="grid" d="M${LEFT} ${py(t).toFixed(1)}H${WIDTH - RIGHT}"/><text x="${LEFT - 7}" y="${py(t) + 4}" text-anchor="end">${figure(t)}</text>`;
  bars.forEach(({ name, parts, mark, tip }, i) => {
    const x = LEFT + (i + 0.15) * w;
    let below = 0;
    svg += `<g><title>${escapeText(tip)}</title>`;
    for (const [value, colour] of parts) {
      svg += `<rect class="part" x="${x.toFixed(1)}" y="${py(below + value).toFixed(1)}" width="${(0.7 * w).toFixed(1)}" height="${(py(below) - py(below + value)).toFixed(1)}" fill="${colour}"/>`;
      below += value;
    }
    if (mark) svg += `<path class="mark-line" d="M${(x - 0.1 * w).toFixed(1)} ${py(mark).toFixed(1)}h${(0.9 * w).toFixed(1)}"/>`;
    svg += `</g>${i % every ? "" : `<text x="${LEFT + (i + 0.5) * w}" y="${HEIGHT - BOTTOM + 16}" text-anchor="middle">${escapeText(figure(name))}</text>`}`;
  });
  svg += `<text class="name" x="${(LEFT + WIDTH - RIGHT) / 2}" y="${HEIGHT - 8}" text-anchor="middle">${escapeText(xName)}</text>`;
  return svg + `<text class="name" transform="translate(14 ${(HEIGHT - BOTTOM + TOP) / 2}) rotate(-90)" text-anchor="middle">${escapeText(yName)}</text></svg>`;
}

const legend = (entries) => `<div class="legend">${entries.map(([name, colour]) => `<span><i style="background:${colour}"></i>${escapeText(name)}</span>`).join("")}</div>`;

// Blue above the middle, orange below, pale between: `t` from -1 to 1.
function shade(t) {
  const [to, from] = [t < 0 ? [204, 85, 0] : [24, 92, 190], [240, 240, 238]], s = Math.min(1, Math.abs(t));
  const rgb = from.map((c, i) => Math.round(c + (to[i] - c) * s));
  return { fill: `rgb(${rgb})`, text: rgb[0] * 0.3 + rgb[1] * 0.59 + rgb[2] * 0.11 > 140 ? "#16181d" : "#ffffff" };
}

// `cells` maps "row,column" to a value; `tone` places a value from -1 to 1, `text` writes it.
function heatmap({ label, xName, yName, xs, ys, cells, tone, text: write }) {
  const left = 30 + 7 * Math.max(4, ...ys.map((v) => figure(v).length)), height = Math.max(120, Math.min(HEIGHT - BOTTOM, 76 * ys.length)) + BOTTOM + 6;
  const w = (WIDTH - left - RIGHT) / xs.length, h = (height - BOTTOM - 6) / ys.length;
  let svg = `<svg viewBox="0 0 ${WIDTH} ${height}" role="img" aria-label="${escapeText(label)}">`;
  ys.forEach((name, j) => { svg += `<text x="${left - 7}" y="${6 + (j + 0.5) * h + 4}" text-anchor="end">${escapeText(figure(name))}</text>`; });
  xs.forEach((name, i) => { svg += `<text x="${left + (i + 0.5) * w}" y="${height - BOTTOM + 16}" text-anchor="middle">${escapeText(figure(name))}</text>`; });
  for (const [place, value] of cells) {
    const [j, i] = place.split(",").map(Number), { fill, text } = shade(tone(value));
    svg += `<rect class="cell" data-cell="${place}" x="${left + i * w + 1}" y="${6 + j * h + 1}" width="${w - 2}" height="${h - 2}" rx="3" fill="${fill}"/>`;
    if (w > 34) svg += `<text x="${left + (i + 0.5) * w}" y="${6 + (j + 0.5) * h + 4}" text-anchor="middle" style="fill:${text};pointer-events:none">${write(value)}</text>`;
  }
  svg += `<text class="name" x="${(left + WIDTH - RIGHT) / 2}" y="${height - 8}" text-anchor="middle">${escapeText(xName)}</text>`;
  return svg + `<text class="name" transform="translate(13 ${(height - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">${escapeText(yName)}</text></svg>`;
}
