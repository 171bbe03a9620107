"use strict";
// The page: which runs are looked at, and what is drawn of them. Its state is the address (after the #), to be shared.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const columns = Object.fromEntries(Object.entries(data.columns).map(([key, c]) =>
  [key, c.values || (c.words ? c.indices.map((i) => c.words[i]) : new Array(data.number).fill(c.constant))]));
const all = Array.from({ length: data.number }, (_, i) => i);
const get = (key, run) => (columns[key] ? columns[key][run] : undefined);
const numeric = (key) => columns[key]?.some((v) => typeof v === "number");
const label = (run) => data.settings.filter((k) => get(k, run) != null).map((k) => `${k}=${get(k, run)}`).join("\n");

const TPS = "speculative/tokens_per_second", TPOT = "speculative/time_per_output_token_ms", SOURCE = "acceptance/source";
const FIGURES = ["speedup", "speedup_wall", "acceptance_rate", "acceptance_length", "alpha", TPS, TPOT, "speculative/time_to_first_token_ms",
  "formula/speedup", "predicted/speedup", "published/speedup", "published/predicted_speedup", "memory/peak_gib"].filter((k) => numeric(k));
const LOADS = ["load.concurrency", "load.rate"].filter((k) => numeric(k));
const SEEN = ["tokens_per_second", "time_to_first_token_ms", "time_per_output_token_ms", "request_latency_ms", "goodput_rps"].filter((k) => numeric(`autoregressive/${k}`));
const MAX_PICKS = 9, MAX_VALUES = 40, MAX_LINES = 100;
const numValues = (key) => new Set(columns[key]?.filter((v) => v != null)).size;
const picked = [SOURCE, ...data.settings, "device"].filter((k) => numValues(k) > 1 && numValues(k) <= MAX_VALUES).slice(0, MAX_PICKS);
const axes = data.settings.filter((k) => numValues(k) <= MAX_VALUES);
const first = (...keys) => keys.find((k) => axes.includes(k));
const y0 = first("batch.context_len", "cache.budget") || axes[0] || "";

const state = { where: "", statistic: "median", value: FIGURES[0] || "", y: y0, x: first("batch.size", "draft.gamma") || axes.find((k) => k !== y0) || y0,
  colour: first("cache.policy", "draft.name", "target.name") || axes[0] || "", acceptance: "acceptance_rate", sort: "-speedup",
  seen: SEEN[0] || "", load: LOADS[0] || "", bars: first("batch.size", "batch.context_len") || axes[0] || "", along: first("cache.budget", "draft.gamma") || axes[0] || "", curves: first("cache.policy", "draft.name", "target.name", "draft.gamma") || "" };
// Measured and drawn acceptance never mix unless one asks for it.
const noPicks = { ...Object.fromEntries(picked.map((k) => [`pick:${k}`, ""])), ...(numValues(SOURCE) > 1 && { [`pick:${SOURCE}`]: "measured" }) };
Object.assign(state, noPicks);
for (const [key, value] of new URLSearchParams(location.hash.slice(1))) state[key] = value;

const distinct = (key, runs) => [...new Set(runs.map((r) => get(key, r)))].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a) < String(b) ? -1 : 1));

// The same questions as on the terminal: KEY=VALUE and so on, several, separated by blanks.
function tests(text) {
  return text.split(/\s+/).filter(Boolean).map((test) => {
    const parts = test.match(/^(.+?)(!=|>=|<=|=|>|<|~)(.*)$/);
    if (!parts) throw Error(`${test}: not of the form KEY=VALUE, or with != > >= < <= ~`);
    const [, name, sign, wanted] = parts, keys = Object.keys(columns);
    const ends = keys.filter((k) => k === name || k.endsWith("." + name) || k.endsWith("/" + name));
    const key = keys.includes(name) ? name : ends.length === 1 ? ends[0] : null;
    if (!key) throw Error(ends.length ? `${name}: which one? ${ends.join(", ")}` : `${name}: the runs do not differ in it, or have no such key`);
    const number = wanted === "" ? NaN : Number(wanted), words = (v) => String(v ?? "null").toLowerCase();
    const same = (v) => (typeof v === "number" && !isNaN(number) ? v === number : words(v) === wanted.toLowerCase());
    const order = { ">": (v) => v > number, ">=": (v) => v >= number, "<": (v) => v < number, "<=": (v) => v <= number }[sign];
    if (order) return (run) => typeof get(key, run) === "number" && order(get(key, run));
    return { "=": (run) => same(get(key, run)), "!=": (run) => !same(get(key, run)), "~": (run) => words(get(key, run)).includes(wanted) }[sign];
  });
}

