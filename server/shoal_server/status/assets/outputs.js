// Output of all shown members in one dialog, each line after its member's name, fetched while the
// dialog is open. Lines have no times: they are in the order in which they arrived.
"use strict";

const MAX_FOLLOWED = 50;
const FIRST_LINES = 20;
const outputs = { job: "", members: [], after: new Map(), problems: new Map() };

function showOutputs() {
  const { detail } = page.state.job;
  const { job } = detail.summary;
  const members = detail.members.slice(0, MAX_FOLLOWED).map(({ member }) => member.member_id);
  const more = detail.summary.num_members - members.length;
  Object.assign(outputs, { job, members, after: new Map(), problems: new Map() });
  fill("outputs-body",
    h("h2", null, `Output of ${plural(members.length, "member")}`),
    h("p", { class: "muted" }, `The newest lines of each, then new lines as they arrive. ${more > 0 ? `${count(more)} more members are not followed here. ` : ""}In a terminal: `, h("code", null, `shoal logs ${job} -f`)),
    h("p", { id: "outputs-status", class: "muted", role: "status" }, "Requesting it from the members' launchers"),
    h("pre", { id: "outputs-lines", class: "output", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Output of all members" }));
  document.getElementById("outputs").showModal();
  followOutputs(outputs.members);
}

// One member after the other, until the dialog is closed.
async function followOutputs(members) {
  for (const member of members) {
    try {
      await addOutput(members, member);
    } catch (error) {
      outputs.problems.set(member, `the coordinator did not answer: ${error.message}`);
    }
    if (outputs.members !== members) return;
  }
  writeProblems();
  setTimeout(() => outputs.members === members && followOutputs(members), ASK_EACH_MS);
}

async function addOutput(members, member) {
  const after = outputs.after.get(member);
  const path = `/api/v1/jobs/${encodeURIComponent(outputs.job)}/members/${encodeURIComponent(member)}/output`;
  const answer = await fetch(path + (after ? `?after=${after}` : ""));
  const found = await answer.json();
  if (outputs.members !== members) return;
  if (!answer.ok) {
    outputs.problems.set(member, found.what);
    return;
  }
  outputs.problems.delete(member);
  outputs.after.set(member, found.after);
  const gap = found.has_gap && after ? ["(lines are missing here)"] : [];
  writeLines([...gap, ...(after ? found.lines : found.lines.slice(-FIRST_LINES))].map((text) => [member, text]));
}

function writeLines(added) {
  if (!added.length) return;
  const pre = document.getElementById("outputs-lines");
  const atEnd = pre.scrollHeight - pre.scrollTop - pre.clientHeight < 8;
  const width = Math.max(...outputs.members.map((member) => member.length));
  pre.append(...added.map(([member, text]) =>
    h("span", null, h("b", { class: "from" }, `${member.padEnd(width)} `), `${text}\n`)));
  while (pre.childElementCount > MAX_OUTPUT_LINES) pre.firstElementChild.remove();
  if (atEnd) pre.scrollTop = pre.scrollHeight;
}

// Members whose output cannot be read, with the reason.
function writeProblems() {
  const { problems, members } = outputs;
  const found = [...problems].map(([member, what]) => (what.includes(member) ? what : `${member}: ${what}`));
  const text = found.length ? found.slice(0, 5).join("; ") + (found.length > 5 ? `; and ${found.length - 5} more` : "")
    : document.getElementById("outputs-lines").childElementCount ? `From the launchers of ${plural(members.length, "member")}` : "The members have printed nothing yet.";
  const status = document.getElementById("outputs-status");
  if (status.textContent !== text) status.textContent = text;
}

document.getElementById("outputs").addEventListener("close", () => { outputs.members = []; });
document.addEventListener("click", (event) => {
  if (event.target.closest("button[data-output]")) showOutputs();
});
