"use strict";
// The filter, the charts and the table of runs; all else of the page is HTML. Its state is the address, after the #.
const $ = (id) => document.getElementById(id);
let data, columns, all, state; // all: the numbers of the rows; a run under load has one for each level
const get = (key, run) => columns[key]?.[run] ?? null;
const has = (...keys) => (run) => keys.every((key) => get(key, run) !== null);
const isNumber = (value) => typeof value === "number";
const byWord = (a, b) => (String(a) < String(b) ? -1 : +(a !== b));
const byValue = (a, b) => (isNumber(a) && isNumber(b) ? a - b : isNumber(b) - isNumber(a) || byWord(a, b)); // numbers first
const missing = (key) => (key.startsWith("cache.") ? "no cache" : "none");
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const figure = (v) => (isNumber(v) ? v.toLocaleString("en", v % 1 ? { maximumSignificantDigits: 4 } : {}) : v ?? "");
const distinct = (key, runs) => new Set(runs.map((run) => get(key, run))).size;

function set(changes) {
  const changed = Object.entries({ ...state, ...changes }).filter(([key, value]) => value !== data.first[key]);
  history.replaceState(null, "", "#" + new URLSearchParams(changed));
  draw();
}

// The tests of the terminal's --where: KEY=VALUE and so on, several, separated by blanks.
function tests(text) {
  return (text.match(/\S+/g) ?? []).map((test) => {
    const [, name, sign, wanted] = test.match(/^(.+?)(!=|>=|<=|=|>|<|~)(.*)$/) ?? [];
    if (!sign) throw Error(`${test}: not of the form KEY=VALUE, or with != > >= < <= ~`);
    const ends = Object.keys(columns).filter((key) => key.endsWith(`.${name}`) || key.endsWith(`/${name}`));
    const headed = (key) => data.labels[key] === name || key.replace(/\.name$/, "") === name;
    const key = columns[name] ? name : ends.length === 1 ? ends[0] : ends[0] ? null : Object.keys(columns).find(headed);
    if (!key) throw Error(`${name}: ${ends[0] ? "which one? " + ends.join(", ") : "no key in which the runs differ"}`);
    const number = wanted === "" ? NaN : Number(wanted), words = (value) => String(value).toLowerCase();
    if (/[<>]/.test(sign) && isNaN(number)) throw Error(`${test}: ${wanted || "nothing"} is not a number`);
    const same = (v) => (isNumber(v) && !isNaN(number) ? v === number : words(v) === wanted.toLowerCase());
    const holds = { "=": same, "!=": (v) => !same(v), "~": (v) => words(v).includes(wanted.toLowerCase()),
      ">": (v) => v > number, ">=": (v) => v >= number, "<": (v) => v < number, "<=": (v) => v <= number };
    return (run) => (!/[<>]/.test(sign) || isNumber(get(key, run))) && holds[sign](get(key, run));
  });
}

function chosen() {
  let wanted = [];
  $("mistake").textContent = "";
  try { wanted = tests(state.where); } catch (error) { $("mistake").textContent = error.message; }
  // Runs that failed, and predicted ones, have no source of acceptance: they stay.
  const matches = (run, key, value) => {
    const held = get(key, run) ?? (key === "acceptance/source" ? value : null);
    return !value || (isNumber(held) ? held === Number(value) : String(held) === value);
  };
  const picked = (run) => data.picks.every((key) => matches(run, key, state[`pick:${key}`]));
  return all.filter((run) => picked(run) && wanted.every((test) => test(run)));
}

// A point for each run and source, [kind, x, y], that has both; with the interval of the key `of`.
const pointsOf = (runs, sources, more, of = (x, y) => y) => sources.flatMap(([kind, x, y]) =>
  runs.filter(has(x, y)).map((run) => {
    const [low, high] = ["low", "high"].map((end) => get(`${of(x, y)}_ci95/${end}`, run) ?? get(of(x, y), run));
    return { id: get("id", run), run, kind, x: get(x, run), y: get(y, run), low, high, ...more(run, kind, y) };
  })).sort((a, b) => byValue(a.series, b.series) || byValue(a.x, b.x));

