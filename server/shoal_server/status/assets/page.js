// The live page. It shows the state from /api/v1/stream and keeps none of its own. All text goes
// into the document as text nodes, so that no name or error is ever parsed as HTML.
"use strict";

const STALE_AFTER_MS = 4000;
// More than a slow connection.
const CLOCKS_DIFFER_MS = 30000;
const SILENT_AFTER_MS = 10000;
const RETRY_MS = 1500;
const SHOWN_GENERATIONS = 12;
const SVG = "http://www.w3.org/2000/svg";
const IN_SVG = new Set(["svg", "path", "circle"]);
const FILTERED_FROM = 8;
const ENDS_WITH = 7;
const LONG_COMMAND = 300;
const TONES = {
  running: "good", training: "good", ready: "good", serving: "good", committed: "info",
  starting: "info", preparing: "info", "bringing-up": "info", joining: "info",
  waiting: "warn", settling: "warn", aborted: "bad", disconnected: "bad", halted: "bad", draining: "info", paused: "info", unreachable: "bad",
  gone: "bad", lost: "bad", failed: "bad", interrupted: "bad", quarantined: "bad",
};

// --- making and updating the document ---

function h(tag, attributes, ...children) {
  const node = IN_SVG.has(tag)
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    // Styles are set as properties: the page's policy forbids style attributes.
    if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  add(node, children);
  return node;
}

function add(node, child) {
  if (Array.isArray(child)) for (const each of child) add(node, each);
  else if (child !== undefined && child !== null && child !== false) node.append(child);
}

// Makes `old` look like `fresh` with as few changes as it takes, so that focus, selection, scroll
// position and opened details outlive an update.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  // Another script fills this element.
  const keeps = old.getAttribute("data-keeps");
  if (keeps !== fresh.getAttribute("data-keeps")) {
    old.replaceWith(fresh);
    return;
  }
  if (keeps !== null) return;
  for (const name of old.getAttributeNames()) {
    const belongsToTheReader = name === "open" && old.nodeName === "DETAILS";
    if (!fresh.hasAttribute(name) && name !== "style" && !belongsToTheReader) {
      old.removeAttribute(name);
    }
  }
  for (const name of fresh.getAttributeNames()) {
    const value = fresh.getAttribute(name);
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  // Compared only if one of the two has a style: reading a style costs more than the rest of the
  // comparison.
  if ((old.hasAttribute("style") || fresh.hasAttribute("style")) && old.style.cssText !== fresh.style.cssText) {
    old.style.cssText = fresh.style.cssText;
  }
  morphChildren(old, [...fresh.childNodes]);
}

function morphChildren(parent, fresh) {
  const old = [...parent.childNodes];
  fresh.forEach((node, i) => (i < old.length ? morph(old[i], node) : parent.append(node)));
  old.slice(fresh.length).forEach((node) => node.remove());
}

const fill = (id, ...children) =>
  morphChildren(document.getElementById(id), [...h("div", null, ...children).childNodes]);

// --- words and numbers ---

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
// Without Intl, whose data takes as long to load as the rest of the first paint.
const count = (value) => (isNumber(value) ? value.toFixed(0).replace(/\B(?=(\d{3})+$)/g, ",") : "–");

function compact(value) {
  const unit = [[1e9, "B"], [1e6, "M"], [1e3, "K"]].find(([size]) => value >= size);
  return unit ? `${(value / unit[0]).toFixed(1).replace(/\.0$/, "")}${unit[1]}` : count(value);
}

const padded = (...numbers) => numbers.map((n) => String(n).padStart(2, "0"));
const clockOf = (time) => padded(time.getHours(), time.getMinutes(), time.getSeconds()).join(":");
const moment = (time) =>
  `${padded(time.getFullYear(), time.getMonth() + 1, time.getDate()).join("-")} ${clockOf(time)}`;

function significant(value) {
  if (!isNumber(value)) return "–";
  return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-4)
    ? value.toExponential(2) : Number(value.toPrecision(4)).toString();
}

function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 129600 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
}

const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
const pill = (text) => h("span", { class: `pill ${TONES[text] || ""}` }, text);
const spoken = (kind) => kind.replaceAll("_", " ");

