"use strict";
// The charts. Each takes the chosen runs, the width that it may take and the state of the menus, and returns an element,
// or null where there is nothing to draw. Scales, axes, legends and tips are Observable Plot's.

const GREY = "#8b929e";
const COLOURS = {
  measured: "#4269d0", "measured, per batch": "#6cc5b0", predicted: "#ff725c", published: "#3ca951",
  autoregressive: GREY, speculative: "#4269d0",
  drafting: "#efb118", verification: "#4269d0", "rest of the round": "#a463f2",
};
// What is drawn next to a figure where the runs differ in one axis.
const AROUND = {
  speedup: {
    measured: "speedup", "measured, per batch": "speedup_wall", predicted: "predicted/speedup", published: "published/speedup",
  },
};
// Predicted against measured: a kind has a name, a colour, and the keys of the prediction and of the measurement.
const OWN = "the run's own step times and acceptance";
const PAPER = "cost model at the paper's gamma and acceptance";
const STEPS = { T_T: "target_decode", T_D: "draft", T_V: "verify", "round time": "round" };
const COMPARED = {
  speedup: [
    [OWN, COLOURS.measured, "formula/speedup", "speedup"],
    ["cost model", COLOURS.predicted, "predicted/speedup", "speedup"],
    [PAPER, COLOURS.published, "published/predicted_speedup", "published/speedup"],
  ],
  "speedup per batch": [
    [OWN, COLOURS.measured, "formula/speedup_wall", "speedup_wall"],
    ["cost model", COLOURS.predicted, "predicted/speedup_wall", "speedup_wall"],
  ],
  ...Object.fromEntries(Object.entries(STEPS).map(([name, step]) =>
    [`${name}, ms`, [["cost model", COLOURS.predicted, `predicted/${step}_ms`, `time/${step}_ms`]]])),
};
const UNITS = ["ms per round", "vs autoregressive"];
const LOG_FROM = 10; // a range over this ratio is drawn on a logarithmic axis
const XY = { x: "x", y: "y" };

const isRatio = (key) => key.includes("speedup");
const has = (key) => (run) => get(key, run) != null;
const joined = (lines) => lines.filter(Boolean).join("\n");
const rotated = (width, number) => (width / number < 34 ? -60 : 0); // labels where they would overlap

function scaleOf(values) {
  const isWide = d3.min(values) > 0 && d3.max(values) / d3.min(values) > LOG_FROM;
  return isWide ? { type: "log", tickFormat: figure, ticks: 5 } : { tickFormat: figure, nice: true, ticks: 6 };
}

function plot(width, options) {
  const height = Math.round(Math.min(380, Math.max(260, width * 0.6)));
  const margins = { marginLeft: 54, marginBottom: 42, marginTop: 22 };
  return Plot.plot({ width, height, ...margins, grid: true, style: { fontSize: "11.5px" }, ...options });
}

// A chart with notes below it.
function noted(drawn, ...notes) {
  if (!drawn) return null;
  const box = document.createElement("div"), note = document.createElement("p");
  note.className = "note";
  note.textContent = notes.filter(Boolean).join(" ");
  box.append(drawn, note);
  return box;
}

// In what else runs differ, so that a median is not taken for one configuration's.
function mixed(runs, axes) {
  const others = data.settings.filter((k) => !axes.includes(k) && distinct(k, runs).length > 1);
  const more = others.length > 6 ? " and more" : "";
  return others.length ? `These runs also differ in ${others.slice(0, 6).join(", ")}${more}.` : "";
}

// Fixed colours of what has a name here; and a colour for each value of a setting, an ordered ramp for numbers.
const named = (names) =>
  ({ type: "ordinal", domain: names, range: names.map((n) => COLOURS[n] ?? COLOURS.measured), legend: names.length > 1 });

function colours(key, runs) {
  if (!key) return named(["speculative"]);
  const values = distinct(key, runs).map(shown), words = d3.schemeObservable10;
  const ramp = () => d3.quantize((t) => d3.interpolatePlasma(0.15 + 0.68 * t), Math.max(2, values.length));
  const [domain, range] = numeric(key) ? [values, ramp()] : [values.slice(0, words.length), words];
  return { type: "ordinal", domain, range, unknown: GREY, legend: values.length > 1 };
}

