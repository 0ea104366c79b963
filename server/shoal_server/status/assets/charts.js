// Charts of a job's figures, from /api/v1/jobs/JOB/history, which is fetched every few seconds. This
// file selects the charts and their values; plot.js draws them.
"use strict";

const HISTORY_EACH_MS = 5000;
const RANGES = [[900, "15 min"], [3600, "1 h"], [21600, "6 h"], [0, "All"]];
const COLOURS = ["--accent", "--good", "--info", "--warn", "--bad", "--idle", "--muted", "--text"];
const LOSS = /(^|[^a-z])loss/i;
// A first step counts as an outlier from this multiple of the highest other value on.
const OUTLIER = 2;

const histories = new Map();
// Choices of the reader. `linear`: titles of charts with a linear scale instead of a logarithmic one.
const chosen = { range_s: 0, other: "", linear: new Set() };

// The job's newest known history; fetches it again when that is due, or if another part of it is
// wanted: the newest seconds have shorter intervals than the whole life. Until the answer arrives,
// the known history is shown.
function historyOf(job) {
  const known = histories.get(job) || { asked_ms: 0, range_s: 0, history: null };
  histories.set(job, known);
  // A job to compare with may have been at the same steps at another time: all of it is shown.
  const range_s = job === chosen.other ? 0 : chosen.range_s;
  if (known.range_s !== range_s || Date.now() - known.asked_ms > HISTORY_EACH_MS) {
    Object.assign(known, { asked_ms: Date.now(), range_s });
    fetch(`/api/v1/jobs/${encodeURIComponent(job)}/history${range_s ? `?last_s=${range_s}` : ""}`)
      .then((response) => (response.ok ? response.json() : null))
      .catch(() => null) // The connection is lost: the head of the page says so.
      .then((found) => {
        if (!found || known.range_s !== range_s) return;
        known.history = found;
        drawCharts();
      });
  }
  return known.history;
}

function forgetHistories(kept) {
  for (const job of histories.keys()) if (!kept.includes(job)) histories.delete(job);
}

// --- lines ---

const middles = (series) => series.unix_s.map((unix_s) => unix_s + series.interval_s / 2);

function line(name, xs, ys, more) {
  const rows = xs.map((x, i) => [x, isNumber(ys[i]) ? ys[i] : null]);
  return { name, rows, colour: COLOURS[0], ...more };
}

// Values of a series over steps. Steps that were taken again have their newest values.
function overSteps(series, ys) {
  const rows = [];
  series.step.forEach((step, i) => {
    if (!isNumber(ys[i])) return;
    while (rows.length && rows.at(-1)[0] >= step) rows.pop();
    rows.push([step, ys[i]]);
  });
  return { xs: rows.map(([x]) => x), ys: rows.map(([, y]) => y) };
}

// Positions of the first steps of generations. First steps take long for other reasons than later
// ones, so the scale may leave them out.
function firstSteps(series, xs) {
  return new Set(xs.filter((_, i) => i === 0 || series.generation[i] !== series.generation[i - 1]));
}

function stepTimes(series, xs) {
  const ranks = series.step_s_by_rank;
  const skips = { skipped: firstSteps(series, xs) };
  if (ranks.length > 1 && ranks.length <= 8 && !series.slowest_step_s.some((slowest, i) =>
    isNumber(slowest) && slowest > 1.001 * Math.max(...ranks.map((rank) => rank[i] || 0)))) {
    return ranks.map((values, rank) => line(`rank ${rank}`, xs, values, { colour: COLOURS[rank], ...skips }));
  }
  return [line("median", xs, series.step_s, skips), line("slowest", xs, series.slowest_step_s, { colour: "--warn", ...skips })];
}

// Seconds that each change took, at the interval in which it came.
function pauses(series, changes) {
  return series.unix_s.map((unix_s) => {
    const found = changes.filter((c) => c.unix_s >= unix_s && c.unix_s < unix_s + series.interval_s && isNumber(c.paused_s));
    return found.length ? Math.max(...found.map((c) => c.paused_s)) : null;
  });
}

// --- charts ---

const milliseconds = (value) => (isNumber(value) ? `${significant(value * 1000)} ms` : "–");
const seconds = (value) => (isNumber(value) ? `${significant(value)} s` : "–");
// Title, name in a series, and text of a value.
const FIGURES = [["Loss", "loss", (value) => significant(value)], ["Samples per second", "samples_per_s", (value) => count(value)],
  ["Step time", "step_s", milliseconds], ["Staleness", "staleness", (value) => significant(value)]];

// Charts over time, with the job's changes of members.
function overTime({ series, changes }) {
  const xs = middles(series);
  const charts = FIGURES.map(([title, figure, write]) => ({
    title, write, axis: "time", changes,
    lines: figure === "step_s" ? stepTimes(series, xs) : [line("", xs, series[figure])],
  }));
  return [...charts, { title: "Pauses", write: seconds, axis: "time", changes, lines: [line("", xs, pauses(series, changes))] }];
}

// Charts of two jobs over steps, since they need not have run at one time.
function compared(job, history, other, others) {
  return FIGURES.map(([title, figure, write]) => ({
    title, write, axis: "step", changes: [],
    lines: [[job, history, "--accent"], [other, others, "--warn"]].map(([name, { series }, colour]) => {
      const { xs, ys } = overSteps(series, series[figure]);
      return line(name, xs, ys, { colour, skipped: figure === "step_s" ? firstSteps(series, series.step) : null });
    }),
  }));
}