// The coordinator's clock ignores a suspend of its host, and corrections of the system's clock.
function timeOf(unix_s) {
  const ahead_ms = page.state ? page.received_ms - page.state.now_unix_s * 1000 : 0;
  return new Date(unix_s * 1000 + (Math.abs(ahead_ms) > CLOCKS_DIFFER_MS ? ahead_ms : 0));
}

function ago(unix_s, now_s) {
  const time = timeOf(unix_s);
  return h("time", { datetime: time.toISOString(), title: moment(time) },
    `${duration(now_s - unix_s)} ago`);
}

// --- parts of the page ---

// True if every word of the filter is in the job's name or state.
function matches(job, filter) {
  const text = `${job.job} ${job.state} ${job.shown_state}`.toLowerCase();
  return filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

// A name whose middle is left out if there is no room for all of it: names often differ at the end.
function named(name) {
  if (name.length <= ENDS_WITH * 2) return h("b", null, name);
  return h("b", { class: "cut" }, h("span", { class: "hidden" }, name),
    h("span", { "aria-hidden": "true" }, name.slice(0, -ENDS_WITH)), h("span", { "aria-hidden": "true" }, name.slice(-ENDS_WITH)));
}

function jobList(state, selected) {
  const field = document.getElementById("filter");
  field.hidden = state.jobs.length < FILTERED_FROM && !field.value;
  const shown = state.jobs.filter((job) => matches(job, field.value));
  const items = shown.map((job) => h("li", null,
    h("a", { href: `?job=${encodeURIComponent(job.job)}`, "data-job": job.job,
      "aria-current": job.job === selected ? "page" : null },
      h("span", { class: "name", title: job.job }, named(job.job), pill(job.shown_state)),
      h("small", null, `${plural(job.num_members, "member")} · step ${count(job.step)}`))));
  const note = shown.length < state.jobs.length ? `${shown.length} of ${state.jobs.length}` : "";
  return [h("h2", null, "Jobs", note && h("small", null, ` ${note}`)),
    items.length ? h("ul", null, items)
      : h("p", { class: "empty" }, state.jobs.length ? "No job matches the filter"
        : state.readiness.ready ? "No jobs yet" : "None here")];
}

function figures(job, state) {
  const { summary } = job.detail;
  const figure = (name, value, unit) => h("div", null, h("dt", null, name),
    h("dd", null, value, unit && h("small", null, ` ${unit}`)));
  return h("dl", { class: "figures" },
    figure("Generation", summary.generation || "–"),
    figure("Members training", String(summary.num_training), `of ${job.detail.desired_members} desired`),
    figure("Step", count(summary.step), isNumber(job.detail.course.num_steps) && `of ${compact(job.detail.course.num_steps)}`),
    figure("Samples per second", count(job.samples_per_s)),
    figure("Mean loss", significant(job.mean_loss)),
    figure("In this state for", duration(state.now_unix_s - summary.since_unix_s)),
    figure("Restarts", count(summary.num_restarts)),
    isNumber(summary.goodput) && figure("Goodput", `${(100 * summary.goodput).toFixed(1)}%`),
    summary.ended_unix_s > 0 && figure("Duration", duration(summary.ended_unix_s - summary.begun_unix_s)),
    summary.ended_unix_s > 0 && figure("Final loss", significant(summary.loss)),
    summary.num_samples !== null && figure("Samples trained", count(summary.num_samples)));
}

// Progress of the job, and the time left.
function progress({ course }) {
  if (!isNumber(course.progress)) return null;
  const percent = `${(100 * course.progress).toFixed(course.progress < 1 ? 1 : 0)}%`;
  const left = isNumber(course.eta_s) ? `, ${duration(course.eta_s)} left at the recent pace` : "";
  return h("div", { class: "progress" },
    h("div", { class: "bar", role: "progressbar", "aria-label": "Progress", "aria-valuemin": "0", "aria-valuemax": "100",
      "aria-valuenow": (100 * course.progress).toFixed(1), "aria-valuetext": `${percent} done${left}` },
      h("i", { style: { width: percent } })),
    h("p", { class: "legend" }, `${percent} done${left}`));
}

// The state from which the job would continue if all members were lost now.
function saved({ summary, course, synchronous }, now_s) {
  const steps = isNumber(course.checkpoint_step) && plural(Math.max(0, summary.step - course.checkpoint_step), "step");
  const kept = [
    isNumber(course.checkpoint_step) && ["Checkpoint", [`step ${count(course.checkpoint_step)}, ${steps} ago`,
      isNumber(course.checkpoint_unix_s) && [", written ", ago(course.checkpoint_unix_s, now_s)],
      isNumber(course.checkpoint_bytes) && `, ${bytes(course.checkpoint_bytes)}`]],
    isNumber(course.snapshot_unix_s) && ["Snapshot", ago(course.snapshot_unix_s, now_s)],
  ].filter(Boolean);
  const isOver = OVER.has(summary.state);
  const warning = isOver || !synchronous || kept.length ? ""
    : course.writes_checkpoints === false ? "No checkpoints are configured: if all members were lost, the job would be lost. Set checkpoints= in the script."
      : course.writes_checkpoints ? "No checkpoint is written yet: if all members were lost, the job would continue from an earlier run's checkpoint, or be lost if there is none." : "";
  return kept.length === 0 && !warning ? null : section("Saved", "where the job would continue if all members were lost",
    warning && h("p", { class: "unsaved" }, warning),
    kept.length > 0 && listed(kept));
}

// Command line and commit of the job's script.
function origin({ run }) {
  if (!run) return null;
  const commit = run.commit && [" commit ", h("code", { title: run.commit }, run.commit.slice(0, 12)), run.is_modified && ", modified"];
  return h("p", { class: "origin" },
    h("code", { class: "command", title: "Command line of the member that reports for the job", tabindex: run.command.length > LONG_COMMAND ? "0" : null }, run.command),
    commit && h("span", null, commit));
}

const listed = (entries) => h("dl", { class: "settings" }, entries.map(([name, value]) =>
  h("div", null, h("dt", null, name), h("dd", null, value))));

function settings(job) {
  const agreed = Object.entries(job.fields).sort();
  const bounds = [["members", `${job.min_members} to ${job.max_members}, ${job.desired_members} desired`]];
  return section("Settings", "the same on all members",
    listed(Object.entries(job.hyperparameters).map(([name, value]) => [spoken(name), value])),
    h("div", { class: "body" }, h("details", null, h("summary", null, `All ${plural(agreed.length, "setting")}`),
      listed([...bounds, ...agreed]))));
}

function sparkline(losses, memberId) {
  const points = losses.filter(([, loss]) => isNumber(loss));
  if (points.length < 2) return null;
  const [width, height] = [72, 20];
  const ys = points.map(([, loss]) => loss);
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const at = ([step, loss]) => [
    ((step - first) / (last - first || 1)) * width,
    height - ((loss - low) / (high - low || 1)) * height];
  const line = points.map((p) => at(p).map((v) => v.toFixed(1)).join(" ")).join("L");
  const [x, y] = at(points.at(-1));
  return h("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Loss of ${memberId} from ${significant(ys[0])} at step ${first}`
      + ` to ${significant(ys.at(-1))} at step ${last}` },
    h("path", { d: `M${line}` }), h("circle", { cx: x, cy: y, r: 2 }));
}

