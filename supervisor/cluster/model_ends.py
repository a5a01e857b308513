"""Ends of attempts and of tasks in the engine in memory: retries, sites, keys, time, commands."""

from collections.abc import Sequence
from typing import Literal

from msgspec import structs

from musterd.ipc.wire.messages import (
    CANCEL,
    CANCELLED,
    CRASH,
    ERROR,
    EXPIRED,
    FAILED,
    INVALID,
    POISON,
    QUEUED,
    RUNNING,
    SHUT,
    SHUT_TYPE,
    SUCCEEDED,
    WAITING,
    FailedAttempt,
    Failure,
    Outcome,
    Rejection,
)
from musterd.supervisor.cluster.engine import (
    GOOD_TTL_NS,
    HISTORY_MAX,
    INTERRUPTIONS_MAX,
    End,
    Ticked,
    Told,
)
from musterd.supervisor.cluster.model_intake import Intake
from musterd.supervisor.cluster.model_logins import Logins
from musterd.supervisor.cluster.model_records import Group, Recent, Task, own


class Ends(Intake, Logins):
    # -- attempts -----------------------------------------------------------------------------

    def attempt_ended(self, task: Task, end: End) -> list[Told]:
        """Decide what the end of an attempt means for its task, its site and its key."""
        self._leave_site(task, end)
        if end.login is not None and end.login.said != "wanted":
            self.login_said(end.login, self.board.name_of(task.tenure))
        if end.failure is not None and end.failure.kind != CANCEL:
            self._note_failure(task, end.failure)
        match end.kind:
            case "succeeded":
                task.seen = end.view
                if end.clears:
                    self.board.state.pop(end.clears, None)
                outcome = self._outcome(task, SUCCEEDED, end.value, run_ns=end.run_ns)
                return self.end(task, outcome, keeps=end.keeps)
            case "failed":
                return self._failed(task, end)
            case "untouched":
                task.attempt -= 1
                told = self._back(task)
                if end.login is not None and task.spec.id in self.board.live:
                    self.login_wanted(task, end.login)
                return told
            case "interrupted":
                task.attempt -= 1
                task.interruptions += 1
                if task.interruptions <= INTERRUPTIONS_MAX or task.cancel:
                    return self._back(task)
                why = f"interrupted {task.interruptions} times by shutdowns or restarts"
                return self._fail(task, Failure(CRASH, message=why))
            case "crashed":
                return self._crashed(task)

    def _leave_site(self, task: Task, end: End) -> None:
        if not task.spec.target:
            return
        failure = end.failure
        ok: bool | None = None
        if end.kind == "succeeded":
            ok = True
        elif end.kind == "failed" and failure is not None and failure.unwell:
            ok = False
        site, probed = self.site_of(task), task.probe
        task.probe = 0
        if ok is False:
            if task.counted and not (probed and probed == site.round):
                ok = None  # the retries of one task count once
            task.counted = True
        site.leave(self.clock(), self.rng, probed=probed, ok=ok, run_ns=end.run_ns, failure=failure)
        self._impatient()

    def _note_failure(self, task: Task, failure: Failure) -> None:
        worker = self.board.name_of(task.tenure)
        at = (self.clock() + self.wall_ns) / 1e9
        task.failures = [
            *task.failures[1 - HISTORY_MAX :],
            FailedAttempt(task.attempt, at, worker, failure),
        ]
        task.error = f"{failure.type or failure.kind}: {failure.message}"

    def _failed(self, task: Task, end: End) -> list[Told]:
        failure = end.failure or Failure(ERROR)
        if task.cancel:
            return self.end(task, self._outcome(task, CANCELLED, b"", failure, end.run_ns))
        if end.retry_ns < 0:
            return self._fail(task, failure, end.run_ns)
        now_ns = self.clock()
        if 0 < task.expires_ns <= now_ns:
            return self.end(task, self._outcome(task, EXPIRED, b"", failure, end.run_ns))
        self._release(task)
        task.wanted = False
        task.state, task.ready_ns = WAITING, now_ns + end.retry_ns
        if task.spec.target and not self.site_of(task).pays(now_ns):
            task.give_up_ns = task.ready_ns + max(1, end.patience_ns)
        return [Told(task.spec.id, task.waiter, "")]

    def _crashed(self, task: Task) -> list[Told]:
        task.attempt -= 1
        task.crashes += 1
        if task.cancel:
            return self._back(task)
        if task.crashes < self.board.pools[task.pool].card.max_crashes:
            return self._back(task)
        task.attempt += task.crashes  # people are shown how often the task ran
        why = f"quarantined: it was running each of the {task.crashes} times its worker died"
        return self._fail(task, Failure(CRASH, POISON, why))

    def node_lost(self, task: Task) -> None:
        """Take back a claim of a node that is gone: a crash of the task, if it had begun."""
        kind: Literal["crashed", "untouched"] = "crashed" if task.begun else "untouched"
        failure = Failure(CRASH, message="its node was lost") if task.begun else None
        self.attempt_ended(task, End(task.spec.id, task.claim, kind, failure=failure))

    def give_back(self, identity: str) -> None:
        node = self.board.nodes.get(identity)
        for task in list(self.board.claimed()):
            if node is not None and task.tenure == node.tenure:
                self.node_lost(task)

    def _release(self, task: Task) -> None:
        task.tenure = task.claim = task.probe = 0
        task.begun = False

    def _back(self, task: Task) -> list[Told]:
        """Put a task back where it was, unless it is over."""
        if task.cancel:
            return self.end(task, self._outcome(task, CANCELLED))
        if 0 < task.expires_ns <= self.clock():
            return self.end(task, self._outcome(task, EXPIRED))
        self._release(task)
        task.state, task.queued_ns = QUEUED, self.clock()
        self.patience(task)
        return [Told(task.spec.id, task.waiter, "")]

    # -- ends ---------------------------------------------------------------------------------

    def _outcome(
        self,
        task: Task,
        state: str,
        value: bytes = b"",
        failure: Failure | None = None,
        run_ns: int = 0,
    ) -> Outcome:
        return Outcome(task.spec.id, state, value, failure, task.attempt, run_ns)

    def _fail(self, task: Task, failure: Failure, run_ns: int = 0) -> list[Told]:
        return self.end(task, self._outcome(task, FAILED, b"", failure, run_ns))

    def end(self, task: Task, outcome: Outcome, *, keeps: bool = False) -> list[Told]:
        """End a task, and those that joined it."""
        told = [self._end_one(task, outcome)]
        if keeps and own(outcome) and outcome.state == SUCCEEDED:
            until_ns = self.clock() + GOOD_TTL_NS
            self.board.good.pop(task.memory_name, None)  # the newest come last
            self.board.good[task.memory_name] = (outcome.value, until_ns)
        group = self.board.groups.get(task.spec.key) if task.spec.key else None
        if group is None:
            return told
        if group.leader != task.spec.id:
            group.joined = [id_ for id_ in group.joined if id_ != task.spec.id]
            return told
        if outcome.state not in (SUCCEEDED, FAILED):
            self._next_leader(task.spec.key, group)
            return told
        if own(outcome) and task.ran and not group.forget and self.rules.cache.enabled:
            self._remember(task, outcome, group)
        del self.board.groups[task.spec.key]
        for id_ in group.joined:
            shared = structs.replace(outcome, id=id_, cached=True)
            told.append(self._end_one(self.board.live[id_], shared))
        return told

    def _end_one(self, task: Task, outcome: Outcome) -> Told:
        del self.board.live[task.spec.id]
        if task.tenure:
            task.node = self.board.name_of(task.tenure)
        elif task.failures:
            task.node = task.failures[-1].worker
        task.state, task.tenure, task.claim = outcome.state, 0, 0
        if outcome.state == FAILED:
            outcome = self._fall_back(task, outcome)
        if outcome.failure is not None:
            failure = outcome.failure
            task.error = f"{failure.type or failure.kind}: {failure.message}"
        problem = "" if outcome.state == SUCCEEDED else task.error or outcome.state
        self.login_over(task.spec.session, task.spec.id, problem)
        self.note_done(task, outcome)
        return Told(task.spec.id, task.waiter, outcome.state)

    def _fallback_on(self, task: Task) -> str:
        declared = self.board.declared(task.spec.name)
        known = self.rules.targets.get(task.spec.target, self.rules.target)
        class_ = self.rules.classes.get(task.class_)
        return (
            task.spec.fallback_on
            or (declared.fallback_on if declared is not None else "")
            or (known.fallback_on if task.spec.target else "")
            or (class_.fallback_on if class_ is not None else "")
        )

    def _fall_back(self, task: Task, outcome: Outcome) -> Outcome:
        invalid = outcome.failure is not None and outcome.failure.kind == INVALID
        if self._fallback_on(task) != "failure" or invalid:
            return outcome
        return self._substitute(task, outcome) or outcome

    def _substitute(self, task: Task, outcome: Outcome) -> Outcome | None:
        """Return the outcome with the last good result, else with the fallback of the submit."""
        good = self.good(task)
        value = good if good is not None else task.spec.fallback
        if value is None:
            return None
        return structs.replace(
            outcome, state=SUCCEEDED, value=value, stale=good is not None, fallback=good is None
        )

    def _remember(self, task: Task, outcome: Outcome, group: Group) -> None:
        former = self.board.recent.pop(task.memory_name, None)
        good, good_ns = (former.good, former.good_ns) if former is not None else (None, 0)
        if outcome.state == SUCCEEDED:
            good, good_ns = outcome, self.clock()
        self.board.recent[task.memory_name] = Recent(outcome, group.since_ns, good, good_ns)

    def _next_leader(self, key: str, group: Group) -> None:
        """Let the next task lead, after the leader ended without a result for it."""
        if not group.joined:
            del self.board.groups[key]
            return
        leader = self.board.live[group.joined.pop(0)]
        group.leader, group.forget = leader.spec.id, False
        urged = [self.board.live[id_].spec.priority for id_ in group.joined]
        leader.level = min([leader.spec.priority, *urged])
        leader.state = WAITING if leader.ready_ns > self.clock() else QUEUED
        leader.queued_ns = self.clock()
        self.patience(leader)

    # -- waiting runs -------------------------------------------------------------------------

    def withdraw(self, task: Task, why: str) -> None:
        """End a task that waits."""
        failure = Failure(CANCEL, message=why)
        self.end(task, self._outcome(task, CANCELLED, b"", failure))

    def hasten(self, task: Task) -> None:
        """Queue a task that waits for its next attempt, which need not be paid for."""
        task.state, task.queued_ns, task.give_up_ns = QUEUED, self.clock(), 0
        self.patience(task)

    # -- shut sites ---------------------------------------------------------------------------

    def patience(self, task: Task) -> None:
        if task.state != QUEUED or not task.spec.target:
            return
        known = self.rules.targets.get(task.spec.target, self.rules.target)
        class_ = self.rules.classes.get(task.class_)
        on_open = (
            task.spec.on_open or known.on_open or (class_.on_open if class_ is not None else "")
        )
        if on_open in ("", "wait") or not self.site_of(task).shut(self.clock()):
            return
        why = f"the breaker of {task.spec.target} is open"
        failed = self._outcome(task, FAILED, b"", Failure(SHUT, SHUT_TYPE, why))
        if on_open == "fallback":
            substitute = self._substitute(task, failed)
            if substitute is not None:
                self.end(task, structs.replace(substitute, failure=None))
                return
        self.end(task, failed)

    def _impatient(self) -> None:
        for task in list(self.board.live.values()):
            if task.spec.id in self.board.live:
                self.patience(task)

    def breaker(self, target: str, command: Literal["open", "close", "disable", "reset"]) -> None:
        breaker = self.sites_.get(target, "", self.rules, self.clock()).breaker
        match command:
            case "open":
                breaker.force_open()
            case "close":
                breaker.close()
            case "disable":
                breaker.disable()
            case "reset":
                breaker.reset()
        self._impatient()

    # -- commands and time --------------------------------------------------------------------

    def cancel(self, ids: Sequence[str]) -> list[str]:
        alive = []
        for id_ in dict.fromkeys(ids):
            task = self.board.live.get(id_)
            if task is None:
                continue
            alive.append(id_)
            if task.state == RUNNING:
                task.cancel = True
            else:
                self.end(task, self._outcome(task, CANCELLED))
        return alive

    def retry(self, ids: Sequence[str]) -> list[Rejection]:
        rejected = []
        for id_ in dict.fromkeys(ids):
            done = self.board.done.get(id_)
            if id_ in self.board.live:
                rejected.append(Rejection(id_, "NotEnded", f"task '{id_}' has not ended"))
            elif done is None:
                rejected.append(Rejection(id_, "NoSuchTask", f"no such task: '{id_}'"))
            elif done.outcome.state == SUCCEEDED:
                rejected.append(Rejection(id_, "NotFailed", f"task '{id_}' has succeeded"))
            else:
                verdict = self.take(done.task.spec, done.task.waiter, fresh=True)
                if verdict.rejection is not None:
                    rejected.append(verdict.rejection)
                else:
                    del self.board.done[id_]
        return rejected

    def tick(self) -> Ticked:
        now_ns = self.clock()
        expired = ready = given_up = 0
        for task in sorted(self.board.live.values(), key=lambda each: (each.level, each.seq)):
            if task.spec.id not in self.board.live or task.state == RUNNING:
                continue
            if 0 < task.expires_ns <= now_ns:
                expired += 1
                self.end(task, self._outcome(task, EXPIRED))
            elif task.state == WAITING:
                if task.give_up_ns and self.site_of(task).pays(now_ns):
                    task.give_up_ns = 0
                if task.give_up_ns:
                    if task.give_up_ns <= now_ns:
                        given_up += 1
                        self._give_up(task)
                elif task.ready_ns <= now_ns:
                    ready += 1
                    task.state, task.queued_ns = QUEUED, now_ns
        self._impatient()
        self.begin_logins()
        for name, pool in self.board.pools.items():
            pool.counted = sum(task.pool == name for task in self.board.live.values())
        for key in [k for k, (_, until) in self.board.state.items() if 0 < until <= now_ns]:
            del self.board.state[key]
        for memory in (self.board.recent, self.board.good):
            while len(memory) > self.rules.cache.entries:
                memory.pop(next(iter(memory)))
        return Ticked(ready, expired, given_up)

    def _give_up(self, task: Task) -> None:
        why = f"not tried again: the retry budget of {task.spec.target} is used up"
        self._fail(task, Failure(ERROR, message=f"{task.error} ({why})"))