// Each chart is the name of its description, its titles, its points and a note, if the note depends on them.
const lines = (number) => (runs) => {
  const isHeat = number === 1 && state.series1 && state.as !== "lines";
  const [value, x, series] = ["value", "x", "series"].map((name) => state[name + number]);
  const known = runs.filter((run) => !data.acceptance.includes(value) || get("acceptance/source", run) !== "synthetic");
  const kinds = Object.entries(data.measures[value] ?? {}).filter(([, key]) => known.some(has(key, x)));
  const sources = kinds.slice(0, series ? 1 : undefined).map(([kind, key]) => [kind, x, key]);
  const points = pointsOf(known, sources, (run, kind, y) => ({ series: series ? get(series, run) ?? missing(series) : kind,
    rule: y.includes("speedup") ? 1 : null, noisy: data.timed.includes(y) && get("noisy", run) }));
  const values = [...new Set(points.map((point) => point.x))], least = Math.min(...values), most = Math.max(...values);
  if (values.length < 2 && (number > 1 || data.number > 1 && !series)) points.length = 0; // a single dot says nothing
  const across = !values.every(isNumber) ? "word" : least > 0 && most >= data.log * least ? "log" : "number";
  const by = points.every((point) => isNumber(point.series)) ? "number" : "word";
  const name = isHeat ? (value.includes("speedup") ? "heat ratio" : "heat") : `line ${across} ${by}`;
  const others = data.settings.filter((key) => key !== x && key !== series && distinct(key, known) > 1);
  const unlike = others.filter((key) => differsAlong(points, key));
  for (const point of points) point.apart = +(unlike.length > 0);
  const few = (keys) => keys.slice(0, 6).join(", ");
  const notes = [others.length && `A point is the ${state.statistic} of runs that also differ in ${few(others)}.`,
    unlike.length && !isHeat ? `Not joined: points differ in their values of ${few(unlike)}.` : "",
    isHeat ? "" : "Bars: 95% intervals, where a point is one run.", "!: noisy. Click: these runs alone."];
  return [name, { x, y: value, series, values, kinds: [], statistic: state.statistic }, points, notes.filter(Boolean).join(" ")];
};
// Whether the points of a series average unlike runs: less than half of a setting's values are at every x.
const differsAlong = (points, key) => {
  const held = {};
  for (const { series, kind, x, run } of points) ((held[[series, kind]] ??= {})[x] ??= new Set()).add(get(key, run));
  return Object.values(held).some((along) => {
    const sets = Object.values(along), every = [...new Set(sets.flatMap((set) => [...set]))];
    return every.filter((value) => sets.every((set) => set.has(value))).length < every.length / 2;
  });
};
const CHARTS = {
  chart1: lines(1), chart2: lines(2), chart3: lines(3),
  pareto: (runs) => {
    const name = (run, kind) => (state.colour && kind === "speculative" ? get(state.colour, run) ?? missing(state.colour) : kind);
    const points = pointsOf(runs, data.trade, (run, kind) => ({ series: name(run, kind) }));
    return ["trade", { x: "time per output token (TPOT), ms", y: "tokens/s", series: state.colour }, points];
  },
  prediction: (runs) => {
    const [x, sources] = data.compared[state.compared] ?? ["", []];
    const points = pointsOf(runs, sources, (_, kind) => ({ series: kind }), (measured) => measured);
    return ["agreement", { x, y: `predicted ${state.compared}` }, points];
  },
  steps: (runs) => {
    const sources = ["measured", "predicted"].map((kind) => [kind, state.bars, `round/${kind}`]);
    const points = pointsOf(runs, sources, (run, kind) => get(`round/${kind}`, run));
    return [`parts ${state.unit}`, { x: state.bars }, points];
  },
};
const views = {}, theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
function drawChart(id, runs) {
  const [name, titles, points, note] = CHARTS[id](runs), article = $(id);
  if ((article.hidden = !points.length)) return;
  let text = data.templates[name];
  for (const [key, title] of Object.entries(titles))
    text = text.replaceAll(Array.isArray(title) ? `["$${key}"]` : `"$${key}"`, () => JSON.stringify(title));
  const spec = { ...JSON.parse(text.replaceAll('{"values":[]}', "null")), datasets: { points } };
  if (note) article.querySelector(".note").textContent = note;
  vegaEmbed(article.querySelector(".plot"), spec, { renderer: "svg", actions: false, tooltip: { theme } }).then(({ view }) => {
    views[id]?.finalize();
    views[id] = view;
    view.addEventListener("click", (_, item) => { // on a point or cell: its runs alone
      const { x, series } = item?.datum ?? {}, keys = [[titles.x, x], [titles.series, series]].filter(([key]) => key);
      const typed = ([key, value]) => `${key}=${value === missing(key) ? null : value}`;
      const where = [state.where, ...keys.map(typed)].join(" ").trim();
      if (titles.values && x !== undefined) set({ where });
    });
  });
}