function lossCell(health, losses, memberId) {
  const loss = health && health.loss;
  const text = typeof loss === "string"
    ? h("span", { class: "notfinite" }, loss) : h("span", null, significant(loss));
  return cell("Loss", "num", h("div", { class: "loss" }, sparkline(losses, memberId), text));
}

function memberRow({ member, health, losses }, now_s, shows) {
  const slow = shows.slow.has(member.member_id);
  const seen_s = now_s - member.last_seen_unix_s;
  const step = Math.max(member.step, (health && health.step) || 0);
  const error = health && health.last_error;
  const device = [member.process.host, (health && health.device) || member.process.device].filter(Boolean);
  const figureOf = (name) => (health ? health[name] : undefined);
  return h("tr", { class: member.state, role: "row" },
    cell("Rank", "num", member.rank === null ? "–" : String(member.rank)),
    h("th", { scope: "row", role: "rowheader" },
      h("button", { type: "button", class: "link", "data-member": member.member_id, "aria-haspopup": "dialog" }, member.member_id),
      slow && h("span", { class: "pill warn slow", title: "A step of this member takes more than 1.5 times the median" }, "slow"),
      h("span", { class: "sub" }, device.join(" · "))),
    cell("State", "state", pill(member.state)),
    cell("Step", "num", count(step)),
    lossCell(health, losses, member.member_id),
    cell("Samples/s", "num", count(figureOf("samples_per_s")), isNumber(figureOf("step_time_s"))
      && h("span", { class: "sub" }, `${significant(health.step_time_s * 1000)} ms a step`), stepBar(health, shows.least_exchange_s)),
    shows.staleness && cell("Staleness", "num", significant(figureOf("staleness_steps"))),
    shows.rounds && cell("Round", "num", member.clock === null ? "–" : count(member.clock)),
    cell("Memory, CPU", "num", bytes(figureOf("memory_bytes")), isNumber(figureOf("cpu_cores"))
      && h("span", { class: "sub" }, `${Number(health.cpu_cores.toFixed(2))} cores`)),
    shows.network && cell("Host's network", "num", isNumber(figureOf("host_received_bytes_per_s"))
      ? [`${bytes(health.host_received_bytes_per_s)}/s in`, h("span", { class: "sub" }, `${bytes(health.host_sent_bytes_per_s)}/s out`)] : "–"),
    cell("Last seen", `num${seen_s > 5 ? " late" : ""}`, duration(seen_s)),
    cell("Waits for", "why", member.waiting_for, error && h("span", { class: "error" }, error)));
}

