// Changes of what schedules watch: the newest of all, and the history of one with its diffs.

import * as actions from "./actions.js";
import { $, el, reconcile, rove, say } from "./dom.js";
import { moment } from "./format.js";

const REFRESH_MS = 10000;
const RETRY_MS = 2000; // after an error, while the dialog is open

export class Changes {
  constructor(live) {
    this.live = live;
    this.rows = [];
    this.problem = "";
    this.body = $("changes").tBodies[0];
    rove(this.body, (key) => this.open(JSON.parse(key)[0]));
    document.addEventListener("visibilitychange", () => this.#ask());
  }

  // Schedules have come: there may be changes. Without any schedule there is nothing to show.
  switched() {
    $("changes-part").hidden = !this.live.state.schedules?.length;
    if (!this.timer && !$("changes-part").hidden) this.#ask();
  }

  async #ask() {
    clearTimeout(this.timer);
    if (document.hidden || $("changes-part").hidden) { this.timer = 0; return; }
    this.timer = setTimeout(() => this.#ask(), REFRESH_MS);
    try {
      const answer = await fetch("/api/changes", { cache: "no-store" });
      const told = await answer.json();
      this.problem = answer.ok ? "" : told.error;
      if (answer.ok) this.rows = told.rows;
    } catch {
      this.problem = "The web process does not respond.";
    }
    this.#render();
  }

  #render() {
    const pairs = this.rows.map((row) => [JSON.stringify([row.schedule, row.number, row.task]), row]);
    reconcile(this.body, pairs, (row) => el("tr", { tabindex: -1 },
      el("td", { class: "dim" }, moment(row.at)), el("td", { title: row.schedule }, row.schedule),
      el("td", { title: row.summary }, row.summary || "another result")), () => {});
    $("changes-empty").hidden = this.rows.length > 0;
    say($("changes-empty"), this.problem || "No changes yet: a schedule with notify = \"task.changed\" reports them.");
  }

  open(name) {
    say($("detail-title"), `History of ${name}`);
    $("detail-body").replaceChildren(el("p", { class: "empty" }, "Loading"));
    $("detail-foot").replaceChildren();
    if (!$("detail").open) $("detail").showModal();
    $("detail-body").focus();
    this.opened = { name };
    this.#load(this.opened);
  }

  // Shows a history, unless the dialog was closed or shows something else by now.
  async #load(opened) {
    const { name } = opened;
    let told, problem = "";
    try {
      told = await actions.told("/api/history", { name });
    } catch (error) {
      problem = error.message;
    }
    if (this.opened !== opened || !$("detail").open || $("detail-title").textContent !== `History of ${name}`) return;
    if (problem) {
      $("detail-body").replaceChildren(el("p", { class: "empty bad" }, problem));
      setTimeout(() => this.#load(opened), RETRY_MS);
      return;
    }
    const hint = told.entitled ? null : el("p", { class: "dim small" }, actions.possible() ? "Unlock actions to see the diffs." : `Diffs: musterctl changes ${name} --diff`);
    const rows = told.rows.length ? told.rows.map((row) => this.#entry(row)) : [el("p", { class: "empty" }, "No results yet.")];
    $("detail-body").replaceChildren(...[hint, ...rows].filter((each) => each));
  }

  #entry(row) {
    const kind = row.changed ? el("span", { class: "tag t-work" }, "change") : el("span", { class: "tag" }, "result");
    const words = row.summary || (row.cut ? "too long to show" : "the first result");
    const head = el("div", { class: "entry" }, el("time", { class: "dim" }, moment(row.at)), kind, el("span", {}, words));
    return el("div", {}, head, row.diff ? this.#diff(row.diff) : null);
  }

  #diff(text) {
    const kinds = { "+": "added", "-": "removed", "@": "dim" };
    const lines = text.split("\n").filter((line) => !/^(--- before|\+\+\+ after)$/.test(line));
    return el("pre", { class: "diff" }, ...lines.map((line) => el("span", { class: kinds[line[0]] ?? "" }, `${line}\n`)));
  }
}
