"use strict";
// The page: which runs are chosen, their tables, and which charts are shown. Its state is the address (after the #).

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const unpacked = ({ values, words, indices, constant }) =>
  values ?? (words ? indices.map((i) => words[i]) : new Array(data.number).fill(constant));
const columns = Object.fromEntries(Object.entries(data.columns).map(([key, packed]) => [key, unpacked(packed)]));
const all = d3.range(data.number); // rows; a run under load has one for each level
const get = (key, run) => columns[key]?.[run];
const numeric = (key) => columns[key]?.some((v) => typeof v === "number");
const label = (run) => data.settings.filter((k) => get(k, run) != null).map((k) => `${k}=${get(k, run)}`).join("\n");
const byValue = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a) < String(b) ? -1 : +(a !== b));
const distinct = (key, runs) => [...new Set(runs.map((r) => get(key, r) ?? null))].sort(byValue);
const differ = (key, runs) => distinct(key, runs).length > 1;
const count = (runs) => new Set(runs.map((r) => get("id", r))).size;
const thousands = (number) => number.toLocaleString("en");
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escapeText = (text) => String(text).replace(/[&<>"]/g, (c) => ESCAPES[c]);

function figure(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return thousands(Math.round(value));
  return String(Number(value.toPrecision(3)));
}
const shown = (value) => (value == null ? "none" : figure(value));

const TPS = "speculative/tokens_per_second", TPOT = "speculative/time_per_output_token_ms";
const SOURCE = "acceptance/source", SCENARIO = "scenario.name", TARGET = "target.name";
const PREDICTED = ["predicted/speedup_wall", "predicted/gamma", "predicted/break_even_alpha"];
// The speedups of a row, of its batch, and of its level of load.
const PER = { speedup: "row", speedup_wall: "batch", speedup_duration: "level" };
const FIGURES = [...Object.keys(PER), "predicted/speedup", "published/speedup", "published/predicted_speedup",
  "formula/speedup", "acceptance_rate", "acceptance_length", "alpha", TPS, TPOT, "speculative/time_to_first_token_ms",
  "memory/peak_gib"].filter(numeric);
const LOADS = ["load.concurrency", "load.rate"].filter(numeric);
const SEEN = ["tokens_per_second", "time_to_first_token_ms", "time_per_output_token_ms", "request_latency_ms", "goodput_rps"]
  .filter((k) => numeric(`autoregressive/${k}`));
// What is given or assumed, and so no choice that could be the fastest.
const GIVEN = [TARGET, "hardware.name", "data.name", "data.task", "sampling.temperature", "scenario.alpha", "draft.synthetic_acceptance"];
const MAX_PICKS = 9, MAX_VALUES = 40, MAX_LINES = 100;

// Measured and drawn acceptance, several targets, and measured and predicted runs never mix unless one asks for it.
const numValues = (key) => new Set(columns[key]?.filter((v) => v != null)).size;
const commonest = (key, runs) => d3.greatest(d3.rollups(runs, (of) => of.length, (r) => get(key, r)), ([v, n]) => (v == null ? 0 : n))[0];
const apart = {};
if (numValues(SOURCE) > 1) apart[SOURCE] = "measured";
if (numValues(SCENARIO) > 1) apart[SCENARIO] = columns[SCENARIO].includes("compare") ? "compare" : commonest(SCENARIO, all);
const holds = (key, run) => !apart[key] || get(key, run) === apart[key];
if (numValues(TARGET) > 1) apart[TARGET] = commonest(TARGET, all.filter((r) => holds(SCENARIO, r)));
const initial = all.filter((r) => holds(SCENARIO, r) && holds(TARGET, r));
const picked = [...new Set([...Object.keys(apart), ...data.settings, "device"])]
  .filter((k) => numValues(k) > 1 && numValues(k) <= MAX_VALUES).slice(0, MAX_PICKS);
const noPicks = Object.fromEntries(picked.map((k) => [`pick:${k}`, apart[k] ?? ""]));

// Settings for an axis, those first in which the runs that are shown at first differ; and what is chosen at first.
const few = data.settings.filter((k) => numValues(k) <= MAX_VALUES), [differing, others] = [true, false].map((is) =>
  few.filter((k) => differ(k, initial) === is));
const axes = [...differing, ...others];
const first = (names, but) => [...names, ...differing].find((k) => k !== but && differing.includes(k)) ?? "";
const numbers = differing.filter(numeric), x0 = first(["batch.size", "draft.gamma", "cache.budget", ...numbers]);
const along0 = first(["cache.budget", "draft.gamma", ...numbers]);
const comparable = Object.keys(COMPARED).filter((name) => COMPARED[name].some(([, , a, b]) => numeric(a) && numeric(b)));
const defaults = {
  where: "", statistic: "median", value: FIGURES[0] ?? "", sort: "-speedup", ...noPicks,
  x: x0, y: first(["batch.context_len", "cache.budget", "draft.gamma"], x0), colour: first(["cache.policy", "draft.name"]),
  acceptance: "acceptance_rate", along: along0, curves: first(["cache.policy", "draft.name", "draft.gamma"], along0),
  compared: comparable[0] ?? "", bars: x0, unit: UNITS[differing.length > 1 ? 1 : 0], seen: SEEN[0] ?? "", load: LOADS[0] ?? "",
  run: Object.keys(data.samples)[0] ?? "",
};
const state = {};
const address = (changes) =>
  "#" + new URLSearchParams(Object.entries({ ...state, ...changes }).filter(([k, v]) => v !== defaults[k]));
const readAddress = () => Object.assign(state, defaults, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));

// The tests of the terminal's --where: KEY=VALUE and so on, several, separated by blanks.
function tests(text) {
  return text.split(/\s+/).filter(Boolean).map((test) => {
    const parts = test.match(/^(.+?)(!=|>=|<=|=|>|<|~)(.*)$/);
    if (!parts) throw Error(`${test}: not of the form KEY=VALUE, or with != > >= < <= ~`);
    const [, name, sign, wanted] = parts, keys = Object.keys(columns);
    const ends = keys.filter((k) => k === name || k.endsWith("." + name) || k.endsWith("/" + name));
    const key = keys.includes(name) ? name : ends.length === 1 ? ends[0] : null;
    const unknown = ends.length ? `which one? ${ends.join(", ")}` : "the runs do not differ in it, or have no such key";
    if (!key) throw Error(`${name}: ${unknown}`);
    const number = wanted === "" ? NaN : Number(wanted), words = (v) => String(v ?? "null").toLowerCase();
    const same = (v) => (typeof v === "number" && !isNaN(number) ? v === number : words(v) === wanted.toLowerCase());
    const orders = { ">": (v) => v > number, ">=": (v) => v >= number, "<": (v) => v < number, "<=": (v) => v <= number };
    if (orders[sign] && isNaN(number)) throw Error(`${test}: ${wanted || "nothing"} is not a number`);
    if (orders[sign]) return (run) => typeof get(key, run) === "number" && orders[sign](get(key, run));
    const equals = { "=": same, "!=": (v) => !same(v), "~": (v) => words(v).includes(wanted) };
    return (run) => equals[sign](get(key, run));
  });
}

function chosen() {
  $("mistake").textContent = "";
  let wanted = [];
  try { wanted = tests(state.where); } catch (error) { $("mistake").textContent = error.message; }
  $("where").classList.toggle("wrong", $("mistake").textContent !== "");
  const picks = picked.filter((k) => state[`pick:${k}`]);
  // Runs that failed, and predicted ones, have no source of acceptance: they stay.
  const matches = (run, k) => String(get(k, run)) === state[`pick:${k}`] || (k === SOURCE && get(k, run) == null);
  return all.filter((run) => wanted.every((test) => test(run)) && picks.every((k) => matches(run, k)));
}

// Both speedups in a phrase, such as "1.44x per row and 1.15x per batch"; `of` returns the value of a key.
const bothSpeedups = (of, text = (v) => `${v.toFixed(2)}x`) =>
  Object.entries(PER).filter(([key]) => of(key) != null).map(([key, per]) => `${text(of(key))} per ${per}`).join(" and ");

function drawTiles(runs, done) {
  const timed = done.filter((r) => get("speedup", r) != null), best = d3.greatest(timed, (r) => get("speedup", r)), runsOf = count(runs);
  const tiles = [[`${thousands(runsOf)} of ${thousands(count(all))}`, runs.length > runsOf ? `runs, ${runs.length} levels of load` : "runs"]];
  if (timed.length) {
    const of = (key) => timed.map((r) => get(key, r)).filter((v) => v != null), pays = get("speedup", best) > 1;
    tiles.push([bothSpeedups((k) => get(k, best)), pays ? "best speedup" : "at best: autoregressive is faster everywhere", pays ? "" : "warn"],
      [bothSpeedups((k) => d3.median(of(k))), "median speedup"],
      [bothSpeedups((k) => d3.mean(of(k), (v) => v > 1), d3.format(".0%")), "faster than autoregressive"]);
  }
  const warnings = [["failed", runs, (r) => get("status", r) === "failed"], ["noisy", done, isNoisy],
    ["GPU throttled or shared", done, (r) => get("gpu_trouble", r)], ["predicted not to fit in memory", done, isTooLarge],
    ["not identical to autoregressive", done, (r) => get("lossless/identical", r) === false], ["synthetic acceptance", done, isSynthetic]];
  for (const [name, of, test] of warnings) if (of.some(test)) tiles.push([thousands(count(of.filter(test))), name, "warn"]);
  const figures = (text) => text.replace(/ [a-z ]+/g, "<small>$&</small>");
  $("tiles").innerHTML = tiles.map(([b, s, kind]) => `<div class="${kind ?? ""}"><b>${figures(b)}</b><span>${s}</span></div>`).join("");
}

const isSynthetic = (r) => get(SOURCE, r) === "synthetic";
const isNoisy = (r) => get("noise", r);
const isTooLarge = (r) => get("predicted/fits", r) === false && get("speedup", r) == null;
const MARKS = { synthetic: isSynthetic, noisy: isNoisy, "GPU troubled": (r) => get("gpu_trouble", r), "does not fit": isTooLarge,
  "impossible times": (r) => round(r, "time")?.isImpossible };
const marks = (r) => Object.keys(MARKS).filter((name) => MARKS[name](r)).map((name) => ` <span class="mark">${name}</span>`).join("");
const judged = (text, isGood) => `<span class="${isGood ? "good" : "bad"}">${text}</span>`;
const NAMES = { speedup_wall: "speedup per batch", speedup_duration: "speedup per level", "predicted/speedup_wall": "predicted wall", [TPS]: "tokens/s",
  [TPOT]: "TPOT, ms", "predicted/gamma": "best gamma", "predicted/break_even_alpha": "pays from alpha" };

// A column of a table: { key, name, isText, cell }.
function column(key) {
  const name = NAMES[key] ?? key.replace("speculative/", ""), isText = !numeric(key), ratio = key.includes("speedup");
  const mark = key === "speedup" ? marks : () => "";
  const cell = (r) => (ratio && get(key, r) != null ? judged(`${get(key, r).toFixed(2)}x`, get(key, r) > 1) + mark(r) : escapeText(figure(get(key, r))));
  return { key, name, isText, cell };
}

function table(runs, columns) {
  const cell = (tag, { isText, key }, text) => `<${tag} class="${isText ? "words" : ""}" data-key="${key ?? ""}">${text}</${tag}>`;
  const head = columns.map((c) => cell("th", c, c.name)).join("");
  return `<table><tr>${head}</tr>${runs.map((r) => `<tr>${columns.map((c) => cell("td", c, c.cell(r))).join("")}</tr>`).join("")}</table>`;
}

// The fastest of each place, by what was measured, or by what is predicted where nothing was.
function drawFastest(done) {
  const measured = done.filter((r) => get(TPS, r) != null), isMeasured = measured.length > 0;
  const speedup = isMeasured ? "speedup" : "predicted/speedup", rank = isMeasured ? TPS : speedup;
  const candidates = isMeasured ? measured : done.filter((r) => get(speedup, r) != null && !isTooLarge(r));
  $("fastest").hidden = !candidates.length;
  if (!candidates.length) return;
  const places = [...GIVEN.filter((k) => differ(k, candidates)), "batch.context_len", "batch.size", ...LOADS].filter((k) => columns[k]);
  const better = (a, b) => isSynthetic(b) - isSynthetic(a) || get(rank, a) - get(rank, b); // what was drawn comes last
  const best = d3.rollups(candidates, (of) => d3.greatest(of, better), (r) => places.map((k) => get(k, r)).join()).map(([, r]) => r);
  best.sort((a, b) => places.map((k) => byValue(get(k, a), get(k, b))).find((order) => order) ?? 0);
  const settings = data.settings.filter((k) => !places.includes(k) && !k.startsWith("data.") && differ(k, candidates)).slice(0, 6);
  const plain = (r) => get("autoregressive/tokens_per_second", r), isFaster = (r) => get(speedup, r) > 1;
  const winner = (r) => (isFaster(r) ? "speculative" : `autoregressive${plain(r) ? `, ${figure(plain(r))} tokens/s` : ""}`);
  const command = (r) => `<button data-run="${r}">copy</button> <code>${escapeText(get("command", r))}</code>`;
  $("fastest").querySelector(".table").innerHTML = table(best, [
    ...places.map(column), { name: "faster", isText: true, cell: (r) => judged(winner(r), isFaster(r)) },
    { ...column(speedup), name: isMeasured ? "best speedup" : "best predicted speedup" },
    ...(isMeasured ? [...Object.keys(PER).slice(1), TPS, TPOT] : PREDICTED).filter((k) => columns[k]).map(column), ...settings.map(column), { name: "command", isText: true, cell: command },
  ]);
  $("fastest").querySelectorAll("button").forEach((b) => { b.onclick = () => copy(get("command", Number(b.dataset.run)), b); });
}

// Control and other invisible characters are escaped, so that a text cannot hide or reorder anything.
const visible = (text) => text.replace(/[^\P{C}\n\t]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
const sampled = Object.keys(data.samples);

// The first row of a run: the end of its prompt, and its continuation with the accepted proposals marked.
function drawGenerated() {
  $("generated").hidden = !sampled.length;
  if (!sampled.length) return;
  const sample = data.samples[state.run] ?? data.samples[sampled[0]], [text, note] = ["text", "note"].map((name) => $("generated").querySelector("." + name));
  const span = (kind, part) => `<span class="${kind}">${escapeText(visible(part ?? ""))}</span>`;
  const parts = sample.rounds.map((r) => span("accepted", r.accepted.join("")) + span("bonus", r.bonus));
  const written = sample.speculative ?? sample.autoregressive;
  text.innerHTML = span("prompt", sample.prompt_end) + (parts.length ? parts.join("") : span("bonus", written));
  note.textContent = !parts.length ? "Grey: the end of the prompt."
    : `Grey: the end of the prompt of row ${sample.row}. Green: proposals of the draft that the target accepted. The rest: its own tokens, one at the end of each round.` +
      (sample.left_out ? ` ${sample.left_out} more rounds: magicdec show.` : "");
}

function drawRuns(runs) {
  const key = state.sort.replace(/^-/, ""), sign = state.sort.startsWith("-") ? -1 : 1, box = $("runs").querySelector(".table");
  const speedups = Object.keys(PER), rest = [...FIGURES, "lossless/identical", "reason"];
  const predicted = runs.some((r) => get(TPS, r) != null) ? [] : PREDICTED; // a measured run has one gamma
  const keys = [...new Set(["id", "status", ...speedups, ...data.settings.slice(0, 8), ...predicted, ...rest])].filter((k) => columns[k]);
  const order = (a, b) => (get(key, a) == null) - (get(key, b) == null) || sign * byValue(get(key, a), get(key, b));
  const arrow = (k) => (k !== key ? "" : sign < 0 ? " ↓" : " ↑");
  const more = runs.length > MAX_LINES ? `<p class="note">${MAX_LINES} of ${thousands(runs.length)}; filter or sort to see others</p>` : "";
  box.innerHTML = table([...runs].sort(order).slice(0, MAX_LINES), keys.map(column).map((c) => ({ ...c, name: c.name + arrow(c.key) }))) + more;
  box.querySelectorAll("th").forEach((th) => {
    th.onclick = () => set({ sort: state.sort === "-" + th.dataset.key ? th.dataset.key : "-" + th.dataset.key });
  });
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
  history.replaceState(null, "", address({}));
  draw();
}

let waiting;
function soon(act) { // once, after the last of several events
  clearTimeout(waiting);
  waiting = setTimeout(act, 150);
}

function menu(id, options) {
  const select = $(id), [names, values] = [options.map((o) => o.name ?? (o || "nothing else")), options.map((o) => o.value ?? o)];
  select.innerHTML = values.map((v, i) => `<option value="${escapeText(v)}">${escapeText(names[i])}</option>`).join("");
  select.onchange = () => set({ [id]: select.value });
}

const PANELS = { overview, pareto, acceptances, prediction, steps, underload };

// Draw a panel as wide as it is, unless it has been drawn at this width; without anything to show it takes no room.
function drawPanel(id, done, widths) {
  const box = $(id).querySelector(".plot"), width = box.clientWidth;
  if ($(id).hidden || widths[id] === width) return;
  const drawn = PANELS[id](done, (widths[id] = width), state);
  box.replaceChildren(...(drawn ? [drawn] : []));
  $(id).hidden = !drawn;
}

function draw() {
  for (const select of document.querySelectorAll("select")) select.value = state[select.id] ?? "";
  for (const k of picked) $(`pick:${k}`).classList.toggle("active", state[`pick:${k}`] !== "");
  if ($("where").value !== state.where) $("where").value = state.where;
  const runs = chosen(), done = runs.filter((r) => get("status", r) === "done"), widths = {};
  drawTiles(runs, done);
  for (const id in PANELS) $(id).hidden = false;
  for (const id in PANELS) drawPanel(id, done, widths);
  for (const id in PANELS) drawPanel(id, done, widths); // those that have gained room
  drawFastest(done);
  drawGenerated();
  drawRuns(runs);
  document.body.dataset.shown = runs.length; // the page is drawn
}

function start() {
  readAddress();
  $("title").textContent = data.title;
  $("made").textContent = `${thousands(count(all))} run${count(all) === 1 ? "" : "s"}, ${data.made}`;
  $("picks").innerHTML = picked.map((k) => `<label>${escapeText(k)}<select id="pick:${escapeText(k)}"></select></label>`).join("");
  const values = (k) => distinct(k, all).filter((v) => v != null).map((v) => ({ value: String(v), name: figure(v) }));
  for (const k of picked) menu(`pick:${k}`, [{ value: "", name: "all" }, ...values(k)]);
  const menus = { statistic: ["median", "best", "worst"], value: FIGURES, x: axes, y: ["", ...axes], colour: ["", ...axes],
    acceptance: ["acceptance_rate", "acceptance_length", "alpha"].filter(numeric), along: axes, curves: ["", ...axes],
    compared: comparable, unit: UNITS, bars: ["", ...axes], seen: SEEN, load: LOADS,
    run: sampled.map((id) => ({ value: id, name: [id, ...label(columns.id.indexOf(id)).split("\n")].join(" ").trim().slice(0, 110) })) };
  for (const id in menus) menu(id, menus[id]);
  $("where").oninput = () => soon(() => set({ where: $("where").value }));
  $("clear").onclick = () => set({ ...defaults });
  addEventListener("hashchange", () => { readAddress(); draw(); });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's keyboard changes the height alone
    width = innerWidth;
    soon(draw);
  });
  draw();
}

start();
