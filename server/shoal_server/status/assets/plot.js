// Drawing of the charts that charts.js describes, by uPlot, which is loaded once the page is painted.
// Values are read by pointer and by keyboard. Colours are those of the style sheet.
"use strict";

const LIBRARY = ["/vendor/uPlot.iife.min.js", "/vendor/uPlot.min.css"];
const PLOT_HEIGHT = 150;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const STEPS = Array.from({ length: 14 }, (_, power) => [1, 2, 5].map((n) => n * 10 ** power)).flat();
const KEYS = { ArrowLeft: (i) => i - 1, ArrowRight: (i) => i + 1, Home: () => 0, End: (_, last) => last,
  PageUp: (i) => i - 10, PageDown: (i) => i + 10 };

// The plot in each figure.
const plots = new Map();
const library = { state: "" };

function loadLibrary() {
  if (library.state) return;
  library.state = "loading";
  const parts = [h("script", { src: LIBRARY[0] }), h("link", { rel: "stylesheet", href: LIBRARY[1] })];
  const loaded = parts.map((part) => new Promise((done, failed) => {
    part.addEventListener("load", done);
    part.addEventListener("error", failed);
  }));
  document.head.append(...parts);
  Promise.all(loaded).then(() => { library.state = "loaded"; drawCharts(); })
    .catch(() => { library.state = ""; }); // The next update tries again.
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --- axes ---

// About `room` round values from `low` to `high`.
function roundValues(low, high, room) {
  const rough = (high - low) / Math.max(1, room);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((each) => each >= rough);
  const values = [];
  for (let i = Math.ceil(low / step); i * step <= high; i += 1) values.push(Number((i * step).toPrecision(12)));
  return values;
}

// Round values of a logarithmic scale: powers of ten, with 2 and 5 times those if there is room.
function logValues(low, high, room) {
  if (high / low < 5) return roundValues(low, high, room);
  const values = [];
  const decades = Math.log10(high / low);
  const each = Math.ceil(decades / Math.max(1, room));
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
    const within = decades < room / 2 ? [1, 2, 5] : power % each === 0 ? [1] : [];
    values.push(...within.map((n) => Number((n * 10 ** power).toPrecision(12))));
  }
  return values.filter((value) => value >= low && value <= high);
}

function timeText(unix_s, increment_s) {
  const time = timeOf(unix_s);
  if (increment_s >= 86400 || time.getHours() + time.getMinutes() + time.getSeconds() === 0) return moment(time).slice(5, 10);
  return increment_s < 60 ? clockOf(time) : clockOf(time).slice(0, 5);
}

function axes(plot) {
  const look = { font: FONT, stroke: () => colour("--muted"),
    grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, gap: 4 };
  const widest = (u, values) => 10 + 6.2 * Math.max(0, ...(values || []).map((value) => value.length));
  return [{
    ...look, size: 22, space: 64, ...(plot.chart.axis === "step" ? { incrs: STEPS } : {}),
    values: (u, splits, axis, space, increment) => splits.map((value) => (plot.chart.axis === "time"
      ? timeText(value, increment) : increment % 1000 === 0 ? compact(value) : count(value))),
  }, {
    ...look, size: widest, filter: (u, splits) => splits,
    splits: (u, axis, low, high) => (plot.chart.isLog ? logValues : roundValues)(low, high, 4),
    values: (u, splits) => splits.map((value) => plot.chart.write(value)),
  }];
}

// --- one chart ---

function drawMarks(u, { changes, across }) {
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  u.ctx.lineWidth = devicePixelRatio;
  for (const change of changes) {
    if (change.unix_s < across[0] || change.unix_s > across[1]) continue;
    const x = Math.round(u.valToPos(change.unix_s, "x", true));
    if (x < left || x > left + width) continue;
    u.ctx.strokeStyle = colour(change.lost.length ? "--bad" : "--good");
    u.ctx.beginPath();
    u.ctx.moveTo(x, top);
    u.ctx.lineTo(x, top + height);
    u.ctx.stroke();
  }
  u.ctx.restore();
}

