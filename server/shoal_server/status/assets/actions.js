// Actions on a job, each after a confirmation, and the dialog of one member.
"use strict";

const OVER = new Set(["finished", "failed", "stopped", "lost"]);
const asking = { may_act: false, act: null };
const dialog = document.getElementById("ask");
const memberDialog = document.getElementById("member");

// The buttons in the head of a job; none for a reader that may not act.
function jobActions(state) {
  if (!asking.may_act) return null;
  const { summary } = state.job.detail;
  const button = (action, text, kind) => h("button", { type: "button", "data-action": action, class: kind }, text);
  return h("span", { class: "actions" },
    state.shards && state.shards.shards.length > 0 && button("snapshot", "Take a snapshot"),
    OVER.has(summary.state) ? summary.state !== "finished" && button("retry", "Resume the job")
      : button("stop", "Stop the job", "bad"));
}

const QUESTIONS = {
  stop: (job) => ({ title: `Stop ${job}?`, text: "The members end after their current step. Resume the job later with the button, or with `shoal retry`.", path: `/jobs/${encodeURIComponent(job)}/stop`, reason: true, done: "asked to stop" }),
  retry: (job) => ({ title: `Resume ${job}?`, text: "Members may join the job again, and continue from its last state.", path: `/jobs/${encodeURIComponent(job)}/retry`, done: "may be joined again" }),
  snapshot: (job) => ({ title: `Take a snapshot of ${job}?`, text: "Writes all parameters, as of one moment, to the coordinator's --snapshot-url. Training continues.", path: `/jobs/${encodeURIComponent(job)}/snapshot`, done: "snapshot taken" }),
  drain: (job, member) => ({ title: `Drain ${member} of ${job}?`, text: "The member finishes its step, hands its state over and leaves. Its launcher does not start it again.", path: `/jobs/${encodeURIComponent(job)}/members/${encodeURIComponent(member)}/drain`, reason: true, done: "asked to leave" }),
};

function ask(action, job, member) {
  const question = QUESTIONS[action](job, member);
  asking.act = question;
  document.getElementById("ask-title").textContent = question.title;
  document.getElementById("ask-text").textContent = question.text;
  document.getElementById("ask-reason-field").hidden = !question.reason;
  document.getElementById("ask-reason").value = "";
  document.getElementById("ask-outcome").textContent = "";
  document.getElementById("ask-yes").disabled = false;
  dialog.showModal();
}

async function act() {
  const { act: question } = asking;
  const outcome = document.getElementById("ask-outcome");
  document.getElementById("ask-yes").disabled = true;
  outcome.textContent = "Sending the request";
  const reason = document.getElementById("ask-reason").value.trim();
  const refusal = await refusalOf(question, reason).catch(String);
  // The dialog may be closed, or show another question, by now.
  const isShown = dialog.open && asking.act === question;
  if (refusal && isShown) {
    outcome.textContent = refusal;
    document.getElementById("ask-yes").disabled = false;
    return;
  }
  if (isShown) dialog.close();
  document.getElementById("done").textContent = `${question.title.replace("?", "")}: ${refusal || question.done}`;
}

// Reason for which the request was refused; empty if it was accepted.
async function refusalOf(question, reason) {
  const answer = await fetch(`/api/v1${question.path}`, {
    method: "POST",
    headers: question.reason ? { "Content-Type": "application/json" } : {},
    body: question.reason ? JSON.stringify({ reason }) : undefined,
  });
  if (answer.ok) return "";
  const error = await answer.json();
  return [error.what, error.seen && `saw ${error.seen}`, error.expected && `expected ${error.expected}`, error.fix].filter(Boolean).join("; ") || `HTTP ${answer.status}`;
}

// --- one member ---

function showMember(memberId) {
  const { state } = page;
  const { job } = state.job.detail.summary;
  const entry = state.job.detail.members.find((m) => m.member.member_id === memberId);
  const own = state.events.filter((event) => event.member_id === memberId).slice(-8).reverse();
  fill("member-body",
    h("h2", null, memberId),
    entry ? memberFacts(entry) : h("p", { class: "muted" }, "This member has left the job."),
    outputSection(job, memberId),
    own.length > 0 && [h("h3", null, "Events of this member"), h("ol", { class: "events" }, own.map((event) => h("li", null,
      h("span", { class: "kind" }, spoken(event.kind)), ago(event.unix_s, state.now_unix_s), h("p", { class: "text" }, event.reason))))],
    entry && asking.may_act && h("button", { type: "button", class: "bad", "data-action": "drain", "data-member": memberId, "data-job": job }, "Drain this member"));
  memberDialog.showModal();
  followOutput(job, memberId);
}

function memberFacts({ member, health }) {
  const facts = Object.entries({
    state: member.state, "waits for": member.waiting_for, rank: member.rank === null ? "none" : String(member.rank),
    host: member.process.host, pid: String(member.process.pid), address: member.process.address,
    device: (health && health.device) || member.process.device, torch: member.process.torch_version,
    "a step's time": health && health.step_parts && inWords(stepParts(health, page.state.job.least_exchange_s)),
    shoal: member.process.shoal_version, joined: moment(timeOf(member.joined_unix_s)),
  }).filter(([, value]) => value);
  return [
    listed(facts),
    health && health.last_error && h("p", { class: "error" }, health.last_error),
  ];
}

// --- clicks ---

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const job = page.state && page.state.job && page.state.job.detail.summary.job;
  if (button.dataset.action) {
    memberDialog.close();
    // The page may show another job than the dialog's by now.
    ask(button.dataset.action, button.dataset.job || job, button.dataset.member);
  } else if (button.dataset.member) {
    showMember(button.dataset.member);
  } else if (button.id === "ask-yes") {
    act();
  } else if (button.dataset.close) {
    button.closest("dialog").close();
  }
});
