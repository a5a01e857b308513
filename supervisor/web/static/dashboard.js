// The page: shows each part of a snapshot in its place.

import * as actions from "./actions.js";
import { Changes } from "./changes.js";
import { $, el, mark, reconcile, rove, say } from "./dom.js";
import { bytes, clock, count, duration, moment, percent, rate } from "./format.js";
import { Live } from "./live.js";
import { Plot } from "./plot.js";
import { Schedules } from "./schedules.js";
import { Tasks } from "./tasks.js";

const PRIORITIES = ["critical", "high", "normal", "low"];
const MEANING = { RUNNING: "ok", BUSY: "work", STARTING: "", DRAINING: "", STOPPED: "", BACKOFF: "warning", FATAL: "bad" };
const BREAKER = { closed: "", open: "t-bad", "half-open": "t-warning", "forced-open": "t-bad", disabled: "" };

const live = new Live();
const tasks = new Tasks(live);
const changes = new Changes(live);
const schedules = new Schedules(live, tasks, changes);
const plots = [
  new Plot($("plot-rate"), ["succeeded", "failed"], { unit: "/s", show: rate }),
  new Plot($("plot-queue"), PRIORITIES, { stacked: true, show: count }),
];

// -- health --------------------------------------------------------------------------------------

function health() {
  const told = live.state?.health;
  const lost = live.contact === "lost";
  document.body.dataset.contact = live.contact;
  if (!told) {
    document.body.dataset.health = lost ? "unknown" : "none";
    say($("headline"), lost ? "Connection lost" : "Connecting to the fleet");
    say($("reason"), lost ? `${live.why}; reconnecting` : "");
    contact();
    return;
  }
  document.body.dataset.health = lost ? "unknown" : told.level;
  const reasons = lost ? [{ level: "bad", text: `${live.why}; showing the state of ${clock(live.now() - (Date.now() - live.heard) / 1000)}` }] : told.reasons;
  const headline = lost ? "Connection lost" : told.text;
  say($("headline"), headline);
  say($("reason"), reasons[0]?.text ?? "");
  if ($("reason").title !== $("reason").textContent) $("reason").title = $("reason").textContent;
  $("more").hidden = reasons.length < 2;
  say($("more"), `and ${reasons.length - 1} more`);
  document.title = `${{ ok: "●", warning: "▲", bad: "■" }[document.body.dataset.health] ?? "○"} ${headline} – musterd`;
  contact();
}

function contact() {
  const ago = duration((Date.now() - live.since) / 1000);
  const last = live.state?.points?.at(-1)?.[0];
  const silent = live.contact === "live" && live.state?.health.level === "unknown";
  const text = { live: "live", lost: `lost ${ago} ago`, connecting: "connecting" }[live.contact];
  say($("contact"), silent ? (last ? `no answer since ${clock(last)}` : "no answer") : text);
  const daemon = live.state?.daemon;
  if (daemon) say($("daemon"), `musterd ${daemon.version}, pid ${daemon.pid}, up ${duration(live.now() - daemon.started_at)}`);
}

function reasons() {
  say($("detail-title"), live.state.health.text);
  $("detail-body").replaceChildren(el("ul", { class: "story" }, ...live.state.health.reasons.map((each) => el("li", { class: each.level === "bad" ? "bad" : "" }, each.text))));
  $("detail-foot").replaceChildren();
  $("detail").showModal();
}

// -- figures -------------------------------------------------------------------------------------

const waiting = (pool) => PRIORITIES.reduce((sum, name) => sum + (pool.queued[name] ?? 0), 0);

function figures() {
  const pools = Object.values(live.state.pools);
  const sum = (get) => pools.reduce((total, pool) => total + get(pool), 0);
  say($("f-running"), count(sum((pool) => pool.running)));
  say($("f-size"), ` / ${count(sum((pool) => pool.size))}`);
  say($("f-busy"), count(sum((pool) => pool.busy)));
  say($("f-queued"), count(sum(waiting)));
  say($("f-waiting"), count(sum((pool) => pool.waiting)));
  say($("f-succeeded"), count(sum((pool) => pool.succeeded)));
  const failed = sum((pool) => pool.failed);
  say($("f-failed"), count(failed));
  mark($("f-failed").parentNode, failed ? "bad" : "");
  say($("f-restarts"), count(sum((pool) => pool.restarts)));
}