function summary(runs) {
  const speeds = runs.filter(has("speedup")).map((run) => get("speedup", run)).sort((a, b) => a - b), number = speeds.length;
  const shown = `${distinct("id", runs)} of ${distinct("id", all)} runs`;
  if (!number) return shown;
  const median = (speeds[(number - 1) >> 1] + speeds[number >> 1]) / 2;
  const [least, middle, most] = [speeds[0], median, speeds[number - 1]].map((speed) => `${speed.toFixed(2)}x`);
  return `${shown}: speedup ${least} to ${most}, median ${middle}, above 1 in ${speeds.filter((one) => one > 1).length}`;
}

function drawRuns(runs) {
  const key = state.sort.replace(/^-/, ""), sign = state.sort.startsWith("-") ? -1 : 1;
  const sorted = [...runs].sort((a, b) => !has(key)(a) - !has(key)(b) || sign * byValue(get(key, a), get(key, b)));
  const mark = (run) => (has("marks")(run) ? ` <span class="mark">${escaped(get("marks", run))}</span>` : "");
  const ratio = (name, value) => (data.speedups.includes(name) && isNumber(value) ? `${value.toFixed(2)}x` : figure(value));
  const cell = (name, run) => `<td>${escaped(ratio(name, get(name, run)))}${name === "speedup" ? mark(run) : ""}</td>`;
  const head = data.table.map((name) => `<th>${escaped(name)}${name === key ? (sign > 0 ? " ↑" : " ↓") : ""}</th>`);
  const lines = [head, ...sorted.slice(0, 500).map((run) => data.table.map((name) => cell(name, run)))];
  $("runs").querySelector("table").innerHTML = lines.map((line) => `<tr>${line.join("")}</tr>`).join("");
}

function draw() {
  state = { ...data.first, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  for (const select of document.querySelectorAll("select")) select.value = state[select.id] ?? "";
  if ($("where").value !== state.where) $("where").value = state.where;
  const runs = chosen(), done = runs.filter((run) => get("status", run) === "done");
  for (const id in CHARTS) drawChart(id, done);
  $("generated").hidden = !($("generated").querySelector(".text").innerHTML = data.samples[state.run] ?? "");
  $("shown").textContent = summary(runs);
  drawRuns(runs);
  document.body.dataset.shown = runs.length; // the page is drawn
}

const ready = (async () => {
  const bytes = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
  data = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  [columns, all] = [data.columns, [...Array(data.number).keys()]];
  new Function(data.vega)(); // its names stay its own
  for (const one of document.querySelectorAll("select, #where")) one.oninput = () => set({ [one.id]: one.value });
  $("clear").onclick = () => set({ ...data.first });
  const sortBy = (key) => set({ sort: (state.sort === key ? "-" : "") + key });
  $("runs").onclick = ({ target }) => target.tagName === "TH" && sortBy(data.table[target.cellIndex]);
  addEventListener("hashchange", draw);
  draw();
})();
