"use strict";
// Draws the plots of a report from the JSON in #data, which report/payload.py describes. Texts are set as textContent.

const data = JSON.parse(document.getElementById("data").textContent);
const many = data.runs.length > 1;
const view = { clock: "step", logX: false, smoothing: 2, range: "focus", zoom: null, at: null };
const hidden = new Set(many ? ["loss/eval/train_loss"] : []); // "panel/key" and "run/number"
const CLOCKS = { step: "Steps", tokens: "Tokens", flops: "FLOPs", seconds: "Time" };
const TIMES = [[86400 * 3, 86400, "days"], [5400, 3600, "hours"], [90, 60, "minutes"], [0, 1, "seconds"]];

// ---------------------------------------------------------------- small helpers

function make(name, attributes = {}, parent = null, text = null) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "rect", "clipPath", "title"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e21, "Z"], [1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]])
    if (size >= unit) return +(value / (letter === "K" ? 1e3 : unit)).toPrecision(4) + letter;
  if (size >= 1e3) return Math.round(value).toLocaleString("en");
  return size && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(4));
}

/** The labels of ticks, all in one form, with as many digits as tell them apart. */
function formatTicks(ticks) {
  if (Math.max(...ticks.map(Math.abs)) >= 1e-2) return ticks.map(short);
  let labels = [];
  for (let digits = 1; digits <= 4; digits++) {
    labels = ticks.map((tick) => (tick ? tick.toExponential(digits).replace(/\.?0+e/, "e") : "0"));
    if (new Set(labels).size === ticks.length) break;
  }
  return labels;
}

const exact = (value) => (Math.abs(value) >= 1e-3 && Math.abs(value) < 100 ? value.toFixed(4) : short(value));

function interpolate(x, xs, ys) {
  let low = 0, high = xs.length - 1;
  if (!(x > xs[0])) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low] || 1);
}

/** Mean over the neighbors on both sides, over fewer at the start, where a loss falls fast. */
function smoothed(values, share) {
  const widest = Math.floor(values.length * share), sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((value, i) => {
    const reach = Math.min(widest, i >> 3), end = Math.min(i + reach + 1, values.length);
    return reach ? (sums[end] - sums[i - reach]) / (end - i + reach) : value;
  });
}

/** The values of the chosen clock of a run at some steps; null if it is unknown. */
function clockOf(owner, steps) {
  if (view.clock === "step") return steps;
  const values = owner.clock[view.clock];
  return values ? steps.map((step) => interpolate(step, owner.clock.step, values)) : null;
}

const hasClock = (name) => data.runs.some((run) => name === "step" || run.clock[name]);

// ---------------------------------------------------------------- scales