function memory() {
  const told = live.state.memory;
  if (!told) return;
  const bar = $("memory-bar");
  const share = Math.min(1, told.share);
  bar.dataset.level = told.level;
  bar.setAttribute("aria-valuenow", Math.round(share * 100));
  $("memory-fill").style.width = `${share * 100}%`;
  for (const [id, at] of [["memory-warning", told.warning], ["memory-critical", told.critical]]) {
    $(id).hidden = !told.enabled || !at;
    $(id).style.left = `${at * 100}%`;
    $(id).title = `${id.slice(7)} at ${percent(at)}`;
    say($(id).firstChild, Math.round(at * 100));
  }
  const source = told.sources.find((each) => each.name === told.source) ?? told.sources[0];
  const of = source ? `${bytes(source.used_bytes)} of ${bytes(source.total_bytes)}` : "";
  const held = told.held ? `, ${told.held} workers held back` : "";
  const text = !told.enabled ? "no limits (memory.enabled = false)" : `${percent(share)}, ${of}${held}`;
  say($("memory-text"), text);
  bar.setAttribute("aria-valuetext", `${text}; warning at ${percent(told.warning)}, critical at ${percent(told.critical)}`);
  const disk = told.disk_total ? `, disk ${percent(told.disk_used / told.disk_total)}` : "";
  say($("machine"), `CPU ${percent(told.cpu)} of ${told.cpus}, load ${told.load.toFixed(1)}${disk}`);
  $("machine").title = `supervisor: ${bytes(told.supervisor_memory)}, ${(told.supervisor_cpu * 100).toFixed(1)} % of a core`;
}

function draw() {
  for (const plot of plots) plot.draw(live.state.points, live.state.fields, live.now());
}

// -- the cluster ---------------------------------------------------------------------------------

const NODE = { alive: "t-ok", draining: "t-warning", silent: "t-bad", gone: "" };
const HERE = { member: "t-ok", draining: "t-warning", joining: "t-warning", away: "t-warning", "lease over": "t-bad", down: "t-bad" };
const QUEUED = [...PRIORITIES, "waiting", "running"];

function cluster() {
  const told = live.state.cluster;
  $("cluster").hidden = !told;
  $("task-node").hidden = !told;
  if (!told) return;
  $("nodes-empty").hidden = told.nodes.length > 0;
  say($("nodes-empty"), told.seen_at ? "No nodes." : "Not seen yet: this node asks every ten seconds.");
  reconcile($("nodes").tBodies[0], told.nodes.map((row) => [row.name, row]), () => el("tr", {}, ...["name", "", "n", "n", "", "wide dim"].map((each) => el("td", { class: each }))), (node, row) => {
    const cells = node.cells;
    say(cells[0], row.name === told.node ? `${row.name} (this one)` : row.name);
    if (cells[1].textContent !== row.state) cells[1].replaceChildren(el("span", { class: `tag ${NODE[row.state] ?? ""}` }, row.state));
    say(cells[2], count(row.claims));
    node.heard = row.heard_at;
    say(cells[4], row.pools.join(", "));
    cells[4].title = cells[4].textContent;
    say(cells[5], row.software);
  });
  const queue = Object.entries(told.queue).sort();
  $("queue-empty").hidden = queue.length > 0;
  say($("queue-empty"), told.seen_at ? "Nothing is queued or running." : "Not seen yet.");
  reconcile($("cluster-queue").tBodies[0], queue, () => el("tr", {}, ...["name", ...QUEUED.map(() => "n")].map((each) => el("td", { class: each }))), (node, row, name) => {
    say(node.cells[0], name);
    QUEUED.forEach((column, index) => {
      const number = row[column] ?? 0;
      say(node.cells[index + 1], count(number));
      node.cells[index + 1].classList.toggle("zero", !number);
    });
  });
  const select = $("task-node");
  const names = told.nodes.filter((each) => each.state !== "gone").map((each) => each.name);
  if ([...select.options].slice(2).map((each) => each.value).join() !== names.join()) {
    const kept = select.value;
    select.replaceChildren(select.options[0], select.options[1], ...names.map((name) => el("option", { value: name }, `node ${name}`)));
    select.value = ["*", "", ...names].includes(kept) ? kept : "*";
  }
  leases();
}