// Parts of the time of a step, each with its length in seconds, its colour and its name.
function stepParts({ step_parts: parts }, least_exchange_s) {
  const common_s = Math.min(parts.exchange_s, isNumber(least_exchange_s) ? least_exchange_s : Infinity);
  return [[parts.data_s, "data", "data"], [parts.compute_s, "compute", "computing"], [common_s, "exchange", "exchange"],
    [parts.exchange_s - common_s, "wait", "waiting for others"], [parts.between_s, "between", "between steps"],
  ].filter(([part_s]) => isNumber(part_s));
}

const inWords = (parts) => parts.map(([part_s, , name]) => `${name} ${milliseconds(part_s)}`).join(", ");

function stepBar(health, least_exchange_s) {
  if (!health || !health.step_parts) return null;
  const parts = stepParts(health, least_exchange_s);
  const total_s = parts.reduce((sum, [part_s]) => sum + part_s, 0) || 1;
  return h("div", { class: "parts", role: "img", title: inWords(parts), "aria-label": inWords(parts) },
    parts.map(([part_s, kind]) => h("i", { class: kind, style: { width: `${(100 * part_s / total_s).toFixed(1)}%` } })));
}

const partsLegend = () => h("p", { class: "legend parts-legend" }, "A step's time: ",
  [["data", "data"], ["compute", "computing"], ["exchange", "exchange"], ["wait", "waiting for others"], ["between", "between steps"]]
    .map(([kind, name]) => h("span", null, h("i", { class: kind }), name)));

// On a narrow screen a member is a card with labels; the roles keep the table a table for screen
// readers.
const cell = (label, kind, ...content) =>
  h("td", { class: kind, role: "cell", "data-label": label }, content);

