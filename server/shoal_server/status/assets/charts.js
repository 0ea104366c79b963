// Small charts of a job's figures over time, from /api/v1/jobs/JOB/history, which is fetched every few
// seconds. Colours and sizes are in the style sheet.
"use strict";

const HISTORY_EACH_MS = 5000;
const CHART = { width: 300, height: 80 };
const MAX_MARKS = 40;

const charted = { job: "", asked_ms: 0, history: null };

// The job's newest known history; fetches it again when that is due.
function historyOf(job) {
  if (charted.job !== job) Object.assign(charted, { job, asked_ms: 0, history: null });
  if (Date.now() - charted.asked_ms > HISTORY_EACH_MS) {
    charted.asked_ms = Date.now();
    fetch(`/api/v1/jobs/${encodeURIComponent(job)}/history`)
      .then((response) => (response.ok ? response.json() : null))
      .then((found) => { if (found && charted.job === job) charted.history = found; })
      .catch(() => null); // The connection is lost: the head of the page says so.
  }
  return charted.history;
}

// One path for a line: a subpath for each run without a gap, a dot for a single point.
function pathOf(values, x, y) {
  let path = "";
  values.forEach((value, i) => {
    if (!isNumber(value)) return;
    const joins = i > 0 && isNumber(values[i - 1]);
    const at = `${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    path += joins ? `L${at}` : `M${at}l0.1 0`;
  });
  return path;
}

function chart(title, lines, series, changes, write, spanned) {
  const numbers = lines.flatMap((line) => line.values).filter(isNumber);
  if (numbers.length < 2) return null;
  const { width, height } = CHART;
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const first = series.unix_s[0];
  const last = series.unix_s.at(-1) + series.interval_s;
  const across = (unix_s) => ((unix_s - first) / (last - first || 1)) * width;
  const x = (i) => across(series.unix_s[i] + series.interval_s / 2);
  // The scale spans at least a tenth of the value, so that small changes look small.
  const span = Math.max(high - low, 0.1 * Math.abs(high)) || 1;
  const bottom = (low + high - span) / 2;
  const y = (value) => 3 + (height - 6) * (1 - (value - bottom) / span);
  const newest = lines[0].values.filter(isNumber).at(-1);
  const oldest = lines[0].values.find(isNumber);
  const shownChanges = changes.filter((c) => c.unix_s >= first && c.unix_s <= last).slice(-MAX_MARKS);
  const marks = shownChanges.map((c) => h("line", {
    class: c.lost.length ? "mark lost" : "mark", x1: across(c.unix_s), x2: across(c.unix_s), y1: 0, y2: height,
  }, h("svg:title", null, c.line)));
  const ends = spanned || { from: `${duration(last - first)} ago`, to: "now", over: `over ${duration(last - first)}` };
  const label = `${title} from ${write(oldest)} to ${write(newest)} ${ends.over}, `
    + `between ${write(low)} and ${write(high)}`;
  return h("figure", { class: "chart" },
    h("figcaption", null, h("b", null, title), h("span", null, write(newest))),
    h("div", { class: "plot" },
      h("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
        marks, lines.map((line) => h("path", { class: line.kind, d: pathOf(line.values, x, y) })))),
    h("div", { class: "axis", "aria-hidden": "true" },
      h("span", null, ends.from),
      h("span", { class: "key" }, [...lines.map((line) => line.name), `${write(low)} to ${write(high)}`].filter(Boolean).join(" · ")),
      h("span", null, ends.to)));
}

function stepTimes(series) {
  const ranks = series.step_s_by_rank;
  if (ranks.length > 1 && ranks.length <= 8 && !series.slowest_step_s.some((slowest, i) =>
    isNumber(slowest) && slowest > 1.001 * Math.max(...ranks.map((rank) => rank[i] || 0)))) {
    return ranks.map((values, rank) => ({ values, kind: `rank r${rank}`, name: rank === 0 ? `ranks 0 to ${ranks.length - 1}` : "" }));
  }
  return [{ values: series.step_s, kind: "", name: "median" },
    { values: series.slowest_step_s, kind: "slowest", name: "slowest" }];
}

function charts(job) {
  const history = historyOf(job.summary.job);
  if (!history || (history.series.unix_s.length < 2 && !(history.logged || []).length)) return null;
  const { series, changes, logged } = history;
  const one = (values) => [{ values, kind: "", name: "" }];
  const ms = (value) => (isNumber(value) ? `${significant(value * 1000)} ms` : "–");
  const drawn = [
    chart("Loss", one(series.loss), series, changes, significant),
    chart("Samples per second", one(series.samples_per_s), series, changes, count),
    chart("Step time", stepTimes(series), series, changes, ms),
    chart("Staleness", one(series.staleness), series, changes, significant),
    chart("Pauses", one(pauses(series, changes)), series, changes, (s) => (isNumber(s) ? `${significant(s)} s` : "–")),
    ...(logged || []).map(loggedChart),
  ].filter(Boolean);
  if (drawn.length === 0) return null;
  return section("Charts", `since ${moment(new Date(series.unix_s[0] * 1000))}; a line down marks a change of members`,
    h("div", { class: "charts" }, drawn));
}

// Chart of the values that the script logged under one name, over steps.
function loggedChart(logged) {
  const { steps, values, interval_steps } = logged;
  if (values.length < 2) return null;
  const axis = { unix_s: steps, interval_s: interval_steps };
  const ends = { from: `step ${count(steps[0])}`, to: `step ${count(logged.newest_step)}`, over: `to step ${count(logged.newest_step)}` };
  return chart(logged.name, [{ values, kind: "", name: "" }], axis, [], significant, ends);
}

// Seconds that each change took, at the interval in which it came.
function pauses(series, changes) {
  return series.unix_s.map((unix_s) => {
    const found = changes.filter((c) => c.unix_s >= unix_s && c.unix_s < unix_s + series.interval_s && isNumber(c.paused_s));
    return found.length ? Math.max(...found.map((c) => c.paused_s)) : null;
  });
}
