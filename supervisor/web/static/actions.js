// Actions: each needs a confirmation and the token, which is kept for this tab.

import { $, say, toast } from "./dom.js";

const KEY = "musterd-token";
let token = sessionStorage.getItem(KEY) ?? "";
let configured = false;

export const credentials = () => (token ? { Authorization: `Bearer ${token}` } : {});
export const possible = () => configured;
export const unlocked = () => Boolean(token);
export const complain = (error) => toast(error.message, true);

export function configure(on) {
  configured = on;
  $("unlock").hidden = !on;
  say($("unlock"), token ? "Lock actions" : "Unlock actions");
}

function keep(value) {
  token = value;
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
  configure(configured);
}

// Asks one question in the dialog; `act` gets the input, and keeps the dialog open by throwing.
function ask({ title, text, yes, label = "", type = "text", value = "", act }) {
  const dialog = $("confirm");
  say($("confirm-title"), title);
  say($("confirm-text"), text);
  say($("confirm-yes"), yes);
  say($("confirm-error"), "");
  $("confirm-field").hidden = !label;
  say($("confirm-label"), label);
  const input = $("confirm-input");
  input.type = type;
  input.value = value;
  return new Promise((resolve) => {
    let done = false;
    const go = async () => {
      if ($("confirm-yes").disabled) return;
      $("confirm-yes").disabled = true;
      try {
        await act(input.value.trim());
        done = true;
        dialog.close();
      } catch (error) {
        say($("confirm-error"), error.message);
      } finally {
        $("confirm-yes").disabled = false;
      }
    };
    $("confirm-yes").onclick = go;
    input.onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); go(); } };
    dialog.onclose = () => { input.value = ""; resolve(done); };
    dialog.showModal();
    (label ? input : $("confirm-no")).focus();
  });
}

// Returns what the web process answers; throws its error in words.
export async function told(path, query) {
  let answer, found;
  try {
    answer = await fetch(`${path}?${new URLSearchParams(query)}`, { headers: credentials(), cache: "no-store" });
    found = await answer.json();
  } catch {
    throw new Error("The web process does not respond.");
  }
  if (answer.ok) return found;
  if (answer.status === 401) keep("");
  throw new Error(found.error ?? `HTTP ${answer.status}`);
}

async function post(path, body, given) {
  let answer;
  try {
    answer = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${given}` },
      body: JSON.stringify(body),
    });
  } catch {
    throw new Error("The web process does not respond: nothing was done.");
  }
  const told = answer.status === 204 ? {} : await answer.json().catch(() => ({}));
  if (answer.ok) return told;
  if (answer.status === 401) keep("");
  throw new Error(told.error ?? `HTTP ${answer.status}`);
}

export function unlock() {
  return ask({
    title: "Unlock actions",
    text: "The token is in the file named by http.token_file. It is remembered until this tab is closed.",
    yes: "Unlock",
    label: "Token",
    type: "password",
    act: async (given) => {
      await post("/api/token", {}, given);
      keep(given);
    },
  });
}

// A link may bring the token behind its #, which browsers send to no server: `musterd dev` prints
// one. It leaves the address bar at once, and counts if the web process knows it.
export async function unlockByLink() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  history.replaceState(null, "", location.pathname + location.search);
  try {
    await post("/api/token", {}, given);
    keep(given);
  } catch (error) {
    complain(error);
  }
}

export const ensure = async () => Boolean(token) || unlock();

export function toggle() {
  if (token) { keep(""); toast("Actions are locked."); }
  else unlock();
}

// Saves a file that a failed attempt left. What sites wrote is saved, never shown: it has no type.
export async function download(id, name) {
  try {
    const answer = await fetch(`/api/artefact?${new URLSearchParams({ id, name })}`, { headers: credentials(), cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `HTTP ${answer.status}`);
    const address = URL.createObjectURL(new Blob([await answer.arrayBuffer()], { type: "application/octet-stream" }));
    const link = document.createElement("a");
    link.href = address;
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  } catch (error) {
    complain(error);
  }
}

// Posts an action, and tells what was done.
export async function act(action) {
  toast((await post("/api/actions", action, token)).done);
}

// Asks `question` (see ask) and posts the action that `make` returns for the input.
export async function perform(question, make) {
  if (!(await ensure())) return false;
  return ask({ ...question, act: (typed) => act(make(typed)) });
}

export const retry = (ids) => perform({
  title: ids.length === 1 ? "Retry this task?" : `Retry ${ids.length} tasks?`,
  text: ids.length === 1 ? `${ids[0]} is queued again, with all its attempts.` : "They are queued again, with all their attempts.",
  yes: "Retry",
}, () => ({ action: "retry", ids }));

export const cancel = (id) => perform({
  title: "Cancel this task?",
  text: `${id} is removed from the queue, or interrupted if it is running. It will not run again.`,
  yes: "Cancel task",
}, () => ({ action: "cancel", ids: [id] }));

export const scale = (pool, size) => perform({
  title: `Scale ${pool}`,
  text: "Surplus workers finish their task first. Automatic scaling is turned off for this pool.",
  yes: "Scale",
  label: "Workers",
  type: "number",
  value: String(size),
}, (typed) => {
  if (!/^\d+$/.test(typed)) throw new Error("Enter a whole number.");
  return { action: "scale", pool, size: Number(typed) };
});

export const drain = (pool) => perform({
  title: `Drain ${pool}?`,
  text: "It accepts and starts no tasks until it is resumed. Running tasks finish.",
  yes: "Drain",
}, () => ({ action: "drain", pool }));

export const resume = (pool) => perform({ title: `Resume ${pool}?`, text: "It accepts and starts tasks again.", yes: "Resume" }, () => ({ action: "resume", pool }));

export const reset = (target) => perform({
  title: `Reset the breaker of ${target}?`,
  text: "It closes, its failures are forgotten, and tasks waiting for this site start.",
  yes: "Reset",
}, () => ({ action: "reset", target }));

export const runSchedule = (name) => perform({
  title: `Run ${name} now?`,
  text: "A task is made at once, with the schedule's own arguments. The next run stays where it is.",
  yes: "Run now",
}, () => ({ action: "schedule.run", name }));

export const pauseSchedule = (name) => perform({
  title: `Pause ${name}?`,
  text: "No runs are made until it is resumed, also over a restart.",
  yes: "Pause",
}, () => ({ action: "schedule.pause", name }));

export const resumeSchedule = (name) => perform({
  title: `Resume ${name}?`,
  text: "Runs are made again; those of the pause are not caught up with.",
  yes: "Resume",
}, () => ({ action: "schedule.resume", name }));

export const removeSchedule = (name) => perform({
  title: `Remove ${name}?`,
  text: "No further runs are made, and its history is forgotten. A run under way finishes.",
  yes: "Remove",
}, () => ({ action: "schedule.remove", name }));