function chosen() {
  $("mistake").textContent = "";
  let wanted = [];
  try { wanted = tests(state.where); } catch (error) { $("mistake").textContent = error.message; }
  $("where").classList.toggle("wrong", $("mistake").textContent !== "");
  const picks = picked.filter((k) => state[`pick:${k}`]);
  // Runs that failed have no source of acceptance: they stay, to be counted.
  const holds = (run, k) => String(get(k, run)) === state[`pick:${k}`] || (k === SOURCE && get(k, run) == null);
  return all.filter((run) => wanted.every((test) => test(run)) && picks.every((k) => holds(run, k)));
}

function drawTiles(runs, done) {
  const count = (test) => done.filter(test).length, speedups = done.map((r) => get("speedup", r)).filter((v) => v != null);
  const best = speedups.reduce((a, b) => Math.max(a, b), 0), failed = runs.filter((r) => get("status", r) === "failed").length;
  const tiles = [[`${runs.length.toLocaleString("en")} of ${data.number.toLocaleString("en")}`, "runs"]];
  if (speedups.length) tiles.push([best.toFixed(2) + "x", "best speedup"], [median(speedups).toFixed(2) + "x", "median speedup"],
    [Math.round((100 * speedups.filter((v) => v > 1).length) / speedups.length) + "%", "faster than autoregressive"]);
  const warn = [[failed, "failed"], [count((r) => get("speedup_spread", r) > data.noisy), "noisy (spread over 10%)"], [count((r) => get("gpu_trouble", r)), "GPU throttled or shared"],
    [count((r) => get("lossless/identical", r) === false), "not identical to autoregressive"], [count((r) => get(SOURCE, r) === "synthetic"), "synthetic acceptance"]];
  $("tiles").innerHTML = tiles.map(([b, s]) => `<div><b>${b}</b><span>${s}</span></div>`).join("") +
    warn.filter(([n]) => n).map(([n, s]) => `<div class="warn"><b>${n.toLocaleString("en")}</b><span>${s}</span></div>`).join("");
}

const nothing = (what) => `<p>${what}</p>`;

function drawHeatmap(done) {
  const runs = done.filter((r) => get(state.value, r) != null), groups = new Map(), cells = new Map();
  const xs = distinct(state.x, runs), ys = distinct(state.y, runs).reverse(), column = new Map(xs.map((v, i) => [v, i])), row = new Map(ys.map((v, j) => [v, j]));
  for (const r of runs) {
    const place = `${row.get(get(state.y, r))},${column.get(get(state.x, r))}`;
    (groups.get(place) || groups.set(place, []).get(place)).push(get(state.value, r));
  }
  if (!groups.size || !state.x) return ($("heatmap").innerHTML = nothing("no two settings differ, or no such figure"));
  const statistic = { median, best: (v) => Math.max(...v), worst: (v) => Math.min(...v) }[state.statistic];
  for (const [place, values] of groups) cells.set(place, statistic(values));
  // A speedup is good or bad by itself; of other figures one sees only which is larger.
  const ratio = state.value.includes("speedup"), values = [...cells.values()], low = Math.min(...values), high = Math.max(...values);
  const reach = Math.max(Math.log(1.2), ...values.map((v) => Math.abs(Math.log(v))));
  const tone = ratio ? (v) => Math.log(v) / reach : (v) => 0.05 + (0.95 * (v - low)) / (high - low || 1);
  $("heatmap").innerHTML = heatmap({ label: `${state.value} by ${state.y} and ${state.x}`, xName: state.x, yName: state.y, xs, ys, cells, tone, text: ratio ? (v) => v.toFixed(2) : figure });
  $("heatmap").querySelectorAll(".cell").forEach((cell) => {
    const place = cell.dataset.cell, [j, i] = place.split(",").map(Number), of = groups.get(place);
    cell.onmousemove = (e) => tip(e, `${state.y}=${ys[j]}\n${state.x}=${xs[i]}\n${state.value}: median ${figure(median(of))}, ${figure(Math.min(...of))} to ${figure(Math.max(...of))}\n${of.length} runs; click to look at them alone`);
    cell.onmouseleave = () => tip();
    cell.onclick = () => { tip(); set({ where: `${state.where} ${state.y}=${ys[j]} ${state.x}=${xs[i]}`.trim() }); };
  });
}