function scale(low, high, start, end, log) {
  const of = log ? Math.log10 : (v) => v;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  const a = of(low), b = of(high);
  const map = (value) => start + ((of(value) - a) / (b - a)) * (end - start);
  map.invert = (pixel) => {
    const value = a + ((pixel - start) / (end - start)) * (b - a);
    return log ? 10 ** value : value;
  };
  map.ticks = (count) => (log && b - a > 1 ? logTicks(a, b, count) : linearTicks(low, high, count));
  return map;
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((n) => n * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

function logTicks(a, b, count) {
  const every = Math.max(1, Math.ceil((b - a) / count)), ticks = [];
  for (let power = Math.floor(a); power <= Math.ceil(b); power += every)
    for (const n of b - a < count / 2.5 ? [1, 2, 5] : [1]) ticks.push(n * 10 ** power);
  return ticks.filter((t) => Math.log10(t) >= a - 1e-9 && Math.log10(t) <= b + 1e-9);
}

// ---------------------------------------------------------------- what a plot shows

function lines(panel, log) {
  const shown = [];
  const share = [0, 1 / 120, 1 / 60, 1 / 30, 1 / 15, 1 / 8][view.smoothing];
  for (const curve of panel.curves) {
    if (hidden.has(`${panel.name}/${curve.key}`) || hidden.has(`run/${curve.run}`)) continue;
    const run = data.runs[curve.run], raw = clockOf(run, curve.s);
    if (!raw) continue;
    const base = { curve, run: curve.run, color: `c${curve.color % 8}`, name: curve.label, style: curve.style };
    const smooth = panel.smooth && curve.style === "line" && share > 0 && curve.s.length > 2;
    if (smooth) {
      shown.push({ ...base, xs: raw, ys: curve.v, style: "raw", quiet: true });
      shown.push({ ...base, xs: curve.ms ? clockOf(run, curve.ms) : raw, ys: smoothed(curve.m || curve.v, share), style: many && curve.name ? "faint" : "line", smooth: true });
    } else shown.push({ ...base, xs: raw, ys: curve.v, style: curve.style === "line" && curve.s.length > 400 ? "thin" : curve.style });
  }
  return shown.map((line) => positive(line, log)).filter((line) => line.xs.length);
}

/** A line without the points that a logarithmic axis cannot show. */
function positive(line, log) {
  if (!view.logX && !log) return line;
  const keep = line.xs.map((x, i) => (!view.logX || x > 0) && (!log || line.ys[i] > 0));
  return { ...line, xs: line.xs.filter((_, i) => keep[i]), ys: line.ys.filter((_, i) => keep[i]) };
}

/** Range of the x axis of all plots. */
function domain() {
  let low = Infinity, high = -Infinity;
  for (const panel of data.panels)
    for (const curve of panel.curves) {
      if (hidden.has(`run/${curve.run}`)) continue;
      const xs = clockOf(data.runs[curve.run], [curve.s[0], curve.s[curve.s.length - 1]]);
      if (!xs) continue;
      for (const x of xs) if (!view.logX || x > 0) [low, high] = [Math.min(low, x), Math.max(high, x)];
    }
  if (view.zoom) return view.zoom;
  return low > high ? [view.logX ? 1 : 0, 10] : view.logX ? [low, high] : [Math.min(0, low), high];
}

/** Range of the values. `focus` leaves out the drop in the first 6 % if the rest is hard to read with it. */
function extent(panel, shown, [x0, x1], log) {
  const all = [], late = [];
  for (const line of shown)
    line.xs.forEach((x, i) => {
      if (x < x0 || x > x1) return;
      all.push(line.ys[i]);
      if (x > x0 + 0.06 * (x1 - x0)) late.push(line.ys[i]);
    });
  if (!all.length) return { low: log ? 1 : 0, high: log ? 10 : 1 };
  let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b)), above = null;
  if (panel.low && view.range === "focus" && !view.logX && late.length >= 20) {
    const lateLow = late.reduce((a, b) => Math.min(a, b)), lateHigh = late.reduce((a, b) => Math.max(a, b));
    if (high > lateHigh + 0.35 * (lateHigh - lateLow)) { above = high; high = lateHigh; }
    low = Math.min(lateLow, low);
  }
  if (log) return { low: low * 0.93, high: high * 1.07, above };
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  return { low: panel.zero || (low >= 0 && low < room * 3) ? 0 : low - room, high: high + room, above };
}

// ---------------------------------------------------------------- drawing

const plots = data.panels.map((panel) => {
  const card = make("section", { class: `plot card${panel.name === "loss" ? " wide" : ""}`, id: `plot-${panel.name}` }, document.getElementById("plots"));
  const head = make("div", { class: "head" }, card);
  make("h3", {}, head, panel.title);
  if (panel.unit) make("span", { class: "unit" }, head, panel.unit);
  const plot = { panel, card, above: make("span", { class: "unit" }, head), canvas: make("div", { class: "canvas" }, card) };
  legend(plot, head);
  listen(plot);
  return plot;
});

function legend(plot, head) {
  const entries = [];
  for (const curve of plot.panel.curves)
    if (curve.name && !entries.some((entry) => entry.key === curve.key))
      entries.push({ key: curve.key, name: curve.name, color: many ? "c7" : `c${curve.color % 8}`, style: curve.style });
  if (entries.length < 2) return;
  const box = make("div", { class: "legend" }, head);
  for (const entry of entries) chip(box, `${plot.panel.name}/${entry.key}`, entry);
}

function chip(box, id, entry) {
  const button = make("button", { class: `chip ${entry.color}`, type: "button", "aria-pressed": String(!hidden.has(id)) }, box);
  const icon = make("svg", { viewBox: "0 0 18 8", "aria-hidden": "true" }, button);
  make("path", { class: `curve ${entry.style}`, d: "M1 4H17" }, icon);
  if (entry.style === "dots") make("circle", { class: "dot", cx: 9, cy: 4, r: 3.5 }, icon);
  button.append(entry.name);
  button.onclick = () => {
    if (!hidden.delete(id)) hidden.add(id);
    button.setAttribute("aria-pressed", String(!hidden.has(id)));
    drawAll();
  };
}