function leases() {
  const told = live.state?.cluster;
  if (!told) return;
  const now = live.now();
  const parts = [el("span", { class: `tag ${HERE[told.state] ?? ""}` }, told.state)];
  let text = ` ${told.node}`;
  if (told.away_at) text += `, the database has not answered for ${duration(now - told.away_at)}`;
  if (told.lease_until) text += `, lease ${duration(Math.max(0, told.lease_until - now))}`;
  text += `, ${count(told.attempts)} tasks here`;
  if (told.unconfirmed) text += `, ${count(told.unconfirmed)} results kept`;
  if (told.stalled) text += ", vacuum stalled";
  if ($("cluster-here").textContent !== told.state + text) $("cluster-here").replaceChildren(...parts, text);
  say($("cluster-age"), told.seen_at ? `seen ${duration(now - told.seen_at)} ago` : "");
  $("cluster-age").title = `policy ${told.policy}, oldest snapshot ${duration(told.oldest_snapshot)}, ${count(told.dead_rows)} dead rows, ${bytes(told.bytes)}`;
  for (const node of $("nodes").tBodies[0].rows) say(node.cells[3], duration(now - node.heard));
}

// -- pools ---------------------------------------------------------------------------------------

function pools() {
  const pairs = Object.entries(live.state.pools);
  $("pools-empty").hidden = pairs.length > 0;
  say($("pools-empty"), "No pools configured.");
  reconcile($("pools").tBodies[0], pairs, poolRow, (node, pool, name) => {
    const cells = [...node.cells];
    const state = pool.halt || pool.state;
    const kind = pool.halt ? "warning" : MEANING[pool.state];
    if (cells[1].textContent !== state) cells[1].replaceChildren(el("span", { class: `tag t-${kind}` }, state));
    const texts = [name, null, `${pool.running} / ${pool.size}`, pool.busy, ...PRIORITIES.map((each) => count(pool.queued[each] ?? 0)), count(pool.waiting), count(pool.succeeded), count(pool.failed), count(pool.restarts), pool.reason || pool.held || pool.scaled || ""];
    texts.forEach((text, index) => {
      if (text === null) return;
      say(cells[index], text);
      if (index > 2 && index < 12) cells[index].classList.toggle("zero", String(text) === "0");
    });
    cells[10].classList.toggle("bad", pool.failed > 0);
    if (cells[12].title !== cells[12].textContent) cells[12].title = cells[12].textContent;
    if (actions.possible()) {
      if (!cells[13].firstChild) cells[13].append(
        el("button", { class: "quiet small", type: "button", "data-do": "scale", "aria-label": `Scale ${name}`, onclick: () => actions.scale(name, live.state.pools[name].size) }, "Scale"),
        el("button", { class: "quiet small", type: "button", "data-do": "drain", onclick: () => (live.state.pools[name].halt ? actions.resume(name) : actions.drain(name)) }));
      const button = cells[13].lastChild;
      say(button, pool.halt ? "Resume" : "Drain");
      button.setAttribute("aria-label", `${button.textContent} ${name}`);
    } else cells[13].replaceChildren();
  });
  const select = $("task-pool");
  const names = pairs.map(([name]) => name);
  if ([...select.options].slice(1).map((each) => each.value).join() !== names.join()) {
    const kept = select.value;
    select.replaceChildren(select.options[0], ...names.map((name) => el("option", { value: name }, name)));
    select.value = names.includes(kept) ? kept : "";
  }
}

