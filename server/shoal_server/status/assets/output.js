// Output of a member in its dialog, fetched once a second while the dialog is open.
"use strict";

const ASK_EACH_MS = 1000;
const MAX_OUTPUT_LINES = 5000;
const output = { path: "", lines: [], before: null, after: null, timer: 0 };

const outputSection = (job, memberId) => [
  h("h3", null, "Output"),
  h("p", { id: "output-status", class: "muted", role: "status" }, "Requesting it from the member's launcher"),
  h("p", null, h("button", { type: "button", id: "output-earlier", hidden: true }, "Earlier lines")),
  h("pre", { id: "output", class: "output", tabindex: "0", role: "log", "aria-live": "off", "aria-label": `Output of ${memberId}` }),
  h("p", { class: "muted" }, "In a terminal: ", h("code", null, `shoal logs ${job} ${memberId} -f`)),
];

function followOutput(job, memberId) {
  clearTimeout(output.timer);
  const path = `/api/v1/jobs/${encodeURIComponent(job)}/members/${encodeURIComponent(memberId)}/output`;
  Object.assign(output, { path, lines: [], before: null, after: null });
  askForOutput(path);
}

// One request after the other, until the dialog is closed or shows another member.
async function askForOutput(path) {
  let goesOn = true;
  try {
    goesOn = await newOutput(path);
  } catch (error) {
    if (output.path === path) showStatus(`The coordinator did not answer: ${error.message}`);
  }
  if (output.path === path && goesOn) output.timer = setTimeout(askForOutput, ASK_EACH_MS, path);
}

async function newOutput(path) {
  const found = await askedOutput(path, output.after ? `?after=${output.after}` : "");
  if (!found) return true;
  const isFirst = output.after === null;
  if (isFirst) output.before = found.before;
  output.after = found.after;
  showStatus(found.is_live ? `From the launcher on ${found.host}`
    : `The launcher on ${found.host} has ended; these are the last lines that it sent`);
  const added = found.has_gap ? ["(lines are missing here)", ...found.lines] : found.lines;
  if (isFirst || added.length) showOutput([...output.lines, ...added].slice(-MAX_OUTPUT_LINES), isFirst);
  return found.is_live;
}

async function earlierOutput() {
  const { path } = output;
  const button = document.getElementById("output-earlier");
  button.disabled = true; // a second click would show the same lines again
  let found;
  try {
    found = await askedOutput(path, `?before=${output.before}`);
  } finally {
    button.disabled = false;
  }
  if (!found) return;
  output.before = found.before;
  const pre = document.getElementById("output");
  const below = pre.scrollHeight - pre.scrollTop;
  // The newest lines stay: later ones follow them.
  showOutput([...found.lines, ...output.lines].slice(-MAX_OUTPUT_LINES), false);
  pre.scrollTop = pre.scrollHeight - below;
}

// The answer to a request; null after an error, which is shown, or if the dialog is closed or shows
// another member by now.
async function askedOutput(path, query) {
  const answer = await fetch(path + query);
  const found = await answer.json();
  if (output.path !== path) return null;
  if (answer.ok) return found;
  showStatus([found.what, found.seen && `saw ${found.seen}`, found.fix].filter(Boolean).join("; "));
  return null;
}

function showOutput(lines, isFirst) {
  const pre = document.getElementById("output");
  const atEnd = isFirst || pre.scrollHeight - pre.scrollTop - pre.clientHeight < 8;
  pre.textContent = lines.length ? lines.join("\n") : "The member has printed nothing yet.";
  output.lines = lines;
  if (atEnd) pre.scrollTop = pre.scrollHeight;
  document.getElementById("output-earlier").hidden = output.before === null || lines.length >= MAX_OUTPUT_LINES;
}

function showStatus(text) {
  const status = document.getElementById("output-status");
  if (status.textContent !== text) status.textContent = text;
}

document.getElementById("member").addEventListener("close", () => {
  clearTimeout(output.timer);
  output.path = "";
});
document.getElementById("member").addEventListener("click", (event) => {
  if (event.target.id === "output-earlier") earlierOutput().catch((error) => showStatus(String(error)));
});