function members(page_job, now_s) {
  const job = page_job.detail;
  const column = (name, numeric) =>
    h("th", { scope: "col", role: "columnheader", class: numeric ? "num" : null }, name);
  // Only asynchronous members have a staleness, and only those with a staleness bound have rounds.
  const shows = {
    staleness: job.members.some((m) => m.health && isNumber(m.health.staleness_steps)),
    rounds: job.members.some((m) => isNumber(m.member.clock)),
    network: job.members.some((m) => m.health && isNumber(m.health.host_received_bytes_per_s)),
    slow: new Set(page_job.slow),
    parts: job.members.some((m) => m.health && m.health.step_parts),
    least_exchange_s: page_job.least_exchange_s,
  };
  const hidden = job.summary.num_members - job.members.length;
  const all = `${plural(job.summary.num_members, "member")}, ${job.min_members} to ${job.max_members} may train`;
  return section("Members", all,
    job.members.length === 0 ? h("p", { class: "empty" }, "The job has no members.")
      : h("div", { class: "scroll members", tabindex: "0", role: "region", "aria-label": "Members" },
        h("table", { role: "table" }, h("caption", { class: "hidden" }, "Members of the job"),
          h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, column("Rank", true), column("Member"), column("State"),
            column("Step", true), column("Loss", true), column("Samples/s", true),
            shows.staleness && column("Staleness", true), shows.rounds && column("Round", true),
            column("Memory, CPU", true), shows.network && column("Host's network", true), column("Last seen", true),
            column("Waits for"))),
          h("tbody", { role: "rowgroup" }, job.members.map((entry) =>
            memberRow(entry, now_s, shows))))),
    shows.parts && partsLegend(),
    job.members.length > 1 && h("p", { class: "more" }, h("button", { type: "button", "data-output": "all", "aria-haspopup": "dialog" }, "Output of all members")),
    (hidden > 0 || page.all_members) && h("p", { class: "more" },
      hidden > 0 ? `${count(hidden)} more; members with a problem are listed first. ` : "",
      h("button", { type: "button", "data-members": hidden > 0 ? "all" : "few" }, hidden > 0 ? `Show all ${count(job.summary.num_members)}` : "Show fewer")));
}

// The cost of a change, if it is known.
function cost(change) {
  if (!change) return null;
  const paused = isNumber(change.paused_s) ? `paused ${significant(change.paused_s)} s` : "";
  const lost = change.steps_lost ? plural(change.steps_lost, "step") + " lost" : "";
  return [paused, lost].filter(Boolean).map((text) => h("span", { class: "cost" }, text));
}

function generation({ record, num_members, joined, gone }, now_s, change) {
  const chips = record.members.map((m) => h("li", {
    class: `chip${joined.includes(m.member_id) ? " joined" : ""}`, title: `${m.member_id}, rank ${m.rank}` },
    m.member_id, joined.includes(m.member_id) && h("span", { class: "hidden" }, " joined")));
  const left = gone.map((id) =>
    h("li", { class: "chip gone" },
      h("button", { type: "button", class: "link", "data-member": id, "aria-haspopup": "dialog" }, id),
      h("span", { class: "hidden" }, " gone")));
  const more = num_members - record.members.length;
  const conflicts = record.conflicts.map((c) => h("p", { class: "text" }, `${c.field}: `
    + Object.entries(c.values).map(([v, who]) => `${v} (${who.join(", ")})`).join(" vs. ")));
  return h("li", { class: record.verdict },
    h("div", { class: "head" }, h("b", null, `Generation ${record.generation}`),
      pill(record.verdict),
      h("span", { class: "muted" },
        `${plural(num_members, "member")}${record.planned ? ", planned"
          : ` from step ${count(record.step)}`}`),
      cost(change),
      ago(record.decided_unix_s, now_s)),
    h("p", { class: "text" }, change ? change.cause : record.reason), conflicts,
    h("ul", { class: "chips", "aria-label": "Roster" }, chips, more > 0 && h("li", { class: "chip" }, `and ${count(more)} more`), left));
}

function generations(job, now_s) {
  const history = historyOf(job.detail.summary.job);
  const changes = new Map((history ? history.changes : []).map((c) => [c.generation, c]));
  const items = job.generations.map((each) => generation(each, now_s, changes.get(each.record.generation)));
  const unsent = job.num_generations - job.generations.length;
  return section("Generations", "committed and aborted rosters, newest first",
    items.length === 0 ? h("p", { class: "empty" }, job.detail.summary.generation === 0
      ? "No generation has been decided yet." : "No generations are kept.") : [
      h("ol", { class: "timeline" }, items.slice(0, SHOWN_GENERATIONS)),
      items.length > SHOWN_GENERATIONS && h("div", { class: "body" }, h("details", null,
        h("summary", null, `${items.length - SHOWN_GENERATIONS} older`),
        h("ol", { class: "timeline" }, items.slice(SHOWN_GENERATIONS)),
        unsent > 0 && h("p", { class: "muted" }, `${unsent} more at /api/v1/jobs/${job.detail.summary.job}/generations`))),
    ]);
}