function front(points) { // the least latency first, then only what raises the throughput
  let best = -Infinity;
  return [...points].sort((a, b) => a[0] - b[0] || b[1] - a[1]).filter((p) => p[1] > best && ((best = p[1]), true));
}

function byColour(runs, key) {
  const values = distinct(key, runs);
  return values.map((v, i) => [v, i >= COLOURS.length ? "#9498a0" : colourOf(i), runs.filter((r) => get(key, r) === v)]);
}

function drawPareto(done) {
  const points = (way, runs) => runs.filter((r) => get(`${way}/tokens_per_second`, r) != null && get(`${way}/time_per_output_token_ms`, r) > 0)
    .map((r) => [get(`${way}/time_per_output_token_ms`, r), get(`${way}/tokens_per_second`, r), r]);
  const fast = points("speculative", done), plain = points("autoregressive", done), both = [...fast, ...plain];
  if (!both.length) return ($("pareto").innerHTML = nothing("no run has these figures"));
  const groups = byColour(fast.map((p) => p[2]), state.colour).map(([v, colour, runs]) => [v, colour, points("speculative", runs)]);
  const grey = "#9498a0", x = axis(both.map((p) => p[0])), y = axis(both.map((p) => p[1]));
  const drawn = chart({ label: "throughput against latency", xName: "time per output token (TPOT), ms", yName: "tokens/s", x, y,
    dots: [{ points: plain, colour: grey, size: 4 }, ...groups.map(([, colour, points]) => ({ points, colour }))],
    lines: [{ points: front(plain), colour: grey, dashed: true }, { points: front(fast), colour: "var(--text)" }] });
  $("pareto").innerHTML = drawn.svg + legend([...groups.map(([v, c]) => [`${state.colour}=${v ?? "null"}`, c]), ["autoregressive", grey], ["speculative front", "var(--text)"]]);
  hover($("pareto"), drawn, fast, (p) => `${get("id", p[2])}\n${figure(p[0])} ms per token, ${figure(p[1])} tokens/s, ${figure(get("speedup", p[2]))}x\n${label(p[2])}`);
}

function drawAcceptance(done) {
  // Drawn acceptance is what one put in: there is nothing to see in it.
  const runs = done.filter((r) => get(state.acceptance, r) != null && get(SOURCE, r) !== "synthetic" && typeof get(state.along, r) === "number");
  if (!runs.length) return ($("acceptances").innerHTML = nothing("no run has a measured acceptance over this axis"));
  const groups = byColour(runs, state.curves).map(([v, colour, of]) => [v, colour, distinct(state.along, of).map((at) =>
    [at, median(of.filter((r) => get(state.along, r) === at).map((r) => get(state.acceptance, r)))])]);
  const points = groups.flatMap(([v, , line]) => line.map((p) => [...p, v]));
  const drawn = chart({ label: "acceptance curves", xName: state.along, yName: `median ${state.acceptance}`, x: axis(points.map((p) => p[0])), y: axis(points.map((p) => p[1])),
    dots: groups.map(([, colour, points]) => ({ points, colour, size: 8 })), lines: groups.map(([, colour, points]) => ({ points, colour })) });
  $("acceptances").innerHTML = drawn.svg + legend(groups.map(([v, c]) => [`${state.curves}=${v ?? "null"}`, c]));
  hover($("acceptances"), drawn, points, (p) => `${state.curves}=${p[2]}\n${state.along}=${p[0]}\n${state.acceptance} ${figure(p[1])}`);
}

