// Tasks: recent and failed ones come with snapshots; other lists and searches are fetched.

import * as actions from "./actions.js";
import { $, el, mark, reconcile, rove, say } from "./dom.js";
import { bytes, clock, count, duration, moment, percent, took } from "./format.js";

const REFRESH_MS = 3000;
const TYPING_MS = 250;
const KINDS = { succeeded: "t-ok", failed: "t-bad", running: "t-work", cancelled: "", expired: "t-warning", waiting: "", queued: "" };
const EMPTY = {
  finished: "No finished tasks yet. Submit one: musterctl submit POOL.TASK key=value",
  failed: "No failed tasks.",
  running: "No running tasks.",
  queued: "No queued tasks.",
};

export const tag = (state) => el("span", { class: `tag ${KINDS[state] ?? ""}` }, state);

export class Tasks {
  constructor(live) {
    this.live = live;
    this.body = $("tasks").tBodies[0];
    this.found = null; // the fetched list; null: show that of the snapshot
    rove(this.body, (id) => this.open(id));
    for (const id of ["task-state", "task-pool"]) $(id).addEventListener("change", () => this.search(0));
    $("task-node").addEventListener("change", (event) => {
      if (!["", "*"].includes(event.target.value)) $("task-state").value = "running"; // only these have a node
      this.search(0);
    });
    $("task-words").addEventListener("input", () => this.search(TYPING_MS));
    $("retry-shown").addEventListener("click", () => actions.retry(this.rows.slice(0, 100).map((row) => row.id)));
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !event.target.closest("input, select, dialog")) { event.preventDefault(); $("task-words").focus(); }
    });
  }

  // On a node of a cluster: "*" for all nodes, a node's name, or "" for this machine's own store.
  #node() {
    return this.live.state?.cluster ? $("task-node").value : "";
  }

  #query() {
    return { state: $("task-state").value, pool: $("task-pool").value, node: this.#node(), q: $("task-words").value.trim() };
  }

  // The machine has turned out to be a node of a cluster, or is none any more.
  switched() {
    if (this.clustered === Boolean(this.live.state.cluster)) return;
    this.clustered = Boolean(this.live.state.cluster);
    this.search(0);
  }

  #told() {
    const { state, pool, node, q } = this.#query();
    if (pool || q || node) return null;
    return { finished: this.live.state?.tasks, failed: this.live.state?.dead }[state];
  }

  search(pause) {
    clearTimeout(this.timer);
    this.found = null;
    this.problem = "";
    if (this.#told()) { this.render(); return; }
    this.timer = setTimeout(() => this.#ask(), pause);
    this.render();
  }

  async #ask() {
    const query = this.#query();
    const asked = JSON.stringify(query);
    try {
      const answer = await fetch(`/api/tasks?${new URLSearchParams(query)}`, { cache: "no-store" });
      const told = await answer.json();
      if (asked !== JSON.stringify(this.#query())) return; // the query has changed meanwhile
      if (answer.ok) { this.found = told; this.problem = ""; }
      else this.problem = told.error;
    } catch {
      this.problem = "The web process does not respond.";
    }
    this.render();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { if (!this.#told() && !document.hidden) this.#ask(); else this.timer = setTimeout(() => this.#ask(), REFRESH_MS); }, REFRESH_MS);
    if (this.#told()) clearTimeout(this.timer);
  }

  render() {
    const list = this.#told() ?? this.found;
    const { state, node, q } = this.#query();
    this.rows = list?.rows ?? [];
    reconcile(this.body, this.rows.map((row) => [row.id, row]), () => this.#row(), (node, row) => this.#update(node, row));
    const empty = $("tasks-empty");
    empty.hidden = this.rows.length > 0;
    if (this.problem) say(empty, this.problem);
    else if (!list) say(empty, this.live.state ? "Searching" : "Loading");
    else if (list.refused) say(empty, `Not shown: ${list.refused}.`);
    else if (!q && node && node !== "*" && state !== "running") say(empty, "Only running tasks have a node: choose “running”.");
    else say(empty, q ? `Nothing matches “${q}” among the newest ${count(list.searched ?? 0)} tasks.` : EMPTY[state] ?? "No tasks.");
    const found = list?.found ?? this.rows.length;
    const more = list?.more ? "+" : "";
    say($("task-count"), !list ? "" : found > this.rows.length || list.more ? `newest ${this.rows.length} of ${count(found)}${more}` : `${this.rows.length} shown`);
    $("retry-shown").hidden = !(actions.possible() && state === "failed" && this.rows.length && !node);
  }

  #row() {
    const classes = ["c-state", "c-name", "wide c-id mono dim", "wide c-target", "n wide", "n wide", "n dim", "c-error"];
    return el("tr", { tabindex: -1 }, ...classes.map((name) => el("td", { class: name })));
  }

  #update(node, row) {
    const [state, name, id, target, attempt, run, when, error] = node.cells;
    if (state.firstChild?.textContent !== row.state) state.replaceChildren(tag(row.state));
    say(name, row.name);
    say(id, row.id.length > 20 ? `${row.id.slice(0, 8)}…${row.id.slice(-8)}` : row.id);
    say(target, row.target ?? "");
    say(attempt, row.attempt ?? 0);
    const now = this.live.now();
    say(run, row.began_at ? duration(now - row.began_at) : took(row.run_seconds));
    say(when, this.#when(row, now));
    say(error, row.error ?? row.waits_for ?? (row.worker || row.node ? `on ${row.worker ?? row.node}` : ""));
    mark(error, row.error ? "c-error bad" : "c-error dim");
    if (error.title !== error.textContent) error.title = error.textContent;
  }

  #when(row, now) {
    const at = row.finished_at ?? row.began_at ?? row.submitted_at;
    if (!at) return "–";
    return now - at < 3600 ? duration(now - at) : clock(at);
  }

  second() {
    const now = this.live.now();
    for (const row of this.rows ?? []) {
      const node = this.body.known?.get(row.id);
      if (node) say(node.cells[6], this.#when(row, now));
    }
  }

  // -- one task ------------------------------------------------------------------------------

  async open(id) {
    const dialog = $("detail");
    say($("detail-title"), `Task ${id}`);
    $("detail-body").replaceChildren(el("p", { class: "empty" }, "Loading"));
    $("detail-foot").replaceChildren();
    if (!dialog.open) dialog.showModal();
    $("detail-body").focus();
    let task;
    try {
      task = await actions.told("/api/task", { id, node: this.#node() });
    } catch (error) {
      $("detail-body").replaceChildren(el("p", { class: "empty bad" }, error.message));
      return;
    }
    if ($("detail-title").textContent !== `Task ${id}`) return; // another one was opened meanwhile
    say($("detail-title"), task.name);
    $("detail-body").replaceChildren(...this.#detail(task));
    $("detail-foot").replaceChildren(...this.#buttons(task));
  }

  #detail(task) {
    const facts = [
      ["State", tag(task.state)], ["ID", el("code", {}, task.id)], ["Priority", task.priority], ["Site", task.target],
      ["Node", task.node], ["Worker", task.worker], ["Attempt", task.attempt], ["Crashes", task.crashes], ["Policy", task.policy],
      ["Submitted", task.submitted_at && moment(task.submitted_at)], ["Finished", task.finished_at && moment(task.finished_at)],
      ["Run time", task.run_seconds && took(task.run_seconds)], ["Waiting for", task.waits_for],
      ["Progress", task.progress && `${percent(task.progress)} ${task.progress_text}`],
    ].filter(([, value]) => value);
    const parts = [el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value instanceof Node ? value : String(value))]))];
    if (task.error) parts.push(el("h3", {}, "Error"), el("pre", { class: "bad" }, task.error));
    if (task.traceback) parts.push(el("pre", {}, task.traceback));
    if (task.args) parts.push(el("h3", {}, "Arguments"), el("pre", {}, task.args));
    if (task.artefacts?.length) {
      parts.push(el("h3", {}, "Artefacts of failed attempts"), el("ul", { class: "artefacts" }, ...task.artefacts.map((each) => el("li", {},
        el("button", { type: "button", onclick: () => actions.download(task.id, each.name) }, each.name), el("span", { class: "dim" }, ` ${bytes(each.bytes)}`)))));
    }
    parts.push(el("h3", {}, "History"), this.#story(task));
    if (!task.entitled) parts.push(el("p", { class: "dim small" }, actions.possible() ? "Unlock actions to see arguments and tracebacks." : `Arguments and tracebacks: musterctl task ${task.id}`));
    return parts;
  }

  // Merges failed attempts of the store and events by time. An attempt comes before its outcome at
  // the same time: their clocks differ by the time the store took.
  #story(task) {
    const steps = [];
    if (task.submitted_at) steps.push([task.submitted_at, "submitted", ""]);
    for (const each of task.attempts) steps.push([each.at, `attempt ${each.attempt} failed${each.worker ? ` on ${each.worker}` : ""}`, each.error, each.traceback]);
    for (const each of task.story) steps.push([each.at, `${each.event}${each.worker ? ` on ${each.worker}` : ""}`, each.reason ?? ""]);
    if (task.finished_at) steps.push([task.finished_at, task.state, ""]);
    const tenth = ([at]) => Math.round(at * 10);
    steps.sort((one, other) => tenth(one) - tenth(other)); // stable
    return el("ol", { class: "story" }, ...steps.map(([at, what, why, traceback]) => el("li", {},
      el("time", {}, clock(at)), el("span", {}, what), why ? el("div", { class: "dim" }, why) : null,
      traceback ? el("details", {}, el("summary", {}, "Traceback"), el("pre", {}, traceback)) : null)));
  }

  #buttons(task) {
    if (!actions.possible() || this.#node()) return []; // a task of the cluster: musterctl --cluster
    const then = async (done) => { if (await done) this.open(task.id); };
    if (["failed", "cancelled", "expired"].includes(task.state)) return [el("button", { type: "button", id: "retry", onclick: () => then(actions.retry([task.id])) }, "Retry")];
    if (task.state === "succeeded") return [];
    return [el("button", { type: "button", id: "cancel", onclick: () => then(actions.cancel(task.id)) }, "Cancel task")];
  }
}