function samples(job) {
  const s = job.samples;
  if (!s) return null;
  const all = s.dataset_size * s.num_epochs;
  const percent = (n) => `${(100 * n / all).toFixed(2)}%`;
  const epoch = s.epochs.length ? `, epoch ${s.epochs.at(-1).epoch + 1} of ${s.num_epochs}` : "";
  return section("Samples", `${percent(s.completed)} completed${epoch}`,
    h("div", { class: "body" },
      h("div", { class: "bar", role: "img", "aria-label": `${percent(s.completed)} completed` },
        h("i", { style: { width: percent(s.completed) } }),
        h("i", { class: "flight", style: { width: percent(s.in_flight) } })),
      h("p", { class: "legend" }, `${count(s.completed)} of ${count(all)} completed · `
        + `${count(s.in_flight)} in flight · ${count(s.returned)} returned by lost members · `
        + `at most ${count(s.repeated_max)} trained on twice`)));
}

function staleness({ staleness_counts }) {
  const pushes = staleness_counts.reduce((a, b) => a + b, 0);
  const sum = staleness_counts.reduce((a, n, i) => a + n * i, 0);
  return pushes ? significant(sum / pushes) : "–";
}

function server(entry, shards) {
  const own = shards.filter((s) => s.server_id === entry.server_id);
  const total = own.reduce((a, s) => a + s.num_bytes, 0);
  const updates = own.reduce((a, s) => a + s.version, 0);
  const weight = (s) => String(s.created ? Math.max(s.num_bytes, 1) : s.num_elements * 4);
  const words = ["Copies", "Parameters"];
  const column = (name) => h("th", { scope: "col", class: words.includes(name) ? null : "num" }, name);
  return h("div", { class: "server" },
    h("h3", null, entry.server_id, pill(entry.state),
      h("small", null, `${entry.address} · ${plural(own.length, "shard")}`
        + ` · ${bytes(total)} · ${count(updates)} updates · copies of ${plural(entry.num_copies, "shard")}`
        + ` · ${bytes(entry.memory_bytes)} in memory; all jobs: ${bytes(entry.held_bytes)} of ${bytes(entry.memory_limit_bytes)} · ${bytes(entry.unfinished_bytes)} queued`
        + ` · ${count(entry.refused_by_epoch)} refused by epoch · ${count(entry.partial_pushes)} partial`)),
    entry.error && h("p", { class: "error" }, entry.error),
    entry.full_peers.map((peer) => h("p", { class: "error" }, `${peer.server_id} accepts no more copies: ${peer.reason}`)),
    h("div", { class: "blocks", "aria-hidden": "true" }, own.map((s) => h("span", {
      class: s.created ? null : "missing", style: { flexGrow: weight(s) },
      title: `shard ${s.shard_id}: ${bytes(s.num_bytes)}, version ${s.version}` }))),
    h("details", null, h("summary", null, "Shards"), h("div", { class: "scroll" }, h("table", null,
      h("thead", null, h("tr", null, ["Shard", "Epoch", "Version", "Size", "Pushes", "Retries",
        "Refused", "Mean staleness", "Lag", "Copies", "Parameters"].map(column))),
      h("tbody", null, own.map((s) => h("tr", null,
        h("th", { scope: "row", class: "num" }, String(s.shard_id)),
        [String(s.epoch), count(s.version), bytes(s.num_bytes), count(s.pushes.applied),
          count(s.pushes.duplicates), count(s.pushes.refused), staleness(s.pushes),
          s.replication.copies.length ? count(s.replication.lag) : "–"].map((text) =>
          h("td", { class: "num" }, text)),
        h("td", null, s.replication.copies.map((c) => c.server_id + (c.joining ? " (joining)" : "")).join(", ") || "none"),
        h("td", { class: "why" }, s.parameters.join(", ")))))))));
}

function shards(state) {
  if (state.shards_error) {
    return section("Shards", "", h("p", { class: "empty error" }, state.shards_error));
  }
  if (!state.shards || state.shards.shards.length === 0) return null;
  const { servers, lost, lost_in_words, accepted_losses } = state.shards;
  return section("Shards",
    `${plural(state.shards.shards.length, "shard")} on ${plural(servers.length, "server")},`
      + (lost.length ? ` ${count(lost.length)} lost,` : "")
      + ` skew ${significant(state.shards.skew)}`,
    lost_in_words.map((loss) => h("p", { class: "empty error", role: "alert" }, `Lost: ${loss}`)),
    accepted_losses.map((s) => h("p", { class: "empty" },
      `Loss of shard ${s.shard_id} (${s.version ? `at least version ${count(s.version)}` : "no version known"})`
        + ` accepted by ${s.by}; samples ${s.samples_anew ? "started over" : "stayed counted"} `, ago(s.accepted_unix_s, state.now_unix_s))),
    servers.map((entry) => server(entry, state.shards.shards)));
}