function poolRow(_pool, name) {
  const classes = ["name", "", "n", "n", "n", "n", "n", "n", "n wide", "n wide", "n", "n wide", "wide note", "act"];
  return el("tr", { "data-pool": name }, ...classes.map((each) => el("td", { class: each })));
}

// -- workers -------------------------------------------------------------------------------------

function wanted(name, worker) {
  const state = $("worker-state").value;
  if (state && worker.state !== state) return false;
  const text = `${name} ${worker.state} ${worker.task ?? ""} ${worker.method ?? ""} ${worker.halt ?? ""} ${worker.reason ?? ""}`.toLowerCase();
  return $("worker-words").value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function workers() {
  const all = Object.entries(live.state.workers);
  const shown = all.filter(([name, worker]) => wanted(name, worker));
  reconcile($("grid"), shown, workerCell, updateWorker);
  const states = [...new Set(all.map(([, worker]) => worker.state))].sort();
  const select = $("worker-state");
  const value = select.value;
  if (value && !states.includes(value)) states.push(value);
  if ([...select.options].slice(1).map((each) => each.value).join() !== states.join()) {
    select.replaceChildren(select.options[0], ...states.map((state) => el("option", { value: state }, state)));
    select.value = value;
  }
  say($("worker-count"), shown.length === all.length ? `${all.length} workers` : `${shown.length} of ${all.length}`);
  $("workers-empty").hidden = shown.length > 0;
  say($("workers-empty"), all.length ? "No matching workers." : "No workers: the pools have size 0 or have not started yet.");
}

function workerCell() {
  const one = el("div", { class: "one" }, el("span", { class: "name" }), el("span", { class: "state" }));
  const two = el("div", { class: "two" }, el("span", { class: "what" }), el("span", { title: "duration" }), el("span", { title: "memory of the worker and its processes" }));
  return el("li", { tabindex: -1, role: "button" }, one, two);
}

function updateWorker(node, worker, name) {
  const [one, two] = node.children;
  mark(node, `s-${MEANING[worker.state]}`);
  say(one.firstChild, name);
  const restarts = worker.restarts ? `, ${worker.restarts}↻` : "";
  say(one.lastChild, `${(worker.halt || worker.state).toLowerCase()}${restarts}`);
  say(two.firstChild, worker.task ? worker.method : worker.reason || (worker.up_at ? "idle" : ""));
  age(node, worker);
  const label = `${name}, ${worker.state}${worker.task ? `, running ${worker.method}` : ""}, ${worker.restarts ?? 0} restarts`;
  if (node.getAttribute("aria-label") !== label) node.setAttribute("aria-label", label);
}

function age(node, worker) {
  const since = worker.task_at || worker.up_at;
  const [, lasted, memory] = node.lastChild.children;
  say(lasted, since ? duration(live.now() - since) : "");
  say(memory, worker.memory ? bytes(worker.memory) : "");
}

function openWorker(name) {
  const worker = live.state.workers[name];
  if (!worker) return;
  const now = live.now();
  const facts = [
    ["State", worker.halt ? `${worker.state}, ${worker.halt}` : worker.state], ["PID", worker.pid], ["Uptime", worker.up_at && duration(now - worker.up_at)],
    ["Memory", worker.memory && bytes(worker.memory)], ["Tasks done", count(worker.done ?? 0)], ["Restarts", worker.restarts ?? "0"],
    ["Task", worker.task && `${worker.method}, for ${duration(now - (worker.task_at || now))}`], ["Reason", worker.reason],
  ].filter(([, value]) => value);
  say($("detail-title"), name);
  $("detail-body").replaceChildren(el("dl", { class: "facts" }, ...facts.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, String(value))])),
    el("p", { class: "dim small" }, `Output: musterctl tail -f ${name.split(" ")[0]}`));
  $("detail-foot").replaceChildren(...(worker.task ? [el("button", { type: "button", onclick: () => tasks.open(worker.task) }, "Show task")] : []));
  $("detail").showModal();
}

// -- breakers, events -----------------------------------------------------------------