// Least and greatest value of a figure of a run over its repeats.
const ends = (key, run) => ["min", "max"].map((end) => get(`${key}_${end}`, run) ?? get(key, run));

// Lines over an axis: a series is { name, key, runs }. An interval is the range over runs and their repeats.
function lines(width, series, x, { color, label, rule, statistic = d3.median }) {
  const points = series.flatMap(({ name, key, runs }) =>
    d3.groups(runs.filter(has(key)).filter(has(x)), (r) => get(x, r)).map(([at, of]) => ({
      name, x: at, y: statistic(of.map((r) => get(key, r))), runs: count(of),
      low: d3.min(of, (r) => ends(key, r)[0]), high: d3.max(of, (r) => ends(key, r)[1]),
    })));
  if (!points.length) return null;
  const places = d3.sort(new Set(points.map((p) => p.x))), isNumber = typeof places[0] === "number";
  const every = Math.ceil((places.length * 46) / (width - 60)), ticks = places.filter((_, i) => i % every === 0);
  const title = (p) => joined([p.name, `${x}: ${shown(p.x)}`, `${label}: ${figure(p.y)}`,
    p.high > p.low && `from ${figure(p.low)} to ${figure(p.high)}`, p.runs > 1 && `${p.runs} runs`]);
  const bar = { x: "x", y1: "low", y2: "high", stroke: "name", strokeWidth: 4, strokeOpacity: 0.3, strokeLinecap: "round" };
  const aside = (i) => 4 * (i - (series.length - 1) / 2); // the intervals of several series lie side by side
  return plot(width, {
    x: isNumber ? { ...scaleOf(places), ticks, label: x, inset: 12 } : { type: "point", domain: places.map(String), label: x },
    y: { ...scaleOf(points.flatMap((p) => [p.low, p.high])), label },
    color,
    marks: [
      rule && Plot.ruleY([rule], { strokeOpacity: 0.5, strokeDasharray: "4 3" }),
      series.map(({ name }, i) => Plot.ruleX(points.filter((p) => p.name === name && p.high > p.low), { ...bar, dx: aside(i) })),
      isNumber && Plot.lineY(points, { ...XY, stroke: "name", strokeWidth: 2, sort: "x" }),
      Plot.dot(points, { ...XY, stroke: "name", fill: "var(--card)", strokeWidth: 2, r: 4.5 }),
      Plot.tip(points, Plot.pointer({ ...XY, title })),
    ].filter(Boolean),
  });
}

// A heat map where the runs differ in both axes, lines where they differ in one.
function overview(runs, width, { value: wanted, x, y, where, statistic }) {
  const value = [wanted, ...FIGURES].find((key) => runs.some(has(key)));
  if (!value) return null;
  $("value").value = value;
  const kind = value.startsWith("predicted/") ? "predicted" : value.startsWith("published/") ? "published" : "measured";
  const around = AROUND[value] ?? { [kind]: value }, found = runs.filter(has(value));
  const axes = [...new Set([x, y])].filter((k) => k && distinct(k, found).length > 1);
  if (!axes.length) return null;
  const of = { median: d3.median, best: d3.max, worst: d3.min }[statistic];
  if (axes.length > 1) return noted(heatmap(found, width, value, axes, of, where), mixed(found, axes));
  const series = Object.entries(around).map(([name, key]) => ({ name, key, runs })).filter(({ key }) => runs.some(has(key)));
  const color = { ...named(series.map((s) => s.name)), legend: true };
  const drawn = lines(width, series, axes[0], { statistic: of, color, label: value, rule: isRatio(value) ? 1 : 0 });
  return noted(drawn, mixed(found, axes), isRatio(value) && "Above the dashed line, speculation is faster.");
}