function drawPrediction(done) {
  const kinds = [["formula/speedup", "speedup", colourOf(0)], ["predicted/speedup", "speedup", colourOf(2)], ["published/predicted_speedup", "published/speedup", colourOf(3)]].map(([key, measured, colour]) =>
    [key, colour, done.filter((r) => get(key, r) > 0 && get(measured, r) > 0).map((r) => [get(measured, r), get(key, r), r])]).filter((k) => k[2].length);
  const points = kinds.flatMap((k) => k[2]);
  if (!points.length) return ($("prediction").innerHTML = nothing("no run has a measured (or published) speedup and a predicted one"));
  const both = axis(points.flatMap((p) => [p[0], p[1]])), { low, high } = both, least = Math.max(low, both.log ? low : 1e-9);
  const clip = (v) => Math.min(high, Math.max(low, v)), steps = Array.from({ length: 41 }, (_, i) => least + ((high - least) * i) / 40);
  const band = [...steps.map((v) => [v, clip(v * 1.1)]), ...steps.reverse().map((v) => [v, clip(v * 0.9)])];
  const drawn = chart({ label: "predicted against measured speedup", xName: "measured speedup", yName: "predicted speedup", x: both, y: both, band,
    dots: kinds.map(([, colour, points]) => ({ points, colour })), lines: [{ points: [[low, low], [high, high]], colour: "#9498a0", dashed: true }] });
  const error = (of) => figure(100 * median(of.map((p) => Math.abs(p[1] / p[0] - 1))));
  $("prediction").innerHTML = drawn.svg + legend(kinds.map(([key, c, of]) => [`${key}, median error ${error(of)}%`, c]));
  hover($("prediction"), drawn, points, (p) => `${get("id", p[2])}\nmeasured ${figure(p[0])}x, predicted ${figure(p[1])}x\n${label(p[2])}`);
}

// The parts of a round, in ms: measured where it was, or else predicted.
const stepOf = (name, r) => get(`${isMeasured(r) ? "time" : "predicted"}/${name}_ms`, r);
const isMeasured = (r) => get("time/target_decode_ms", r) != null;
const gammaOf = (r) => (isMeasured(r) ? get("gamma", r) ?? get("draft.gamma", r) : get("predicted/gamma", r));
const lengthOf = (r) => { // of a round, in tokens: measured, or Omega
  if (isMeasured(r)) return get("acceptance_length", r);
  const alpha = get("predicted/alpha", r), gamma = gammaOf(r);
  return alpha == null ? null : alpha === 1 ? gamma + 1 : (1 - alpha ** (gamma + 1)) / (1 - alpha);
};
const PARTS = [["gamma draft steps, T_D each", colourOf(1), (r) => gammaOf(r) * stepOf("draft", r)],
  ["selection of entries", colourOf(3), (r) => stepOf("select", r) ?? 0], ["verification, T_V", colourOf(0), (r) => stepOf("verify", r)]];

function drawSteps(done) {
  const runs = done.filter((r) => PARTS.every(([, , of]) => of(r) >= 0) && stepOf("target_decode", r) > 0);
  if (!runs.length || !state.bars) return ($("steps").innerHTML = nothing("no run has step times, or no two settings differ"));
  const predicted = (of) => of.filter((r) => !isMeasured(r)).length;
  const middle = (of, among) => { const found = among.map(of).filter((v) => v != null); return found.length ? median(found) : null; };
  const bars = distinct(state.bars, runs).map((name) => {
    const of = runs.filter((r) => get(state.bars, r) === name), parts = PARTS.map(([, colour, part]) => [middle(part, of), colour]);
    const mark = middle((r) => { const length = lengthOf(r); return length && length * stepOf("target_decode", r); }, of);
    const lines = [...PARTS.map(([part], i) => `${part}: ${figure(parts[i][0])} ms`), `T_T: ${figure(middle((r) => stepOf("target_decode", r), of))} ms`, `${of.length} runs, ${predicted(of)} of them predicted`];
    return { name, parts, mark, tip: [`${state.bars}=${name}`, ...lines].join("\n") };
  });
  $("steps").innerHTML = stacks({ label: "where a round's time goes", xName: state.bars, yName: "ms per round", bars }) +
    legend([...PARTS.map(([name, colour]) => [name, colour]), ["acceptance length x T_T", "var(--text)"]]) +
    (predicted(runs) ? `<p class="note">${predicted(runs)} of ${runs.length} runs are predicted, not measured</p>` : "");
}

