"use strict";
const SPAN = 600, GAP = 15, NS = "http://www.w3.org/2000/svg";
const LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 18, HEIGHT = 130;
const $ = (id) => document.getElementById(id);
const root = document.documentElement;

// ---- numbers as text
const short = (x) => x >= 100 || Number.isInteger(x) ? Math.round(x).toString() : x.toFixed(1);
const number = (x) => x >= 1e9 ? short(x / 1e9) + "G" : x >= 1e6 ? short(x / 1e6) + "M" : x >= 1e4 ? short(x / 1e3) + "k" : short(x);
const seconds = (x) => x >= 10 ? x.toFixed(1) + " s" : x >= 1 ? x.toFixed(2) + " s" : x >= 0.01 ? Math.round(x * 1e3) + " ms" : +(x * 1e3).toFixed(2) + " ms";
const share = (x) => (x * 100).toFixed(x > 0 && x < 0.1 ? 1 : 0) + "%";
const bytes = (x) => number(x) + "B";
const ratio = (x) => x.toFixed(2);
const say = (format, x) => x === null || x === undefined ? "–" : format(x);
const ago = (s) => s < 90 ? Math.round(s) + " s" : s < 5400 ? Math.round(s / 60) + " min" : s < 172800 ? (s / 3600).toFixed(1) + " h" : Math.round(s / 86400) + " d";

// ---- what is shown
const TILES = [
  ["Output", "output_tps", number, "tokens/s"], ["Prompts", "prompt_tps", number, "tokens/s"], ["Running", "running", number, "requests"],
  ["Waiting", "waiting", number, "requests"], ["TTFT, median", "ttft_p50", seconds, ""], ["ITL, median", "tpot_p50", seconds, ""],
  ["KV pages in use", "kv_usage", share, ""], ["Prefix cache hits", "prefix_hits", share, "of tokens"], ["Step", "step_s", seconds, ""],
];
const CHARTS = [
  ["Throughput, tokens/s", number, [["output_tps", "output"], ["prompt_tps", "prompts"]]],
  ["Requests", number, [["running", "running"], ["waiting", "waiting"]]],
  ["Time to first token", seconds, [["ttft_p50", "median"], ["ttft_p99", "p99"]]],
  ["Time between tokens", seconds, [["tpot_p50", "median"], ["tpot_p99", "p99"]]],
  ["KV cache", share, [["kv_usage", "pages in use"], ["prefix_hits", "prefix hits"]], 1],
  ["Step time", seconds, [["step_s", "mean"]]],
  ["Steps and rows", share, [["graph_steps", "graph steps"], ["padding", "padding rows"]], 1],
  ["DP ranks in a step", share, [["even_tokens", "evenness"], ["idle_steps", "idle"]], 1],
  ["Expert balance, mean / max", ratio, [["balance", "all layers"]], 1],
  ["KV tiers: hot rows hit", share, [["tier_hits", "hits"]], 1],
  ["KV tiers: fetched, a second", bytes, [["tier_bps", "fetched"]]],
  ["Dispatch to experts, a second", bytes, [["dispatch_bps", "sent"]]],
].map(([title, format, series, top]) => ({ title, format, series, top }));
const COLUMNS = [
  ["Rank", (r) => "DP " + r.engine], ["Running", (r) => say(number, r.running)], ["Waiting", (r) => say(number, r.waiting)],
  ["KV pages in use", (r) => r.kv_usage], ["Requests", (r) => say(number, r.routed)], ["Prompt tokens", (r) => say(number, r.prompt_tokens)],
  ["Output tokens", (r) => say(number, r.generation_tokens)], ["Prefix hits", (r) => say(share, r.prefix_hits)],
  ["Routed to a hit", (r) => say(share, r.routing_hits)], ["Preempted", (r) => say(number, r.preemptions)], ["Steps", (r) => say(number, r.steps)],
  ["Ended", (r) => Object.entries(r.ended).map(([k, n]) => `${k} ${number(n)}`).join(", ") || "–"],
];

// ---- elements
const element = (parent, name, text, type) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (type) made.className = type;
  parent.append(made);
  return made;
};
const shape = (parent, name, values) => {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  parent.append(made);
  return made;
};
const COLOURS = ["var(--one)", "var(--two)"];

