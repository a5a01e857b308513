// Schedules: the list, one with its actions, and the form that adds or edits one.

import * as actions from "./actions.js";
import { $, el, reconcile, rove, say } from "./dom.js";
import { count, duration, moment } from "./format.js";
import { tag } from "./tasks.js";

const TYPING_MS = 250;
const RETRY_MS = 2000;
const KINDS = { active: "t-ok", paused: "t-warning", disabled: "", unusable: "t-bad" };
const EXAMPLE = { task: "parser.extract", every: "5m", notify: "task.changed", args: { url: "", select: { price: ".price" } } };

// Fields of the form: how a key is written as text, and how the text is read. Other keys are JSON.
const text = { write: String, read: (typed) => typed };
const number = { write: String, read: (typed) => (Number.isNaN(Number(typed)) ? typed : Number(typed)) };
const list = { write: (value) => [value].flat().join(", "), read: (typed) => typed.split(",").map((each) => each.trim()).filter((each) => each) };
const json = { write: (value) => JSON.stringify(value, null, 2), read: parsed };
const FIELDS = { task: text, every: text, cron: text, session: text, args: json, watch: list, above: number, below: number, by: text };

function parsed(typed, what = "Arguments") {
  let value;
  try {
    value = JSON.parse(typed);
  } catch (error) {
    throw new Error(`${what}: not JSON: ${error.message}`);
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error(`${what}: write a JSON object, such as {"url": "…"}`);
  return value;
}

export class Schedules {
  constructor(live, tasks, changes) {
    Object.assign(this, { live, tasks, changes, found: null, problem: "", shown: "" });
    this.body = $("schedules").tBodies[0];
    rove(this.body, (name) => this.open(name));
    $("schedule-words").addEventListener("input", () => this.#search(TYPING_MS));
    $("schedule-add").addEventListener("click", () => this.#form("", EXAMPLE));
    $("detail").addEventListener("close", () => { this.shown = ""; });
  }

  // -- the list ------------------------------------------------------------------------------

  // New ones have come. A list that was fetched is fetched again.
  render() {
    const all = this.live.state.schedules;
    if (!all) return;
    if (this.found) this.#search(0);
    this.#list();
    if (this.shown && $("detail").open) this.#detail();
  }

  #words() {
    return $("schedule-words").value.toLowerCase().split(/\s+/).filter((word) => word);
  }

  // A snapshot has the first ones by name: only where there are more, a search is a question.
  #search(pause) {
    clearTimeout(this.timer);
    if (!this.live.state?.more_schedules || !this.#words().length) { this.found = null; this.problem = ""; this.#list(); return; }
    this.timer = setTimeout(async () => {
      const q = $("schedule-words").value;
      let found = this.found ?? { rows: [], found: 0 };
      let problem = "";
      try {
        found = await actions.told("/api/schedules", { q });
      } catch (error) {
        problem = error.message;
      }
      if (q !== $("schedule-words").value) return; // more was typed meanwhile
      Object.assign(this, { found, problem });
      this.#list();
    }, pause);
  }

  #list() {
    const all = this.live.state?.schedules;
    if (!all) return;
    const words = this.#words();
    const rows = this.found?.rows ?? all.filter((row) => words.every((word) => `${row.name} ${row.task} ${row.state}`.toLowerCase().includes(word)));
    $("schedule-add").hidden = !actions.possible();
    $("schedules-empty").hidden = rows.length > 0;
    say($("schedules-empty"), this.problem || (words.length ? "No matching schedules." : actions.possible() ? "No schedules: add one." : "No schedules configured."));
    const more = this.live.state.more_schedules && !this.found;
    say($("schedule-count"), this.found?.found > rows.length ? `${rows.length} of ${count(this.found.found)}` : more ? `the first ${all.length}` : all.length ? `${rows.length} shown` : "");
    reconcile(this.body, rows.map((row) => [row.name, row]), () => el("tr", { tabindex: -1 }, ...["", "dim wide", "n", ""].map((each) => el("td", { class: each }))), (node, row) => {
      const cells = node.cells;
      say(cells[0], row.name);
      cells[0].title = `${row.name}: ${row.task}`;
      say(cells[1], row.when);
      node.next = row.state === "active" ? row.next_at : 0;
      node.idle = row.state;
      if (cells[3].textContent !== (row.last_state || "–")) cells[3].replaceChildren(row.last_state ? tag(row.last_state) : "–");
      cells[3].title = `${count(row.runs)} runs, ${count(row.skipped)} skipped` + (row.skipped_why ? `, the last because ${row.skipped_why}` : "");
    });
    this.second();
  }

  second() {
    const now = this.live.now();
    for (const node of this.body.rows) {
      say(node.cells[2], node.next ? duration(node.next - now) : node.idle);
      const at = node.next ? moment(node.next) : "";
      if (node.cells[2].title !== at) node.cells[2].title = at;
    }
  }

  #row(name) {
    return [...(this.found?.rows ?? []), ...this.live.state.schedules].find((row) => row.name === name);
  }

  // -- one schedule --------------------------------------------------------------------------

  open(name) {
    if (!this.#row(name)) return;
    if (!$("detail").open) $("detail").showModal();
    this.shown = name;
    this.keys = null;
    $("detail-body").told = $("detail-foot").told = "";
    this.#detail();
    $("detail-body").focus();
    this.#load(name);
  }

  // Shows the keys, unless the dialog was closed or shows something else by now.
  async #load(name) {
    if (!actions.unlocked() || this.#row(name)?.origin) return;
    const loading = this.loading = {};
    let keys = null;
    try {
      keys = await this.#keys(name);
    } catch { /* It was removed, which the list will say, or the daemon is busy. */ }
    if (this.loading !== loading || this.shown !== name) return;
    if (!keys) { setTimeout(() => { if (this.loading === loading && this.shown === name) this.#load(name); }, RETRY_MS); return; }
    this.keys = keys;
    this.#detail();
  }

  async #keys(name) {
    return (await actions.told("/api/schedule", { name })).keys;
  }

  #detail() {
    const row = this.#row(this.shown);
    if (!row) { $("detail").close(); return; } // it was removed
    const facts = [
      ["State", el("span", { class: `tag ${KINDS[row.state] ?? ""}` }, row.state)], ["Problem", row.problem], ["Task", row.task], ["When", row.when],
      ["Next run", row.state === "active" && row.next_at && moment(row.next_at)],
      ["Last run", row.last_at && el("span", {}, `${moment(row.last_at)} `, tag(row.last_state || "unknown"))],
      ["Runs", count(row.runs)], ["Skipped", row.skipped && `${count(row.skipped)}${row.skipped_why ? `, the last because ${row.skipped_why}` : ""}`],
      ["Failures", row.failures && `${count(row.failures)} in a row`], ["Defined", row.origin ? `in ${row.origin}` : "at run time"],
    ].filter(([, value]) => value);
    const parts = [el("dl", { class: "facts" }, ...facts.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value instanceof Node ? value : String(value))]))];
    if (this.keys) parts.push(el("h3", {}, "Keys"), el("pre", {}, json.write(this.keys)));
    if (row.origin) parts.push(el("p", { class: "dim small" }, "A schedule of the configuration is read-only here: edit the file, then reload. It can be run and paused."));
    else if (!this.keys) parts.push(el("p", { class: "dim small" }, actions.unlocked() ? "Loading its keys" : actions.possible() ? "Unlock actions to see its keys." : "Its keys are shown to those with the token of http.token_file."));
    say($("detail-title"), `Schedule ${row.name}`);
    const buttons = JSON.stringify([row.state, Boolean(row.origin), Boolean(row.last_task), actions.possible()]);
    if ($("detail-foot").told !== buttons) { // else they stay, with the focus
      $("detail-foot").told = buttons;
      $("detail-foot").replaceChildren(...this.#buttons(row));
    }
    const state = JSON.stringify([row, this.keys, actions.possible(), actions.unlocked()]);
    if ($("detail-body").told === state) return; // nothing flickers
    $("detail-body").told = state;
    $("detail-body").replaceChildren(...parts);
  }

  #buttons(row) {
    const { name } = row;
    const button = (label, act) => el("button", { type: "button", onclick: act }, label);
    const looks = [button("History", () => this.changes.open(name))];
    if (row.last_task) looks.push(button("Last run", () => this.tasks.open(this.#row(name).last_task)));
    for (const each of looks) each.addEventListener("click", () => { this.shown = ""; });
    if (!actions.possible()) return looks;
    const then = async (done) => { if (await done && this.shown === name && !this.keys) this.#load(name); };
    const acts = row.state === "unusable" ? [] : [
      button("Run now", () => then(actions.runSchedule(name))),
      row.state === "paused" ? button("Resume", () => then(actions.resumeSchedule(name))) : button("Pause", () => then(actions.pauseSchedule(name))),
    ];
    if (!row.origin) acts.push(button("Edit", () => this.#edit(name)), button("Remove", () => then(actions.removeSchedule(name))));
    return [...looks, el("span", { class: "gap" }), ...acts];
  }

  // -- the form ------------------------------------------------------------------------------

  async #edit(name) {
    if (!(await actions.ensure())) return;
    try {
      await this.#form(name, await this.#keys(name));
    } catch (error) {
      actions.complain(error);
    }
  }

  async #form(name, keys) {
    if (!(await actions.ensure())) return;
    const form = $("schedule-form");
    form.reset();
    say($("schedule-title"), name ? `Edit schedule ${name}` : "Add a schedule");
    say($("schedule-save"), name ? "Save" : "Add");
    say($("schedule-error"), "");
    $("s-name").value = name;
    $("s-name").readOnly = Boolean(name);
    for (const [key, kind] of Object.entries(FIELDS)) $(`s-${key}`).value = key in keys ? kind.write(keys[key]) : "";
    $("s-notify").checked = keys.notify === "task.changed";
    const others = Object.entries(keys).filter(([key]) => !(key in FIELDS) && key !== "notify");
    $("s-other").value = others.length ? json.write(Object.fromEntries(others)) : "";
    $("s-tasks").replaceChildren(...this.#known().map((value) => el("option", { value })));
    const first = this.#typed();
    form.onsubmit = (event) => { event.preventDefault(); this.#save(name, first); };
    $("schedule").showModal();
    $(name ? "s-task" : "s-name").focus();
  }

  #known() {
    const built = Object.keys(this.live.state.pools).filter((pool) => ["parser", "browser"].includes(pool)).map((pool) => `${pool}.extract`);
    return [...new Set([...built, ...this.live.state.schedules.map((row) => row.task)])].slice(0, 50);
  }

  // The texts of all fields by key.
  #typed() {
    const typed = Object.fromEntries(Object.keys(FIELDS).map((key) => [key, $(`s-${key}`).value.trim()]));
    return { ...typed, notify: $("s-notify").checked ? "task.changed" : "", other: $("s-other").value.trim() };
  }

  // Returns the keys that differ from what was there first, and those to be taken out.
  #changed(first) {
    const typed = this.#typed();
    const keys = {};
    const unset = [];
    for (const [key, kind] of Object.entries({ ...FIELDS, notify: text })) {
      if (typed[key] === first[key]) continue;
      if (typed[key]) keys[key] = kind.read(typed[key]);
      else unset.push(key);
    }
    const before = first.other ? parsed(first.other, "Other keys") : {};
    const after = typed.other ? parsed(typed.other, "Other keys") : {};
    for (const [key, value] of Object.entries(after)) {
      if (key in FIELDS || key === "notify") throw new Error(`Other keys: “${key}” has a field of its own`);
      if (JSON.stringify(value) !== JSON.stringify(before[key])) keys[key] = value;
    }
    return { keys, unset: [...unset, ...Object.keys(before).filter((key) => !(key in after))] };
  }

  async #save(name, first) {
    const save = $("schedule-save");
    if (save.disabled || !(await actions.ensure())) return;
    save.disabled = true;
    say($("schedule-error"), "");
    try {
      if (!$("s-name").value.trim()) throw new Error("Name: it is missing: give one, such as kites");
      const empty = Object.fromEntries(Object.keys(first).map((key) => [key, ""]));
      const { keys, unset } = this.#changed(name ? first : empty);
      if (name) await actions.act({ action: "schedule.edit", name, keys, unset });
      else await actions.act({ action: "schedule.add", name: $("s-name").value.trim(), keys });
      $("schedule").close();
      if (name && this.shown === name) this.#load(name);
    } catch (error) {
      say($("schedule-error"), error.message);
      $("schedule-error").scrollIntoView({ block: "nearest" });
    } finally {
      save.disabled = false;
    }
  }
}