function heatmap(runs, width, value, [x, y], statistic, where) {
  const cells = d3.flatRollup(runs, (of) => of, (r) => get(x, r), (r) => get(y, r)).map(([cx, cy, of]) => {
    const values = of.map((r) => get(value, r)), [low, high] = d3.extent(values).map(figure);
    const median = (key) => d3.median(of, (r) => get(key, r)), one = value === "speedup" ? bothSpeedups(median) : figure(median(value));
    const text = joined([`${x}: ${shown(cx)}`, `${y}: ${shown(cy)}`, `${value}: median ${one}`,
      low !== high && `from ${low} to ${high}`, count(of) > 1 && `${count(of)} runs; click to see them alone`]);
    const href = address({ where: `${where} ${x}=${cx} ${y}=${cy}`.trim() });
    return { x: shown(cx), y: shown(cy), value: statistic(values), text, href };
  });
  const xs = distinct(x, runs).map(shown), ys = distinct(y, runs).map(shown).reverse();
  const marginLeft = 36 + 7 * d3.max(ys, (v) => v.length), room = width - marginLeft - 20;
  const ratio = isRatio(value), [low, high] = d3.extent(cells, (c) => c.value), reach = Math.max(1.2, high, 1 / low);
  // A speedup is good or bad by itself; of other figures one sees only which is larger.
  const strength = (v) => (ratio ? Math.abs(Math.log(v)) / Math.log(reach) : (v - low) / (high - low || 1));
  const text = (c) => (ratio ? c.value.toFixed(2) : figure(c.value)), fill = (c) => (strength(c.value) > 0.6 ? "white" : "#16181d");
  return plot(width, {
    marginLeft, height: Math.max(150, Math.min(380, 70 * ys.length + 60)), padding: 0.04, grid: false,
    x: { domain: xs, label: x, tickRotate: rotated(room, xs.length) },
    y: { domain: ys, label: y },
    color: ratio ? { type: "diverging-log", scheme: "RdBu", pivot: 1, domain: [1 / reach, reach] } : { scheme: "Blues", domain: [low, high] },
    marks: [
      Plot.cell(cells, { ...XY, fill: "value", href: "href", rx: 3 }),
      room / xs.length > 34 && Plot.text(cells, { ...XY, text, fill, pointerEvents: "none" }),
      Plot.tip(cells, Plot.pointer({ ...XY, title: "text" })),
    ].filter(Boolean),
  });
}

// Points of runs: those in one place become one dot, with all of them in `of`.
const merged = (points) =>
  d3.groups(points, (p) => [p.x.toPrecision(3), p.y.toPrecision(3), p.name].join()).map(([, of]) => ({ ...of[0], of }));
const crowded = (dots) => dots.some((p) => p.of.length > 1) && "Larger dots: several runs in one place.";
const titled = (dots, text) => Plot.tip(dots, Plot.pointer({ ...XY, title: (p) =>
  joined([get("id", p.run), text(p), label(p.run), p.of.length > 1 && `and ${p.of.length - 1} more in this place`]) }));

// Rings with a pale filling: of many, each can be seen.
function rings(dots, options) {
  const number = d3.sum(dots, (p) => p.of.length), size = number > 500 ? 2.5 : number > 60 ? 4 : 6;
  const r = (p) => size * Math.min(2, Math.sqrt(p.of.length));
  return Plot.dot(dots, { ...XY, r, fillOpacity: 0.35, strokeWidth: size / 4, strokeOpacity: 0.85, ...options });
}

function pareto(runs, width, { colour }) {
  const points = (way) => {
    const [latency, throughput] = [`${way}/time_per_output_token_ms`, `${way}/tokens_per_second`];
    return runs.filter((r) => get(latency, r) > 0 && get(throughput, r) > 0).map((r) =>
      ({ run: r, name: colour ? shown(get(colour, r)) : "speculative", x: get(latency, r), y: get(throughput, r) }));
  };
  const fast = points("speculative"), plain = points("autoregressive"), both = [...fast, ...plain];
  if (!both.length) return null;
  const front = (of, options) => { // the least latency first, then only what raises the throughput
    let best = -Infinity;
    const least = d3.sort(of, (p) => p.x, (p) => -p.y).filter((p) => p.y > best && ((best = p.y), true));
    return Plot.line(least, { ...XY, strokeWidth: 1.5, ...options });
  };
  const [dots, grey] = [merged(fast), merged(plain.map((p) => ({ ...p, name: "autoregressive" })))];
  const about = (p) => `${figure(p.x)} ms per token, ${figure(p.y)} tokens/s; ${bothSpeedups((k) => get(k, p.run))}`;
  const drawn = plot(width, {
    x: { ...scaleOf(both.map((p) => p.x)), label: "time per output token (TPOT), ms", inset: 8 },
    y: { ...scaleOf(both.map((p) => p.y)), label: "tokens/s", inset: 8 },
    r: { type: "identity" },
    color: colours(colour, fast.map((p) => p.run)),
    marks: [
      front(plain, { stroke: GREY, strokeDasharray: "5 4" }), front(fast),
      rings(grey, { stroke: GREY }), rings(dots, { stroke: "name", fill: "name" }), titled(dots, about),
    ],
  });
  return noted(drawn, "Grey rings: autoregressive. Lines: Pareto fronts (dashed: autoregressive);",
    "no run is both faster per token and higher in throughput.", crowded([...dots, ...grey]));
}