function build() {
  for (const tile of TILES) {
    const box = element($("tiles"), "div", undefined, "tile");
    element(box, "span", tile[0]);
    tile.place = element(box, "b", "–");
  }
  for (const chart of CHARTS) {
    chart.box = element($("charts"), "div", undefined, "chart");
    const head = element(chart.box, "h2", chart.title);
    chart.keys = chart.series.map(([, label], i) => {
      const key = element(head, "span", undefined, "key");
      element(key, "i").style.background = COLOURS[i];
      return element(key, "span", label);
    });
    chart.svg = shape(chart.box, "svg", { role: "img", "aria-label": chart.title });
    chart.svg.addEventListener("pointermove", (event) => { pointer = { chart, x: event.offsetX }; draw(); });
    chart.svg.addEventListener("pointerleave", () => { pointer = null; draw(); });
  }
  const row = element($("ranks").tHead, "tr");
  for (const [title] of COLUMNS) element(row, "th", title);
  const stops = [0, 32, 64, 96, 128, 192, 255].map((v) => `rgb(${colour(v).join()})`);
  $("scale").style.background = `linear-gradient(90deg, ${stops.join()})`;
  addEventListener("resize", () => draw());
}

// ---- charts
let points = [], pointer = null, latest = null;

function nice(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].find((lead) => lead * power >= most * 0.999) * power;
}

function draw() {
  const end = points.length ? points[points.length - 1].at : 0;
  let drawn = 0;
  for (const chart of CHARTS) {
    const known = chart.series.some(([key]) => points.some((p) => p[key] !== null && p[key] !== undefined));
    const zero = known && chart.format === bytes && !points.some((p) => chart.series.some(([key]) => p[key] > 0));
    chart.box.hidden = chart.box.style.display = known && !zero ? "" : "none";
    if (known && !zero) drawn += plot(chart, end);
  }
  root.dataset.drawn = drawn;
}

function plot(chart, end) {
  const svg = chart.svg, width = svg.clientWidth || 380, wide = width - LEFT - RIGHT, high = HEIGHT - TOP - BOTTOM;
  svg.replaceChildren();
  const top = chart.top || nice(Math.max(...points.flatMap((p) => chart.series.map(([key]) => p[key] ?? 0))));
  const span = Math.min(SPAN, Math.max(60, end - points[0].at)), x = (at) => LEFT + wide * (1 - (end - at) / span), y = (value) => TOP + high * (1 - Math.min(value, top) / top);
  for (const part of [0, 0.5, 1]) {
    shape(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: y(part * top), y2: y(part * top), class: "grid" });
    shape(svg, "text", { x: LEFT - 6, y: y(part * top) + 4, "text-anchor": "end" }).textContent = chart.format(part * top);
  }
  for (const part of [0, 0.5, 1]) {
    const anchor = part === 0 ? "end" : part === 1 ? "start" : "middle";
    shape(svg, "text", { x: x(end - part * span), y: HEIGHT - 3, "text-anchor": anchor }).textContent = part ? "-" + ago(part * span) : "now";
  }
  const shown = pointer && pointer.chart === chart ? nearest(end - (1 - (pointer.x - LEFT) / wide) * span) : null;
  if (shown) shape(svg, "line", { x1: x(shown.at), x2: x(shown.at), y1: TOP, y2: TOP + high, class: "mark" });
  let lines = 0;
  chart.series.forEach(([key, label], i) => {
    let path = "", last = null, count = 0;
    for (const p of points) {
      const value = p[key];
      if (value === null || value === undefined) { last = null; continue; }
      path += `${last !== null && p.at - last < GAP ? "L" : "M"}${x(p.at).toFixed(1)} ${y(value).toFixed(1)}`;
      if (last === null || p.at - last >= GAP) path += "h.01";
      last = p.at;
      count += 1;
    }
    if (count) {
      shape(svg, "path", { d: path, fill: "none", stroke: COLOURS[i], "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-linecap": "round" });
      lines = 1;
    }
    const value = (shown || latest || {})[key];
    chart.keys[i].textContent = `${label} ${say(chart.format, value)}` + (shown && i === 0 ? `, ${ago(end - shown.at)} ago` : "");
  });
  return lines;
}

const nearest = (at) => points.reduce((best, p) => best === null || Math.abs(p.at - at) < Math.abs(best.at - at) ? p : best, null);

// ---- now
function tiles() {
  for (const tile of TILES) {
    const [, key, format, unit] = tile;
    tile.place.textContent = say(format, latest ? latest[key] : null);
    if (unit) element(tile.place, "small", unit);
  }
}

function table(replicas) {
  const body = $("ranks").tBodies[0];
  body.replaceChildren();
  for (const replica of replicas) {
    const row = element(body, "tr");
    for (const [title, value] of COLUMNS) {
      if (title !== "KV pages in use") { element(row, "td", value(replica)); continue; }
      const cell = element(row, "td", say(share, replica.kv_usage));
      element(element(cell, "span", undefined, "meter"), "i").style.width = (replica.kv_usage || 0) * 100 + "%";
    }
  }
}