function drawLoad(done) {
  const ways = [["autoregressive", "#9498a0"], ["speculative", colourOf(0)]].map(([way, colour]) => {
    const key = `${way}/${state.seen}`, runs = done.filter((r) => get(key, r) != null && get(state.load, r) != null);
    return [way, colour, distinct(state.load, runs).map((at) => [at, median(runs.filter((r) => get(state.load, r) === at).map((r) => get(key, r))), way])];
  }).filter((w) => w[2].length), points = ways.flatMap((w) => w[2]);
  $("loads").hidden = !LOADS.length;
  if (!points.length) return ($("underload").innerHTML = nothing("no run under load has this figure"));
  const drawn = chart({ label: `${state.seen} under load`, xName: state.load, yName: state.seen, x: axis(points.map((p) => p[0])), y: axis(points.map((p) => p[1])),
    dots: ways.map(([, colour, points]) => ({ points, colour, size: 8 })), lines: ways.map(([, colour, points]) => ({ points, colour })) });
  $("underload").innerHTML = drawn.svg + legend(ways.map(([way, colour]) => [way, colour]));
  hover($("underload"), drawn, points, (p) => `${p[2]}\n${state.load}=${p[0]}\n${state.seen} ${figure(p[1])}`);
}

const speedupCell = (v) => (v == null ? "" : `<span class="${v > 1 ? "good" : "bad"}">${v.toFixed(2)}x</span>`);
const marks = (r) => [[get(SOURCE, r) === "synthetic", "synthetic"], [get("speedup_spread", r) > data.noisy, "noisy"], [get("gpu_trouble", r), "GPU troubled"]]
  .filter(([holds]) => holds).map(([, mark]) => ` <span class="mark">${mark}</span>`).join("");

function drawFastest(done) {
  const best = new Map(), context = "batch.context_len", size = "batch.size";
  const better = (a, b) => { // what was measured goes before what was drawn, whatever its figures say
    const [sa, sb] = [a, b].map((r) => get(SOURCE, r) === "synthetic");
    return sa !== sb ? sb : get(TPS, a) > get(TPS, b);
  };
  for (const r of done.filter((r) => get(TPS, r) != null)) {
    const place = `${get(context, r)},${get(size, r)}`;
    if (!best.has(place) || better(r, best.get(place))) best.set(place, r);
  }
  const runs = [...best.values()].sort((a, b) => get(context, a) - get(context, b) || get(size, a) - get(size, b));
  const others = data.settings.filter((k) => k !== context && k !== size && !k.startsWith("data.")).slice(0, 6), known = [context, size].filter((k) => columns[k]);
  if (!runs.length) return ($("fastest").innerHTML = nothing("no run has been measured"));
  $("fastest").innerHTML = `<table><tr>${[...known, "speedup", "tokens/s", "TPOT, ms"].map((k) => `<th>${k}</th>`).join("")}<th class="words">command</th>${others.map((k) => `<th>${k}</th>`).join("")}</tr>` +
    runs.map((r) => `<tr>${known.map((k) => `<td>${figure(get(k, r))}</td>`).join("")}<td>${speedupCell(get("speedup", r))}${marks(r)}</td><td>${figure(get(TPS, r))}</td>` +
      `<td>${figure(get(TPOT, r))}</td><td class="words"><button data-run="${r}">copy</button> <code>${escapeText(get("command", r))}</code></td>${others.map((k) => `<td>${escapeText(figure(get(k, r)))}</td>`).join("")}</tr>`).join("") + "</table>";
  $("fastest").querySelectorAll("button").forEach((b) => { b.onclick = () => copy(get("command", Number(b.dataset.run)), b); });
}

