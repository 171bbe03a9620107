"use strict";
// The filter, the charts and the table of runs; all else of the page is HTML. Its state is the address, after the #.
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent), { settings, measures } = data;
const columns = Object.fromEntries(Object.entries(data.columns).map(([key, { values, words, indices, constant }]) =>
  [key, values ?? indices?.map((i) => words[i]) ?? Array(data.number).fill(constant)]));
const all = [...Array(data.number).keys()]; // rows; a run under load has one for each level
const get = (key, run) => columns[key]?.[run] ?? null;
const has = (...keys) => (run) => keys.every((key) => get(key, run) !== null);
const isNumber = (value) => typeof value === "number";
const byValue = (a, b) => (isNumber(a) && isNumber(b) ? a - b : String(a) < String(b) ? -1 : +(a !== b));
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const figure = (v) => (isNumber(v) ? v.toLocaleString("en", v % 1 ? { maximumSignificantDigits: 4 } : {}) : v ?? "");

let state = {};
function set(changes) {
  const entries = Object.entries({ ...state, ...changes }).filter(([key, value]) => value !== data.first[key]);
  history.replaceState(null, "", "#" + new URLSearchParams(entries));
  draw();
}

// The tests of the terminal's --where: KEY=VALUE and so on, several, separated by blanks.
function tests(text) {
  return (text.match(/\S+/g) ?? []).map((test) => {
    const [, name, sign, wanted] = test.match(/^(.+?)(!=|>=|<=|=|>|<|~)(.*)$/) ?? [];
    if (!sign) throw Error(`${test}: not of the form KEY=VALUE, or with != > >= < <= ~`);
    const ends = Object.keys(columns).filter((key) => key.endsWith(`.${name}`) || key.endsWith(`/${name}`));
    const key = columns[name] ? name : ends.length === 1 ? ends[0] : null;
    if (!key) throw Error(`${name}: ${ends[0] ? "which one? " + ends.join(", ") : "no key in which the runs differ"}`);
    const number = wanted === "" ? NaN : Number(wanted), words = (value) => String(value).toLowerCase();
    if (/[<>]/.test(sign) && isNaN(number)) throw Error(`${test}: ${wanted || "nothing"} is not a number`);
    const same = (v) => (isNumber(v) && !isNaN(number) ? v === number : words(v) === wanted.toLowerCase());
    const over = (v) => isNumber(v) && v > number, under = (v) => isNumber(v) && v < number;
    const holds = { "=": same, "!=": (v) => !same(v), "~": (v) => words(v).includes(wanted.toLowerCase()),
      ">": over, ">=": (v) => over(v) || same(v), "<": under, "<=": (v) => under(v) || same(v) };
    return (run) => holds[sign](get(key, run));
  });
}

function chosen() {
  let wanted = [], mistake = "";
  try { wanted = tests(state.where); } catch (error) { mistake = error.message; }
  $("mistake").textContent = mistake;
  $("where").classList.toggle("wrong", mistake !== "");
  const picks = data.picks.filter((key) => state[`pick:${key}`]);
  // Runs that failed, and predicted ones, have no source of acceptance: they stay.
  const matches = (run, key) => String(get(key, run) ?? state[`pick:${key}`]) === state[`pick:${key}`];
  return all.filter((run) => wanted.every((test) => test(run)) && picks.every((key) => matches(run, key)));
}