function dataOf({ lines }) {
  const tables = lines.map(({ rows }) => [rows.map(([x]) => x), rows.map(([, y]) => y)]);
  return uPlot.join(tables);
}

function options(plot) {
  const { chart, node } = plot;
  return {
    width: Math.max(120, node.clientWidth), height: PLOT_HEIGHT, padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, sync: { key: chart.axis, scales: ["x", null] },
      points: { size: 7, fill: (u, i) => colour(plot.chart.lines[i - 1].colour), stroke: () => colour("--surface"), width: 1.5 } },
    scales: {
      x: { time: chart.axis === "time", range: () => (plot.chart.across[0] < plot.chart.across[1]
        ? plot.chart.across : [plot.chart.across[0] - 1, plot.chart.across[1] + 1]) },
      y: { distr: chart.isLog ? 3 : 1, range: () => plot.chart.height },
    },
    axes: axes(plot),
    series: [{}, ...chart.lines.map((each) => ({ width: 1.6, stroke: () => colour(each.colour),
      points: { show: (u) => u.data[0].length < 3 } }))],
    hooks: { drawAxes: [(u) => drawMarks(u, plot.chart)], setCursor: [() => read(plot)] },
  };
}

// The value of a line at x, or the last one before.
function valueAt({ rows }, x) {
  const row = rows.findLast(([at]) => at <= x);
  return row ? row[1] : null;
}

const valuesOf = ({ lines }) => lines.flatMap(({ rows }) => rows.map(([, y]) => y));

function rangeOf(chart) {
  const values = valuesOf(chart);
  return `${chart.write(Math.min(...values))} to ${chart.write(Math.max(...values))}${chart.axis === "step" ? ", over steps" : ""}`;
}

// Writes the values at the cursor, or the newest ones, under the chart.
function read(plot) {
  const { u, chart, node, figure } = plot;
  if (!u) return;
  const { idx } = u.cursor;
  const x = u.data[0][idx];
  const isAt = isNumber(x);
  const at = !isAt ? "" : chart.axis === "step" ? `step ${count(x)}`
    : [clockOf(timeOf(x)), isNumber(chart.stepAt(x)) && `step ${count(chart.stepAt(x))}`].filter(Boolean).join(", ");
  const last = isAt ? x : Infinity;
  const change = isAt && chart.changes.findLast((c) => {
    const [from, to] = [u.data[0][idx - 1] ?? -Infinity, u.data[0][idx + 1] ?? Infinity];
    return c.unix_s > (from + x) / 2 && c.unix_s <= (x + to) / 2;
  });
  const values = chart.lines.map((each) => h("span", { class: "value" },
    chart.lines.length > 1 && h("i", { style: { background: `var(${each.colour})` } }),
    `${each.name ? `${each.name} ` : ""}${chart.write(valueAt(each, last))}`));
  const parts = [at && h("b", null, at), chart.lines.length > 1 || isAt ? values : rangeOf(chart), change && h("span", { class: "change" }, change.line)];
  const readout = figure.querySelector(".readout");
  morphChildren(readout, [...h("p", null, parts).childNodes]);
  node.setAttribute("aria-valuetext", isAt ? readout.textContent : chart.write(valueAt(chart.lines[0], last)));
  node.setAttribute("aria-valuenow", String(isAt ? idx : u.data[0].length - 1));
}

function describe(plot) {
  const { chart, node, figure, u } = plot;
  const values = valuesOf(chart);
  const own = chart.lines[0].rows.length ? chart.lines[0].rows : chart.lines.at(-1).rows;
  const over = chart.axis === "step" ? `to step ${count(own.at(-1)[0])}` : `over ${duration(chart.across[1] - chart.across[0])}`;
  node.setAttribute("aria-label", `${chart.title} from ${chart.write(own[0][1])} to ${chart.write(own.at(-1)[1])} ${over}, `
    + `between ${chart.write(Math.min(...values))} and ${chart.write(Math.max(...values))}`);
  node.setAttribute("aria-valuemax", String(u.data[0].length - 1));
  figure.querySelector(".newest").textContent = chart.write(own.at(-1)[1]);
  const log = figure.querySelector("[data-scale]");
  log.hidden = !chart.mayBeLog;
  log.setAttribute("aria-pressed", String(chart.isLog));
  read(plot);
}