function acceptances(runs, width, { acceptance: key, along, curves }) {
  // Drawn acceptance is what one put in: there is nothing to see in it.
  const found = runs.filter((r) => get(key, r) != null && get(SOURCE, r) !== "synthetic"), by = curves !== along && curves;
  if (!along || distinct(along, found).length < 2) return null;
  const groups = d3.groups(found, (r) => (by ? shown(get(by, r)) : "measured"));
  const series = groups.map(([name, of]) => ({ name, key, runs: of }));
  const color = by ? colours(by, found) : named(["measured"]);
  return noted(lines(width, series, along, { color, label: key }), mixed(found, [along, by]));
}

function prediction(runs, width, { compared }) {
  const kinds = (COMPARED[compared] ?? []).flatMap(([kind, colour, predicted, measured]) => {
    const found = runs.filter((r) => get(predicted, r) > 0 && get(measured, r) > 0);
    const error = d3.median(found, (r) => Math.abs(get(predicted, r) / get(measured, r) - 1));
    const name = `${kind}: median error ${figure(100 * error)}%`;
    const points = found.map((r) => ({ name, run: r, x: get(measured, r), y: get(predicted, r), ends: ends(measured, r) }));
    return found.length ? [{ name, colour, points, source: measured.startsWith("published/") ? "published" : "measured" }] : [];
  });
  if (!kinds.length) return null;
  const points = d3.sort(kinds.flatMap((k) => k.points), (p) => p.run), dots = merged(points);
  const repeated = points.filter((p) => p.ends[1] > p.ends[0]), source = [...new Set(kinds.map((k) => k.source))].join(" or ");
  const values = points.flatMap((p) => [p.x, p.y]), [low, high] = [d3.min(values) * 0.95, d3.max(values) * 1.05];
  const axis = { ...scaleOf(values), nice: false, domain: [low, high] }, diagonal = d3.ticks(low, high, 40);
  const interval = { y: "y", x1: (p) => p.ends[0], x2: (p) => p.ends[1], stroke: "name", strokeOpacity: points.length > 60 ? 0.15 : 0.5 };
  const drawn = plot(width, {
    x: { ...axis, label: `${source} ${compared}` },
    y: { ...axis, label: `predicted ${compared}` },
    r: { type: "identity" },
    color: { type: "ordinal", domain: kinds.map((k) => k.name), range: kinds.map((k) => k.colour), legend: true },
    marks: [
      Plot.areaY([low, ...diagonal, high], { x: (v) => v, y1: (v) => v * 0.9, y2: (v) => v * 1.1, fillOpacity: 0.08, clip: true }),
      Plot.line([[low, low], [high, high]], { strokeOpacity: 0.5, strokeDasharray: "5 4" }),
      Plot.ruleY(repeated, { ...interval, clip: true }),
      rings(dots, { stroke: "name", fill: "name" }),
      titled(dots, (p) => `${source} ${figure(p.x)}, predicted ${figure(p.y)}`),
    ],
  });
  // Errors of steps cancel out in a speedup: both are shown.
  const off = (step) => d3.median(runs, (r) => Math.abs(get(`predicted/${step}_ms`, r) / get(`time/${step}_ms`, r) - 1));
  const errors = Object.entries(STEPS).map(([name, step]) => [name, off(step)]).filter(([, error]) => Number.isFinite(error));
  return noted(drawn, "On the dashed line a prediction is exact; the band is 10% wide on either side.",
    compared === "speedup" && errors.length &&
      `The cost model's median errors: ${errors.map(([name, error]) => `${name} ${figure(100 * error)}%`).join(", ")}.`,
    repeated.length && "Bars: spread over repeats.", crowded(dots));
}