// Each chart is the name of its description, its titles, its points and a note.
const ends = (key, run) => ["min", "max"].map((end) => get(`${key}_${end}`, run) ?? get(key, run));
const lines = (number) => (runs) => {
  const [value, x, series] = ["value", "x", "series"].map((name) => state[name + number]);
  const kinds = Object.entries(measures[value] ?? {}).filter(([, key]) => runs.some(has(key, x)));
  const known = runs.filter((run) => !data.acceptance.includes(value) || get("acceptance/source", run) !== "synthetic");
  const points = kinds.slice(0, series ? 1 : undefined).flatMap(([kind, key]) => known.filter(has(key, x)).map((run) => {
    const [low, high] = ends(key, run), noisy = key === "speedup" && get("noisy", run);
    const at = { x: get(x, run), y: get(key, run), low, high, kind, noisy, rule: key.includes("speedup") ? 1 : null };
    return { ...at, series: series ? get(series, run) ?? "none" : kind };
  }));
  points.sort((a, b) => byValue(a.x, b.x) || (series ? byValue(a.series, b.series) : 0));
  const values = [...new Set(points.map((point) => point.x))], least = Math.min(...values), most = Math.max(...values);
  if (values.length < 2 && (number > 1 || data.number > 1 && !series)) points.length = 0; // a single dot says nothing
  const across = !values.every(isNumber) ? "word" : least > 0 && most >= 8 * least ? "log" : "number";
  const by = points.every((point) => isNumber(point.series)) ? "number" : "word";
  const isHeat = number === 1 && series && state.as !== "lines", heat = value?.includes("speedup") ? "heat ratio" : "heat";
  const others = settings.filter((k) => k !== x && k !== series && new Set(runs.map((run) => get(k, run))).size > 1);
  const mixed = others.length ? `Medians over runs that also differ in ${others.slice(0, 6).join(", ")}. ` : "";
  const note = `${mixed}Bars: range over runs and repeats. !: noisy.`;
  return [isHeat ? heat : `line ${across} ${by}`, { x, y: value, series, values, kinds: [] }, points, note];
};
const CHARTS = {
  chart1: lines(1), chart2: lines(2), chart3: lines(3),
  pareto: (runs) => {
    const points = ["speculative", "autoregressive"].flatMap((kind) => {
      const [x, y] = ["time_per_output_token_ms", "tokens_per_second"].map((name) => `${kind}/${name}`);
      const by = kind === "speculative" && state.colour, series = (run) => (by ? figure(get(by, run)) || "none" : kind);
      return runs.filter((run) => get(x, run) > 0 && get(y, run) > 0)
        .map((run) => ({ id: get("id", run), kind, series: series(run), x: get(x, run), y: get(y, run) }));
    });
    const titles = { x: "time per output token (TPOT), ms", y: "tokens/s", series: state.colour };
    return ["trade", titles, points, "Lines: no run is both faster per token and higher in throughput."];
  },
  prediction: (runs) => {
    const points = (data.compared[state.compared] ?? []).flatMap(([series, [y, x]]) =>
      runs.filter((run) => get(x, run) > 0 && get(y, run) > 0).map((run) => {
        const [low, high] = ends(x, run), of = x.startsWith("published/") ? "published" : "measured";
        return { id: get("id", run), series, x: get(x, run), y: get(y, run), low, high, of };
      }));
    const x = `${[...new Set(points.map((point) => point.of))].join(" or ")} ${state.compared}`;
    const note = "On the dashed line a prediction is exact; the band is 10% wide on either side.";
    return ["agreement", { x, y: `predicted ${state.compared}` }, points, note];
  },
  steps: (runs) => {
    const kinds = ["measured", "predicted"].map((kind) => [kind, runs.filter(has(`round/${kind}/tokens`))]);
    const points = kinds.flatMap(([kind, known]) => known.flatMap((run) => {
      const whole = get(`round/${kind}/tokens`, run), unit = state.unit === data.menus.unit[0] ? 1 : whole;
      const at = { x: state.bars ? get(state.bars, run) ?? "none" : "all", kind, tokens: whole / unit };
      return data.parts.map((series) => ({ ...at, series, y: get(`round/${kind}/${series}`, run) / unit }));
    })).sort((a, b) => byValue(a.x, b.x));
    const note = "Means. A round pays if its bar ends below the mark: what its tokens would take autoregressively.";
    return ["parts", { x: state.bars, y: state.unit }, points, note];
  },
};
const views = {}, theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
function drawChart(id, runs) {
  const [name, titles, points, note] = CHARTS[id](runs), article = $(id);
  article.hidden = !points.length;
  if (!points.length) return;
  let text = data.templates[name];
  for (const [key, title] of Object.entries(titles))
    text = text.replaceAll(Array.isArray(title) ? `["$${key}"]` : `"$${key}"`, () => JSON.stringify(title));
  const spec = { ...JSON.parse(text.replaceAll('{"values":[]}', "null")), datasets: { points } };
  article.querySelector(".note").textContent = note;
  const options = { renderer: "svg", actions: false, tooltip: { theme } };
  vegaEmbed(article.querySelector(".plot"), spec, options).then(({ view }) => {
    views[id]?.finalize();
    views[id] = view;
    view.addEventListener("click", (_, item) => { // on a point or cell: its runs alone
      const { x, series } = item?.datum ?? {}, keys = [[titles.x, x], [titles.series, series]].filter(([key]) => key);
      if (titles.values && x !== undefined) set({ where: keys.map((pair) => pair.join("=")).join(" ") });
    });
  });
}

function drawRuns(runs) {
  const key = state.sort.replace(/^-/, ""), sign = state.sort.startsWith("-") ? -1 : 1;
  const sorted = [...runs].sort((a, b) => !has(key)(a) - !has(key)(b) || sign * byValue(get(key, a), get(key, b)));
  const mark = (run) => (has("marks")(run) ? ` <span class="mark">${escaped(get("marks", run))}</span>` : "");
  const cell = (name, run) => `<td>${escaped(figure(get(name, run)))}${name === "speedup" ? mark(run) : ""}</td>`;
  const head = data.table.map((name) => `<th>${name}${name === key ? (sign > 0 ? " ↑" : " ↓") : ""}</th>`);
  const body = sorted.slice(0, 500).map((run) => `<tr>${data.table.map((name) => cell(name, run)).join("")}</tr>`);
  $("runs").querySelector(".table").innerHTML = `<table><tr>${head.join("")}</tr>${body.join("")}</table>`;
  $("runs").querySelectorAll("th").forEach((th, i) => {
    th.onclick = () => set({ sort: (state.sort === data.table[i] ? "-" : "") + data.table[i] });
  });
}

function draw() {
  state = { ...data.first, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  for (const select of document.querySelectorAll("select")) select.value = state[select.id] ?? "";
  if ($("where").value !== state.where) $("where").value = state.where;
  const runs = chosen(), done = runs.filter((run) => get("status", run) === "done");
  for (const id in CHARTS) drawChart(id, done);
  $("generated").hidden = !($("generated").querySelector(".text").innerHTML = data.samples[state.run] ?? "");
  drawRuns(runs);
  document.body.dataset.shown = runs.length; // the page is drawn
}

const ready = (async () => {
  const packed = Uint8Array.from(atob($("packed").textContent), (c) => c.charCodeAt(0));
  const code = new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
  new Function(await code.text())(); // its names stay its own
  for (const one of document.querySelectorAll("select, #where")) one.oninput = () => set({ [one.id]: one.value });
  $("clear").onclick = () => set({ ...data.first });
  for (const button of document.querySelectorAll("td button"))
    button.onclick = () => navigator.clipboard.writeText(button.nextElementSibling.textContent);
  addEventListener("hashchange", draw);
  draw();
})();