// Empties a figure and makes its plot.
function newPlot(figure, chart) {
  const node = h("div", { class: "plot", tabindex: "0", role: "slider", "aria-valuemin": "0" });
  figure.replaceChildren(
    h("figcaption", null, h("b", { title: chart.title }, chart.title), h("span", { class: "newest" }),
      h("span", { class: "tools" }, h("button", { type: "button", "data-scale": chart.title, title: "Logarithmic scale" }, "log"),
        h("button", { type: "button", "data-export": "csv", title: "Values that are shown, as a file for spreadsheets" }, "CSV"),
        h("button", { type: "button", "data-export": "png", title: "Picture of this chart" }, "PNG"))),
    node, h("p", { class: "readout" }));
  const plot = { figure, node, chart, u: null, width: 0 };
  node.addEventListener("keydown", (event) => moveCursor(event, plot));
  node.addEventListener("blur", () => plot.u && plot.u.setCursor({ left: -10, top: -10 }));
  return plot;
}

function moveCursor(event, { u }) {
  const last = u.data[0].length - 1;
  if (event.key === "Escape") u.setCursor({ left: -10, top: -10 });
  if (!KEYS[event.key]) return;
  event.preventDefault();
  const from = u.cursor.idx ?? (event.key === "ArrowRight" ? -1 : last + 1);
  const to = Math.min(last, Math.max(0, KEYS[event.key](from, last)));
  // Kept inside the plot: at both ends the cursor would otherwise be outside.
  u.setCursor({ left: Math.min(u.over.clientWidth - 1, Math.max(0, u.valToPos(u.data[0][to], "x"))), top: 4 });
}

const shapeOf = ({ axis, isLog, lines }) => JSON.stringify([axis, isLog, lines.map(({ name, colour: of }) => [name, of])]);

function draw(plot, chart) {
  const isNew = !plot.u || shapeOf(plot.chart) !== shapeOf(chart);
  plot.chart = chart;
  if (isNew) {
    if (plot.u) plot.u.destroy();
    plot.u = new uPlot(options(plot), dataOf(chart), plot.node);
    resized.observe(plot.node);
  } else {
    plot.u.setData(dataOf(chart));
  }
  describe(plot);
}

const resized = new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => {
  const plot = plots.get(target.parentElement);
  const width = Math.floor(contentRect.width);
  if (plot && plot.u && width && width !== plot.u.width) plot.u.setSize({ width, height: PLOT_HEIGHT });
}));

// Draws the charts of the job that the page shows, as far as they are not drawn already.
function drawCharts() {
  const job = page.state && page.state.job && page.state.job.detail.summary.job;
  const compare = document.getElementById("compare");
  if (job && compare) listOthers(compare, job);
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  if (!job || figures.length === 0) return;
  if (library.state !== "loaded") {
    // Two frames later the page is painted.
    requestAnimationFrame(() => requestAnimationFrame(loadLibrary));
    return;
  }
  for (const [figure, plot] of plots) {
    if (figure.isConnected) continue;
    plot.u.destroy();
    plots.delete(figure);
  }
  const current = new Map((chartsOf(job) || []).map((chart) => [chart.key, chart]));
  for (const figure of figures) {
    const chart = current.get(figure.dataset.chart);
    if (!chart) continue;
    if (!plots.has(figure)) plots.set(figure, newPlot(figure, chart));
    const plot = plots.get(figure);
    if (!plot.u || plot.chart !== chart) draw(plot, chart);
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-scale]");
  if (!button) return;
  const { scale } = button.dataset;
  if (!chosen.linear.delete(scale)) chosen.linear.add(scale);
  drawCharts();
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { u } of plots.values()) u.redraw();
});