function breakers() {
  const rows = live.state.breakers;
  if (!rows) return;
  const open = rows.filter((row) => !["closed", "disabled"].includes(row.state)).length;
  say($("breaker-count"), rows.length ? `${open} of ${rows.length} open` : "");
  $("breakers-empty").hidden = rows.length > 0;
  say($("breakers-empty"), "No sites yet.");
  reconcile($("breakers").tBodies[0], rows.map((row) => [row.target, row]), (row) => el("tr", { "data-target": row.target }, ...["", "", "n", "n wide", "n", "act"].map((each) => el("td", { class: each }))), (node, row) => {
    const cells = node.cells;
    say(cells[0], row.target);
    if (cells[0].title !== row.target) cells[0].title = row.target;
    if (cells[1].textContent !== row.state) cells[1].replaceChildren(el("span", { class: `tag ${BREAKER[row.state] ?? ""}` }, row.state));
    node.until = row.open_until;
    say(cells[3], row.failures);
    say(cells[4], count(row.waiting));
    const possible = actions.possible() && (row.state !== "closed" || row.failures > 0);
    if (possible && !cells[5].firstChild) cells[5].append(el("button", { type: "button", class: "quiet small", "aria-label": `Reset ${row.target}`, onclick: () => actions.reset(row.target) }, "Reset"));
    if (!possible) cells[5].replaceChildren();
  });
}

function events() {
  const rows = live.state.events;
  if (!rows) return;
  $("events-empty").hidden = rows.length > 0;
  say($("events-empty"), "No events yet.");
  const seen = new Map();
  const pairs = rows.map((row) => {
    const key = `${row.at} ${row.event} ${row.worker ?? row.schedule ?? ""} ${row.task ?? ""}`;
    const times = (seen.get(key) ?? 0) + 1;
    seen.set(key, times);
    return [`${key} ${times}`, row];
  });
  reconcile($("events").tBodies[0], pairs, (row) => {
    const why = row.reason ?? row.task ?? "";
    return el("tr", { class: row.level ?? "" }, el("td", { title: moment(row.at) }, clock(row.at)), el("td", { title: row.event }, row.event), el("td", {}, row.worker ?? row.schedule ?? row.pool ?? row.target ?? ""), el("td", { class: "dim", title: why }, why));
  }, () => {});
}

function countdowns() {
  const now = live.now();
  leases();
  for (const node of $("breakers").tBodies[0].rows) say(node.cells[2], node.until ? duration(node.until - now) : "–");
  schedules.second();
}

// -- news ----------------------------------------------------------------------------------------

const PARTS = { pools: [pools, figures], workers: [workers], memory: [memory], breakers: [breakers], schedules: [() => schedules.render(), () => changes.switched()], events: [events], cluster: [cluster, () => tasks.switched()] };

live.addEventListener("news", ({ detail: news }) => {
  if (!live.state.daemon) { health(); return; } // the daemon has not answered yet
  if ("actions" in news) { actions.configure(news.actions); pools(); breakers(); schedules.render(); }
  for (const [name, parts] of Object.entries(PARTS)) if (name in news) parts.forEach((part) => part());
  if (news.points || news.point) draw();
  if ("tasks" in news || "dead" in news) tasks.render();
  health();
  countdowns();
});
live.addEventListener("contact", health);
live.addEventListener("second", () => {
  contact();
  if (live.contact !== "live" || !live.state) { if (live.state) health(); return; }
  if (live.state.health.level === "unknown") return; // old data does not age
  countdowns();
  tasks.second();
  for (const node of $("grid").children) { const worker = live.state.workers[node.dataset.key]; if (worker) age(node, worker); }
});
for (const [id, event] of [["worker-words", "input"], ["worker-state", "change"]]) $(id).addEventListener(event, () => live.state && workers());
rove($("grid"), openWorker);
$("more").addEventListener("click", reasons);
$("unlock").addEventListener("click", actions.toggle);
window.addEventListener("hashchange", actions.unlockByLink);
actions.unlockByLink();
live.connect();