function draw(plot) {
  const { panel, canvas } = plot;
  const width = Math.max(canvas.clientWidth, 200), wide = panel.name === "loss";
  const height = wide ? Math.min(430, Math.max(260, width * 0.4)) : 196;
  const log = view.range === "log" || panel.log;
  const shown = lines(panel, log);
  const range = domain(), { low, high, above } = extent(panel, shown, range, log);
  const top = !many && data.runs[0].stages.length ? 24 : 10; // the names of stages take a row
  const strip = !many && data.runs[0].machines.length ? 16 : 0;
  const probe = scale(low, high, height - 26 - strip, top, log), yTicks = probe.ticks(height / 46).filter((t) => t >= low && t <= high);
  const left = 12 + 7 * Math.max(2, ...formatTicks(yTicks).map((text) => text.length));
  const x = scale(range[0], range[1], left, width - 14, view.logX), y = probe;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "img", "aria-label": `${panel.title}, ${shown.length} curves` });
  const clip = `clip-${panel.name}`;
  make("rect", { x: left, y: 4, width: width - 8 - left, height: height - 30 }, make("clipPath", { id: clip }, svg));
  axes(svg, x, y, yTicks, { left, width, height, range, wide });
  const inside = make("g", { "clip-path": `url(#${clip})` }, svg);
  stages(inside, x, range, { left, right: width - 14, bottom: height - 26 - strip });
  machines(inside, x, range, { left, right: width - 14, bottom: height - 26, strip });
  marks(inside, panel, x, range, height - strip);
  for (const line of shown) {
    const d = line.xs.map((v, i) => `${i ? "L" : "M"}${x(v).toFixed(1)} ${y(line.ys[i]).toFixed(1)}`).join("");
    make("path", { class: `curve ${line.color} ${line.style}`, d: line.xs.length === 1 ? `${d}h0.1` : d }, inside);
    if (line.style === "dots" && line.xs.length <= 60)
      line.xs.forEach((v, i) => make("circle", { class: `dot ${line.color}`, cx: x(v), cy: y(line.ys[i]), r: wide ? 4 : 3 }, inside));
  }
  plot.above.textContent = above ? `not shown: higher values at the start, up to ${exact(above)}` : "";
  canvas.replaceChildren(svg);
  Object.assign(plot, { svg, x, y, shown, left, width, height, overlay: make("g", {}, svg) });
}

