// Logging in to the page and out of it. The session is a cookie that no script can read.
"use strict";

const form = document.getElementById("login");
const problem = document.getElementById("login-error");

async function session(method, body) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  return fetch("/api/v1/session", { method, headers, body: body && JSON.stringify(body) });
}

async function lookWhoAsks() {
  const who = await (await session("GET")).json();
  asking.may_act = Boolean(who.may_act);
  const wasHidden = form.hidden;
  form.hidden = !who.asks_for_token || Boolean(who.role);
  const out = document.getElementById("log-out");
  out.hidden = !who.asks_for_token || !who.role;
  out.textContent = who.role ? `Log out ${who.name} (${who.role})` : "";
  if (!form.hidden && page.state) problem.textContent = "The session has ended: log in again.";
  if (!form.hidden && wasHidden) document.getElementById("token").focus();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = document.getElementById("token");
  const answer = await session("POST", { token: field.value.trim() });
  field.value = "";
  if (answer.ok) location.reload();
  else problem.textContent = answer.status === 401 ? "The server does not know this token." : `Refused: ${answer.status}`;
});

document.getElementById("log-out").addEventListener("click", async () => {
  await session("DELETE");
  location.reload();
});

lookWhoAsks().catch((error) => { problem.textContent = String(error); }).finally(() => {
  page.knows_reader = true;
  if (page.state) show(page.state);
});