// A round's parts in ms, measured (`time`) or `predicted`, or null. Drafting includes choosing entries.
function round(run, source) {
  const of = (name) => get(`${source}/${name}_ms`, run);
  const [whole, verify, rest, decode] = ["round", "verify", "overhead", "target_decode"].map(of);
  const tokens = source === "time" ? get("acceptance_length", run) * decode : get("predicted/speedup", run) * whole;
  if (![whole, verify, rest, tokens].every(Number.isFinite)) return null;
  const parts = { drafting: whole - verify - rest, verification: verify, "rest of the round": Math.max(0, rest) };
  const kind = source === "time" ? "measured" : "predicted";
  return { run, kind, parts, whole, tokens, decode, isImpossible: rest < -data.impossible * whole };
}

// The bars of a group of runs: those of the run in the middle, by how much its rounds gain.
function bars(group, runs, unit) {
  const [measured, predicted] = ["time", "predicted"].map((source) => runs.map((r) => round(r, source)).filter(Boolean));
  const rounds = d3.sort(measured.length ? measured : predicted, (b) => b.whole / b.tokens);
  const middle = rounds[(rounds.length - 1) >> 1];
  return [...measured, ...predicted].filter((b) => b.run === middle.run).map((b) => {
    const parts = Object.entries(b.parts).map(([part, ms]) => `${part}: ${figure(ms)} ms`);
    const title = joined([`${get("id", b.run)}, ${b.kind}`, rounds.length > 1 && `the one in the middle of ${rounds.length}`, ...parts,
      `the round: ${figure(b.whole)} ms`, `its tokens autoregressively: ${figure(b.tokens)} ms (T_T ${figure(b.decode)})`, label(b.run)]);
    return { ...b, group, title, number: rounds.length, impossible: d3.sum(measured, (m) => m.isImpossible), unit: unit === UNITS[0] ? 1 : b.tokens };
  });
}

function steps(runs, width, { bars: by, unit }) {
  const groups = d3.sort(d3.groups(runs, (r) => (by ? get(by, r) : "")), ([group]) => group);
  const all = groups.flatMap(([group, of]) => bars(shown(group), of, unit));
  if (!all.length) return null;
  const rows = all.flatMap((b) => Object.entries(b.parts).map(([part, ms]) => ({ ...b, part, length: ms / b.unit })));
  const parts = Object.keys(all[0].parts), kinds = [...new Set(all.map((b) => b.kind))].sort();
  const domain = [...new Set(all.map((b) => b.group))], at = { fx: "group", x: "kind" };
  const fillOpacity = (b) => (b.kind === "predicted" && kinds.length > 1 ? 0.5 : 1);
  const drawn = plot(Math.min(width, 80 + 220 * domain.length), {
    fx: { domain, label: by, padding: 0.15, tickRotate: rotated(width - 60, domain.length), axis: by ? "bottom" : null },
    x: { domain: kinds, axis: null, padding: 0.08 },
    y: { label: unit, tickFormat: figure, nice: true, ticks: 6 },
    color: named(parts),
    marks: [
      Plot.barY(rows, { ...at, y: "length", fill: "part", fillOpacity, order: parts, title: "title", tip: true }),
      Plot.tickY(all, { ...at, y: (b) => b.tokens / b.unit, strokeWidth: 3 }),
      Plot.ruleY([0]),
    ],
  });
  const impossible = d3.sum(d3.group(all, (b) => b.group).values(), ([b]) => b.impossible);
  return noted(drawn,
    kinds.length > 1 ? "Left: measured; right, fainter: predicted." : kinds[0] === "predicted" && "Predicted, not measured.",
    all.some((b) => b.number > 1) && "Each bar is the run in the middle, of those with this value.",
    "A round pays if its bar ends below the mark: what its tokens would take autoregressively.",
    impossible && `In ${impossible} run${impossible > 1 ? "s" : ""} the parts take longer than the whole round: measure again.`);
}

function underload(runs, width, { load, seen }) {
  const ways = ["autoregressive", "speculative"].map((name) => ({ name, key: `${name}/${seen}`, runs }));
  const series = ways.filter(({ key }) => runs.some(has(key)));
  return load && series.length ? lines(width, series, load, { color: named(series.map((s) => s.name)), label: seen }) : null;
}