function axes(svg, x, y, yTicks, { left, width, height, range, wide }) {
  const axis = make("g", { class: "axis" }, svg);
  const labels = formatTicks(yTicks);
  yTicks.forEach((tick, i) => {
    make("line", { x1: left, x2: width - 14, y1: y(tick), y2: y(tick) }, axis);
    make("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, axis, labels[i]);
  });
  make("line", { class: "base", x1: left, x2: width - 14, y1: height - 26, y2: height - 26 }, axis);
  const [divisor, unit] = view.clock === "seconds" ? TIMES.find(([from]) => range[1] >= from).slice(1) : [1, ""];
  const inUnits = scale(range[0] / divisor, range[1] / divisor, left, width - 14, view.logX);
  const name = unit || (wide ? CLOCKS[view.clock].replace(/^[ST]/, (letter) => letter.toLowerCase()) : "");
  const xTicks = inUnits.ticks(width / 95);
  let free = left - 20;
  for (const tick of xTicks) {
    const at = inUnits(tick), text = short(tick) + (name && tick === xTicks[xTicks.length - 1] ? ` ${name}` : "");
    const half = text.length * 3.4, middle = Math.min(at, width - half - 2);
    if (middle - half < free) continue;
    make("text", { x: middle, y: height - 8, "text-anchor": "middle" }, axis, text);
    free = middle + half + 8;
  }
}

/** The bands of a run that are in sight: each of `items` from its step to the next one's. */
function bands(run, items, x, range, left, right) {
  const at = clockOf(run, items.map((item) => item.step)) || [];
  const edge = (i) => (i < at.length && at[i] < range[1] ? (i && at[i] > range[0] ? x(at[i]) : left) : right);
  return at.map((_, i) => ({ item: items[i], i, from: edge(i), to: edge(i + 1) })).filter((band) => band.to > band.from);
}

/** The first of the texts that fits into a band, in its middle. */
function label(inside, { from, to }, y, texts) {
  const text = texts.find((text) => 6.5 * text.length + 6 < to - from);
  if (text) make("text", { class: "stage", x: (from + to) / 2, y, "text-anchor": "middle" }, inside, text);
}

/** Bands with labels at the stages of one run, or a line at the begin of each later stage of several. */
function stages(inside, x, range, { left, right, bottom }) {
  data.runs.forEach((run, number) => {
    if (hidden.has(`run/${number}`)) return;
    for (const band of bands(run, run.stages, x, range, left, right)) {
      const { item, i, from, to } = band;
      if (many) {
        if (from > left)
          make("title", {}, make("line", { class: `mark edge c${number % 8}`, x1: from, x2: from, y1: 4, y2: bottom }, inside), `${run.name}: ${item.text}`);
        continue;
      }
      if (i % 2) make("rect", { class: "band", x: from, width: to - from, y: 4, height: bottom - 4 }, inside);
      label(inside, band, 16, [item.label, String(i + 1)]);
    }
  });
}

/** The machines of one run, as a strip above the x axis. Machines of one kind share a color and a number. */
function machines(inside, x, range, { left, right, bottom, strip }) {
  if (!strip) return;
  for (const band of bands(data.runs[0], data.runs[0].machines, x, range, left, right)) {
    const { item, from, to } = band;
    make("rect", { class: `machine c${(item.kind + 3) % 8}`, x: from, width: to - from, y: bottom - strip, height: strip }, inside);
    label(inside, band, bottom - 4, [item.label, String(item.kind + 1)]);
  }
}

/** The texts of the stage and the machine of one run whose bands lie at a value of the clock. */
function bandsAt(at) {
  if (many) return [];
  const run = data.runs[0];
  return [run.stages, run.machines].map((items) => {
    const edges = clockOf(run, items.map((item) => item.step)) || [];
    return items[edges.filter((edge, i) => !i || edge < at).length - 1]?.text;
  }).filter(Boolean);
}

function marks(inside, panel, x, range, height) {
  data.runs.forEach((run, number) => {
    if (hidden.has(`run/${number}`)) return;
    const at = clockOf(run, run.marks.map((mark) => mark.step));
    if (!at) return;
    const crowded = run.marks.filter((mark) => mark.kind === "resume").length > 20 ? " crowded" : "";
    run.marks.forEach((mark, i) => {
      if (at[i] < range[0] || at[i] > range[1]) return;
      if (mark.kind !== "resume" && !["loss", "grad_norm"].includes(panel.name)) return;
      const left = x(at[i]), bottom = height - 26;
      const node = mark.kind === "resume"
        ? make("line", { class: `mark resume${crowded}`, x1: left, x2: left, y1: 4, y2: bottom }, inside)
        : make("path", { class: mark.kind, d: `M${left} ${bottom - 8}l4.5 8h-9z` }, inside);
      make("title", {}, node, (many ? `${run.name}: ` : "") + mark.text);
    });
  });
}

// ---------------------------------------------------------------- crosshair, zoom

function listen(plot) {
  const box = plot.canvas;
  const pixel = (event) => event.clientX - box.getBoundingClientRect().left;
  let from = null;
  box.onpointerdown = (event) => { from = event.pointerType === "mouse" ? pixel(event) : null; };
  box.onpointermove = (event) => {
    const at = Math.min(Math.max(pixel(event), plot.left), plot.width - 14);
    cross(plot, plot.x.invert(at));
    if (from !== null && event.buttons && Math.abs(at - from) > 5)
      make("rect", { class: "brush", x: Math.min(at, from), width: Math.abs(at - from), y: 4, height: plot.height - 30 }, plot.overlay);
  };
  box.onpointerup = (event) => {
    const at = Math.min(Math.max(pixel(event), plot.left), plot.width - 14);
    if (from !== null && Math.abs(at - from) > 12) zoom([plot.x.invert(Math.min(at, from)), plot.x.invert(Math.max(at, from))]);
    from = null;
  };
  box.onpointerleave = () => { from = null; cross(null); };
  box.ondblclick = () => zoom(null);
  box.onkeydown = (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    const at = view.at === null ? plot.left : plot.x(view.at) + direction * Math.max(2, plot.width / 100);
    cross(plot, plot.x.invert(Math.min(Math.max(at, plot.left), plot.width - 14)));
  };
}

function zoom(range) { view.zoom = range; drawAll(); }

function nearest(xs, at) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= at) low = middle; else high = middle; }
  return Math.abs(xs[high] - at) < Math.abs(at - xs[low]) ? high : low;
}