// ---- experts
function colour(v) { // 0 white-blue .. 64 (mean) mid-blue .. 255 red
  const stops = [[0, [238, 243, 250]], [64, [116, 164, 222]], [128, [250, 190, 88]], [192, [225, 87, 50]], [255, [128, 10, 38]]];
  const i = Math.max(1, stops.findIndex(([at]) => v <= at)), [a, from] = stops[i - 1], [b, to] = stops[i];
  return from.map((c, k) => Math.round(c + (to[k] - c) * (v - a) / (b - a)));
}

function experts(balance, heat) {
  $("experts").hidden = !balance && !heat;
  $("loads").hidden = !balance;
  $("heat").hidden = !heat;
  $("balance").textContent = balance ? `Balance (mean / max over expert ranks): ${ratio(balance.balancedness)} on average, ` +
    `${ratio(balance.worst)} in layer ${balance.worst_layer}.` : "";
  if (balance) {
    const most = Math.max(1, ...balance.rank_loads);
    $("bars").replaceChildren();
    balance.rank_loads.forEach((load, rank) => {
      const bar = element($("bars"), "div");
      bar.style.height = Math.max(1, load / most * 100) + "%";
      bar.title = `expert rank ${rank}: ${number(load)} choices`;
    });
  }
  if (heat) paint(heat);
}

function paint(heat) {
  const canvas = $("map"), rows = heat.layers.length, cells = Uint8Array.from(atob(heat.cells), (c) => c.charCodeAt(0));
  canvas.width = heat.columns;
  canvas.height = rows;
  canvas.style.height = Math.max(rows * 6, 48) + "px";
  const image = new ImageData(heat.columns, rows);
  cells.forEach((v, i) => image.data.set([...colour(v), 255], i * 4));
  canvas.getContext("2d").putImageData(image, 0, 0);
  const peak = Math.max(...heat.peaks.map((p) => p || 0)), layer = heat.layers[heat.peaks.indexOf(peak)];
  const rest = `: none to four times the mean of a layer. Hottest expert: ${peak.toFixed(1)} times the mean, in layer ${layer}. `;
  $("cell").textContent = rest;
  canvas.onmousemove = (event) => {
    const column = Math.floor(event.offsetX / canvas.clientWidth * heat.columns), row = Math.floor(event.offsetY / canvas.clientHeight * rows);
    const each = Math.ceil(heat.experts / heat.columns), value = cells[row * heat.columns + column] / 64;
    $("cell").textContent = `${rest} Here: layer ${heat.layers[row]}, expert ${column * each}: ${value.toFixed(2)}${value > 3.9 ? " or more" : ""}`;
  };
  root.dataset.heat = `${rows}x${heat.columns}`;
}

// ---- the loop
function show(data) {
  const about = data.about, replicas = data.replicas;
  $("model").textContent = about.model;
  document.title = about.model ? `${about.model} · rorqual` : "rorqual";
  $("state").textContent = about.state;
  $("state").className = `badge ${about.state}`;
  const age = data.at ? about.time - data.at : null, parts = [];
  if (about.layout) parts.push(about.layout, `version ${about.version}`, `up ${ago(about.time - about.started)}`, `contexts up to ${number(about.max_model_len)} tokens`);
  if (data.routing && data.routing.policy) parts.push(`routing by ${data.routing.policy}`);
  if (age !== null) parts.push(age > 12 ? `numbers are ${ago(age)} old` : "live");
  const refused = Object.values(data.refused || {}).reduce((a, b) => a + b, 0);
  if (refused) parts.push(`${number(refused)} requests refused`);
  $("about").textContent = parts.join(" · ");
  points = points.concat(data.points);
  latest = points.length ? points[points.length - 1] : null;
  points = points.filter((p) => p.at >= latest.at - SPAN);
  tiles();
  draw();
  table(replicas);
  experts(data.experts, data.heat);
  root.dataset.polls = Number(root.dataset.polls || 0) + 1;
}

async function poll() {
  const since = points.length ? points[points.length - 1].at : 0;
  try {
    const headers = $("key").value ? { Authorization: `Bearer ${$("key").value}` } : {};
    const answer = await fetch(`dashboard.json?since=${since}`, { headers, signal: AbortSignal.timeout(5000), cache: "no-store" });
    $("key").hidden = answer.status !== 401 && !$("key").value;
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    show(await answer.json());
    root.dataset.failed = "";
  } catch (error) {
    $("state").textContent = "no answer";
    $("state").className = "badge lost";
    $("about").textContent = String(error.message || error);
    root.dataset.failed = String(error.message || error);
  }
  setTimeout(poll, document.hidden ? 5000 : 1000);
}

build();
poll();