function publishedSeries(series, now_s) {
  const newest = series.versions.at(-1);
  const columns = ["Reader", "Version", "Behind", "Digest", "Seen"];
  return h("div", { class: "server" },
    h("h3", null, series.series, h("small", null, `version ${count(series.version)}`
      + (newest ? ` · step ${count(newest.step)} · ${bytes(newest.num_bytes)} in ${count(newest.num_copies)} copies` : "")
      + ` · ${plural(series.versions.length, "version")} kept`)),
    series.lost.length > 0 && h("p", { class: "error" }, `Lost: versions ${series.lost.join(", ")}: no server has them`),
    series.readers.filter((r) => r.differs).map((r) => h("p", { class: "error", role: "alert" },
      `${r.reader_id} serves bytes that differ from version ${r.version}: digest ${r.digest.slice(0, 12)}`)),
    series.readers.length > 0 && h("div", { class: "scroll" }, h("table", null,
      h("thead", null, h("tr", null, columns.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, series.readers.map((r) => h("tr", null,
        h("th", { scope: "row" }, r.reader_id),
        h("td", { class: "num" }, r.version ? count(r.version) : "none yet"),
        h("td", { class: "num" }, count(r.lag_versions)),
        h("td", null, r.digest.slice(0, 12)),
        h("td", null, ago(r.seen_unix_s, now_s))))))));
}

function weights(detail, now_s) {
  if (!detail.weights || detail.weights.length === 0) return null;
  return section("Published weights", "versions that readers can fetch",
    detail.weights.map((series) => publishedSeries(series, now_s)));
}

function events(state) {
  const items = [...state.events].reverse().map((event) => h("li", { class: event.detail ? "detail" : null },
    h("span", { class: "kind" }, spoken(event.kind)),
    event.member_id && h("span", { class: "muted" }, event.member_id),
    ago(event.unix_s, state.now_unix_s),
    h("p", { class: "text" }, event.reason)));
  return section("Events", "newest first", items.length === 0
    ? h("p", { class: "empty" }, "No events since this coordinator began to lead.")
    : h("ol", { class: "events", tabindex: "0", "aria-label": "Events" }, items));
}

function section(title, note, ...content) {
  return h("section", { class: "section", "aria-label": title },
    h("header", null, h("h2", null, title), note && h("p", null, note)), content);
}

function jobView(state) {
  const { job } = state;
  const { detail } = job;
  const now_s = state.now_unix_s;
  return [
    h("div", { class: "title" }, h("h1", null, detail.summary.job), pill(detail.summary.shown_state),
      detail.fields.strategy && h("span", { class: "muted" }, detail.fields.strategy),
      jobActions(state)),
    detail.summary.last_ending && h("p", { class: "error last-ending" }, `Last member to leave: ${detail.summary.last_ending}`),
    h("p", { class: "reason" }, detail.summary.reason),
    origin(detail),
    progress(detail),
    figures(job, state),
    charts(detail),
    members(job, now_s),
    samples(detail),
    h("div", { class: "columns" },
      h("div", null, generations(job, now_s)),
      h("div", null, saved(detail, now_s), shards(state), weights(detail, now_s), events(state), settings(detail))),
  ];
}

function blank(state, wanted) {
  const message = !state.readiness.ready && !state.jobs.length
    ? [h("h1", null, "This coordinator does not lead"),
      h("p", null, state.readiness.leader ? `The page of the one that leads, ${state.readiness.leader}, shows the jobs.` : "It shows jobs as soon as it leads.")]
    : state.jobs.some((each) => each.job === wanted)
    ? [h("h1", null, wanted), h("p", null, "The coordinator is reading this job from etcd.")]
    : wanted && state.jobs.length
    ? [h("h1", null, `There is no job ${wanted}`), h("p", null, "Choose a job from the list.")]
    : [h("h1", null, "No jobs yet"),
      h("p", null, "Start one: ", h("code", null, "shoal run -n 3 --job NAME script.py"))];
  return h("div", { class: "blank" }, message);
}

// --- the page as a whole ---

const page = { wanted: "", all_members: false, stream: null, received_ms: 0, listened_ms: 0, lost_since: null, state: null, knows_reader: false };

function show(state) {
  const { readiness } = state;
  fill("leader", readiness.ready ? "This coordinator leads"
    : readiness.leader ? `Coordinator ${readiness.leader} leads` : "");
  fill("notices", readiness.ready ? null
    : h("p", { class: "notice warn" }, `Not ready: ${readiness.reason}`));
  fill("jobs", jobList(state, state.job && state.job.detail.summary.job));
  fill("job", state.job ? jobView(state) : blank(state, page.wanted));
  drawCharts();
  fill("clock", `As of ${clockOf(timeOf(state.now_unix_s))}`);
  const job = state.job && state.job.detail.summary;
  document.title = job ? `${job.job}: ${job.shown_state} · Shoal` : "Shoal";
}

function connection(kind, text) {
  document.getElementById("connection").dataset.state = kind;
  document.body.classList.toggle("stale", kind === "lost");
  fill("connection-text", text);
}

function received(message) {
  const state = JSON.parse(message.data);
  page.received_ms = Date.now();
  page.lost_since = null;
  if (!page.wanted && state.jobs.length) {
    // Nothing was chosen: show what runs, or else a job that may go on, or else the first.
    const job = state.jobs.find((j) => j.shown_state === "running")
      || state.jobs.find((j) => !OVER.has(j.shown_state)) || state.jobs[0];
    select(job.job, false);
  }
  connection("live", "Live");
  page.state = state;
  // Shown once it is known what the reader may do, which login.js asks at the same time.
  if (page.knows_reader) show(state);
}

function watch() {
  if (page.received_ms && Date.now() - page.received_ms > STALE_AFTER_MS) {
    page.lost_since = page.lost_since || new Date(page.received_ms);
    connection("lost", `Connection lost. State as of ${clockOf(page.lost_since)}`);
  } else if (!page.received_ms && page.stream && page.stream.readyState !== EventSource.OPEN) {
    connection("connecting", "Connecting");
  }
  // The browser does not open a refused stream again, nor one whose other end is gone without a word: the page does.
  const isSilent = page.lost_since && Date.now() - Math.max(page.received_ms, page.listened_ms) > SILENT_AFTER_MS;
  if (page.stream && (isSilent || page.stream.readyState === EventSource.CLOSED)) {
    lookWhoAsks().catch(() => {}); // the session may have ended
    listen();
  }
}

function listen() {
  if (page.stream) page.stream.close();
  page.listened_ms = Date.now();
  const all = page.all_members ? "&all_members=true" : "";
  page.stream = new EventSource(`/api/v1/stream?job=${encodeURIComponent(page.wanted)}${all}`);
  page.stream.addEventListener("state", received);
}

function select(job, byReader) {
  page.wanted = job;
  page.all_members = false;
  const url = job ? `?job=${encodeURIComponent(job)}` : "/";
  if (byReader) history.pushState(null, "", url);
  else history.replaceState(null, "", url);
  listen();
}

document.getElementById("filter").addEventListener("input", () => {
  if (page.state) show(page.state);
});

document.getElementById("job").addEventListener("click", (event) => {
  const more = event.target.closest("button[data-members]");
  if (!more) return;
  page.all_members = more.dataset.members === "all";
  listen();
});

const wantedByUrl = () => new URLSearchParams(location.search).get("job") || "";

document.getElementById("jobs").addEventListener("click", (event) => {
  const link = event.target.closest("a[data-job]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  select(link.dataset.job, true);
});
window.addEventListener("popstate", () => {
  document.querySelectorAll("dialog[open]").forEach((each) => each.close());
  page.wanted = wantedByUrl();
  listen();
});
// A browser opens six connections to a host: tabs that nobody sees must not take them all.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { page.stream.close(); page.stream = null; page.received_ms = 0; } else listen();
});
page.wanted = wantedByUrl();
listen();
setInterval(watch, RETRY_MS);