function drawRuns(runs) {
  const key = state.sort.replace(/^-/, ""), sign = state.sort.startsWith("-") ? -1 : 1;
  const keys = ["id", "status", ...data.settings.slice(0, 8), ...FIGURES, ...["lossless/identical", "reason"].filter((k) => columns[k])];
  const order = (a, b) => { const [x, y] = [get(key, a), get(key, b)]; return x == null || y == null ? (x == null) - (y == null) : sign * (x < y ? -1 : x > y ? 1 : 0); };
  const shown = [...runs].sort(order).slice(0, MAX_LINES), cell = (k, r) => (k === "speedup" ? speedupCell(get(k, r)) + marks(r) : escapeText(figure(get(k, r))));
  $("runs").innerHTML = `<table><tr>${keys.map((k) => `<th class="${numeric(k) ? "" : "words"}" data-key="${k}">${k.replace("speculative/", "")}${k === key ? (sign < 0 ? " ↓" : " ↑") : ""}</th>`).join("")}</tr>` +
    shown.map((r) => `<tr>${keys.map((k) => `<td class="${numeric(k) ? "" : "words"}">${cell(k, r)}</td>`).join("")}</tr>`).join("") + "</table>" +
    (runs.length > MAX_LINES ? `<p><small>${MAX_LINES} of ${runs.length.toLocaleString("en")}; filter or sort to see others</small></p>` : "");
  $("runs").querySelectorAll("th").forEach((th) => { th.onclick = () => set({ sort: state.sort === "-" + th.dataset.key ? th.dataset.key : "-" + th.dataset.key }); });
}

function tip(event, text) {
  $("tip").hidden = !event;
  if (!event) return;
  $("tip").textContent = text;
  const box = $("tip").getBoundingClientRect();
  $("tip").style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
  $("tip").style.top = `${Math.min(event.clientY + 14, innerHeight - box.height - 8)}px`;
}

function hover(element, { px, py }, points, text) {
  const svg = element.querySelector("svg"), places = points.map((p) => [px(p[0]), py(p[1]), p]);
  svg.onmouseleave = () => tip();
  svg.onmousemove = (event) => {
    const box = svg.getBoundingClientRect(), scale = WIDTH / box.width, mx = (event.clientX - box.left) * scale, my = (event.clientY - box.top) * scale;
    let nearest = null, least = 15 ** 2;
    for (const [x, y, p] of places) { const d = (x - mx) ** 2 + (y - my) ** 2; if (d < least) [least, nearest] = [d, p]; }
    tip(nearest && event, nearest && text(nearest));
  };
}

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); } catch { // a page opened from a file may not: the old way
    const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
    area.select(); document.execCommand("copy"); area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1200);
}

function set(changes) {
  Object.assign(state, changes);
  history.replaceState(null, "", "#" + new URLSearchParams(Object.entries(state).filter(([, v]) => v !== "")));
  draw();
}

function menu(id, options, key = id) {
  const select = $(id);
  select.innerHTML = options.map((o) => (Array.isArray(o) ? o : [o, o])).map(([v, name]) => `<option value="${escapeText(v)}">${escapeText(name)}</option>`).join("");
  select.onchange = () => set({ [key]: select.value });
}

function draw() {
  for (const select of document.querySelectorAll("select")) select.value = state[select.dataset.key || select.id] ?? "";
  if ($("where").value !== state.where) $("where").value = state.where;
  const runs = chosen(), done = runs.filter((r) => get("status", r) === "done");
  drawTiles(runs, done); drawHeatmap(done); drawPareto(done); drawAcceptance(done); drawPrediction(done); drawSteps(done); drawLoad(done); drawFastest(done); drawRuns(runs);
  document.body.dataset.shown = runs.length; // for whoever waits until it is drawn
}

function start() {
  $("title").textContent = data.title;
  $("made").textContent = `${data.number.toLocaleString("en")} runs, ${data.made}`;
  $("picks").innerHTML = picked.map((k) => `<label>${escapeText(k)}<select id="pick:${escapeText(k)}"></select></label>`).join("");
  for (const k of picked) menu(`pick:${k}`, [["", "all"], ...distinct(k, all).filter((v) => v != null).map((v) => [String(v), figure(v)])]);
  menu("statistic", ["median", "best", "worst"]); menu("value", FIGURES); menu("x", axes); menu("y", axes); menu("colour", axes);
  menu("acceptance", ["acceptance_rate", "acceptance_length", "alpha"].filter(numeric)); menu("along", axes.filter(numeric)); menu("curves", axes); menu("bars", axes); menu("seen", SEEN); menu("load", LOADS);
  $("where").oninput = () => set({ where: $("where").value });
  $("clear").onclick = () => set({ where: "", ...noPicks });
  draw();
}

start();