// Charts of the values that the script logged under one name, over steps.
function ofLogged(job, history, other, others) {
  const same = (name) => others && others.logged.find((each) => each.name === name);
  return (history.logged || []).map((logged) => ({
    title: logged.name, key: `logged ${logged.name}`, write: significant, axis: "step", changes: [],
    lines: [line(other ? job : "", logged.steps, logged.values),
      other && same(logged.name) && line(other, same(logged.name).steps, same(logged.name).values, { colour: "--warn" })].filter(Boolean),
  }));
}

// The part of a chart that the reader has chosen; null without two values.
function fitted(chart, history) {
  const { series } = history;
  const end_s = series.unix_s.length ? series.unix_s.at(-1) + series.interval_s : 0;
  const start_s = chosen.range_s && series.unix_s.length ? end_s - chosen.range_s : -Infinity;
  const first = series.unix_s.findIndex((unix_s) => unix_s + series.interval_s > start_s);
  const from = chart.axis === "time" ? start_s : chosen.range_s ? series.step[Math.max(0, first - 1)] ?? 0 : -Infinity;
  const lines = chart.lines.map((each) => ({ ...each, rows: each.rows.filter(([x, y]) => x >= from && y !== null) }));
  const xs = lines.flatMap((each) => each.rows.map(([x]) => x));
  if (xs.length < 2) return null;
  const ys = lines.flatMap((each) => each.rows.map(([, y]) => y));
  const mayBeLog = LOSS.test(chart.title) && Math.min(...ys) > 0;
  const isLog = mayBeLog && !chosen.linear.has(chart.title);
  return {
    key: chart.key || chart.title, ...chart, lines, mayBeLog, isLog,
    across: [chart.axis === "time" && chosen.range_s ? Math.max(start_s, series.unix_s[0]) : Math.min(...xs), Math.max(...xs)],
    height: heightOf(lines, isLog), stepAt: stepsOf(series),
  };
}

// Lowest and highest value of the scale.
function heightOf(lines, isLog) {
  const usual = lines.flatMap(({ rows, skipped }) => rows.filter(([x]) => !skipped || !skipped.has(x)).map(([, y]) => y));
  const all = lines.flatMap(({ rows }) => rows.map(([, y]) => y));
  const values = usual.length > 1 && Math.max(...all) > OUTLIER * Math.max(...usual) ? usual : all;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (isLog) return [low / 1.1, high * 1.1];
  // The scale spans at least a tenth of the value, so that small changes look small.
  const span = Math.max(high - low, 0.1 * Math.abs(high)) || 1;
  const bottom = (low + high - span * 1.1) / 2;
  return [low >= 0 ? Math.max(0, bottom) : bottom, bottom + span * 1.1];
}

// The step that a job had reached at a time.
function stepsOf(series) {
  return (unix_s) => {
    const i = series.unix_s.findLastIndex((start_s) => start_s <= unix_s);
    return i < 0 ? null : series.step[i];
  };
}

// The data of a job's charts: the charts are made again only if these have changed.
const sourcesOf = (job) => [job, chosen.other, historyOf(job), chosen.other && historyOf(chosen.other), chosen.range_s, [...chosen.linear].join("\n")];
const made = { sources: [], charts: null };

// All charts of a job, as the reader has chosen them; null before the first values.
function chartsOf(job) {
  const sources = sourcesOf(job);
  if (sources.some((each, i) => each !== made.sources[i])) Object.assign(made, { sources, charts: makeCharts(job) });
  return made.charts;
}

function makeCharts(job) {
  const history = historyOf(job);
  if (!history) return null;
  const others = chosen.other && historyOf(chosen.other);
  const other = others ? chosen.other : "";
  const all = [...(other ? compared(job, history, other, others) : overTime(history)), ...ofLogged(job, history, other, others)];
  return all.map((chart) => fitted(chart, history)).filter(Boolean);
}

// Section of a job's charts, with empty figures: `drawCharts` draws into them after the page is
// updated.
function charts(job) {
  const { job: name } = job.summary;
  if (chosen.other === name) chosen.other = "";
  forgetHistories([name, chosen.other]);
  const found = chartsOf(name);
  if (!found || found.length === 0 && !chosen.range_s && !chosen.other) return null;
  const history = historyOf(name);
  const note = chosen.other ? "over steps" : history.series.unix_s.length
    ? `since ${moment(timeOf(history.series.unix_s[0]))}; a line down marks a change of members` : "";
  const ranges = RANGES.map(([range_s, text]) => h("button", { type: "button", "data-range": range_s,
    "aria-pressed": String(range_s === chosen.range_s) }, text));
  return section("Charts", note,
    h("div", { class: "choices" },
      h("span", { class: "ranges", role: "group", "aria-label": "Range" }, ranges),
      page.state.jobs.length > 1 && h("label", null, "Compare with ", h("select", { id: "compare", "data-keeps": `compare ${name}` }, h("option", { value: "" }, "no other job")))),
    found.length === 0 && h("p", { class: "empty" }, "No values in this range."),
    h("div", { class: "charts" }, found.map(({ key }) => h("figure", { class: "chart", "data-keeps": `${name} ${key}`, "data-chart": key }))));
}

// Lists the other jobs in the field in which the reader chooses one to compare with.
function listOthers(field, job) {
  const names = page.state.jobs.map((each) => each.job).filter((name) => name !== job);
  if (field.options.length !== names.length + 1 || names.some((name, i) => field.options[i + 1].value !== name)) {
    field.replaceChildren(field.options[0], ...names.map((name) => h("option", { value: name }, name)));
  }
  if (field.value !== chosen.other) field.value = chosen.other;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-range]");
  if (!button) return;
  chosen.range_s = Number(button.dataset.range);
  show(page.state);
});

document.addEventListener("change", (event) => {
  if (event.target.id !== "compare") return;
  chosen.other = event.target.value;
  show(page.state);
});