function cross(active, at = null) {
  view.at = at;
  for (const plot of plots) {
    plot.overlay.replaceChildren();
    plot.tip?.remove();
    if (at === null) continue;
    make("line", { class: "cross", x1: plot.x(at), x2: plot.x(at), y1: 4, y2: plot.height - 26 }, plot.overlay);
    if (plot === active) tip(plot, at);
  }
}

function tip(plot, at) {
  const box = plot.tip = make("div", { class: "tip" }, plot.canvas);
  const rows = plot.shown.filter((line) => !line.quiet);
  make("div", { class: "when" }, box, when(at));
  for (const text of bandsAt(at)) make("div", { class: "when" }, box, text);
  for (const line of rows) {
    const i = nearest(line.xs, at);
    if (plot.x(line.xs[i]) < plot.left - 1 || at < line.xs[0] || at > line.xs[line.xs.length - 1] * 1.02) continue;
    make("circle", { class: `dot ${line.color}`, cx: plot.x(line.xs[i]), cy: plot.y(line.ys[i]), r: 4 }, plot.overlay);
    const row = make("div", { class: line.color }, box);
    make("span", { class: "swatch" }, row, (line.name || plot.panel.title) + (line.smooth ? ", smoothed" : ""));
    make("b", {}, row, exact(line.ys[i]));
  }
  const pixel = plot.x(at), right = pixel > plot.width / 2;
  box.style.top = "10px";
  box.style[right ? "right" : "left"] = `${right ? plot.width - pixel + 14 : pixel + 14}px`;
}

function when(at) {
  if (view.clock === "seconds") {
    const [, divisor, unit] = TIMES.find(([from]) => at >= from);
    return `${+(at / divisor).toPrecision(3)} ${unit}`;
  }
  return view.clock === "step" ? `step ${Math.round(at).toLocaleString("en")}` : `${short(at)} ${CLOCKS[view.clock]}`.replace("T", "t");
}

// ---------------------------------------------------------------- tools

function choice(box, name, options, current, choose) {
  const group = make("span", { class: "group", role: "group", "aria-label": name }, box);
  make("span", {}, group, name);
  const row = make("span", { class: "switch" }, group);
  for (const [value, text, enabled = true] of options) {
    const button = make("button", { type: "button", "data-value": value, "aria-pressed": String(value === current) }, row, text);
    button.disabled = !enabled;
    if (!enabled) button.title = many ? "not recorded by these runs" : "not recorded by this run";
    button.onclick = () => {
      for (const other of row.children) other.setAttribute("aria-pressed", String(other === button));
      choose(value);
      drawAll();
    };
  }
}

function tools() {
  const box = document.getElementById("tools");
  const clocks = Object.entries(CLOCKS).map(([name, text]) => [name, text, hasClock(name)]);
  choice(box, "x", clocks, "step", (value) => { view.clock = value; view.zoom = null; });
  choice(box, "", [["linear", "Linear"], ["log", "Log"]], "linear", (value) => { view.logX = value === "log"; view.zoom = null; });
  choice(box, "y", [["focus", "Focus"], ["all", "All"], ["log", "Log"]], "focus", (value) => { view.range = value; });
  const group = make("label", { class: "group" }, box, "Smoothing");
  const slider = make("input", { type: "range", min: 0, max: 5, step: 1, value: view.smoothing, "aria-label": "Smoothing" }, group);
  slider.oninput = () => { view.smoothing = Number(slider.value); drawAll(); };
  const reset = make("button", { class: "single", type: "button", id: "reset" }, box, "Reset zoom");
  reset.onclick = () => zoom(null);
  if (many) {
    const runs = make("div", { class: "legend" }, box);
    data.runs.forEach((run, number) => chip(runs, `run/${number}`, { name: run.name, color: `c${number % 8}`, style: "line" }));
  }
  document.getElementById("theme").onclick = () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
      || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  };
}

function drawAll() {
  view.at = null;
  document.getElementById("reset").hidden = !view.zoom;
  for (const plot of plots) draw(plot);
  document.documentElement.dataset.drawn = String(plots.length);
}

tools();
drawAll();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
