"""Logins of sessions: run a login task, and leave alone a site whose logins fail.

Workers say with the end of an attempt what became of a login (`Completion.login`). Where a function
logs in, it has run inside of the attempt. Where the session has a login task, an attempt that finds
nobody logged in ends at once and wants a login (LOGIN_WANTED):

    the attempt goes back to the front of its lane, and is not counted      sends_back()
    the login task is submitted, unless one is under way; until it has ended, the gate of the
    session lets nobody else in (gates.py), so no worker waits              _log_in()
    it has succeeded: the tasks of the session go on, that one first        settle()
    it has failed: the attempts that wanted it have failed, others try again

Whatever is named as login task is a login: a person may submit one as well. A login task that
nobody runs expires, so no task waits for it forever.

Accounts get locked by wrong passwords. So each session has a breaker that counts logins that fail
in a row: a login that raises, or after which the site still asks for one. While it is open, tasks
of the session fail at once with SessionHeld. Then one task may try; each further failure makes the
pause longer. The count is a fact of the store: a restart is no new beginning.

An attempt of the cluster has no gate here. What it says about a login goes with its end to the
engine, which counts over all nodes, and has login tasks run (cluster/logging_in.py).
"""

from itertools import islice
from typing import Literal

from msgspec import msgpack, structs

from musterd.ipc.resilience.breaker import BreakerState
from musterd.ipc.wire.messages import (
    CANCEL,
    FAILED,
    HIGH,
    LOGGED_IN,
    LOGIN_FAILED,
    LOGIN_WANTED,
    SUCCEEDED,
    Completion,
    Outcome,
    TaskSpec,
)
from musterd.ipc.wire.node_messages import LoginVerdict
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.core.model.gates import SessionPlaces
from musterd.supervisor.core.model.held import (
    LOGIN_WAIT_NS,
    PROBLEM_CHARS,
    held_failure,
    held_why,
    login_failed_why,
    login_failure,
)
from musterd.supervisor.core.model.hooks import Hooks
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState
from musterd.supervisor.core.tasks.gatekeeper import Gatekeeper, SavedBreaker, restore
from musterd.supervisor.core.tasks.intake import Intake
from musterd.supervisor.core.tasks.leases import Leases

FACT = "logins"  # Fact.kind of failed logins
ENDED_MAX = 2000  # tasks of a held session that end in one turn: some 10 ms


class Logins:
    def __init__(
        self,
        state: State,
        ledger: Ledger,
        hooks: Hooks,
        keeper: Gatekeeper,
        leases: Leases,
        *,
        intake: Intake,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._hooks = hooks
        self._keeper = keeper
        self._leases = leases
        self._intake = intake
        self._over: list[tuple[SessionPlaces, Outcome | None]] = []  # logins that have ended
        self._ending: dict[SessionPlaces, None] = {}  # held, with more tasks to end in later turns

    # -- attempts -----------------------------------------------------------------------------

    def attempt_over(self, task: Task, completion: Completion) -> None:
        """Count what an attempt says about the login of its session."""
        if completion.failure is not None and completion.failure.kind == CANCEL:
            return
        if task.claim is not None:
            task.claim.login = self._verdict(task, completion)
        elif task.gate is not None and task.gate.session is not None:
            self._count(task.gate.session, task, completion)

    def _verdict(self, task: Task, completion: Completion) -> LoginVerdict | None:
        """Return what an attempt of the cluster says about a login."""
        policy, login = self._keeper.session_policy(task.spec.session), completion.login
        rules, failure, again = policy.logins, completion.failure, task.sent_back
        said: Literal["worked", "failed", "wanted"]
        if login == LOGIN_FAILED or (login == LOGIN_WANTED and again):
            said = "failed"
        elif login == LOGIN_WANTED and policy.login_task and not task.cancelled:
            said = "wanted"
        elif failure is None and (login == LOGGED_IN or again):
            said = "worked"
        else:
            return None
        if said != "wanted" and not rules.enabled:
            return None
        verdict = LoginVerdict(
            task.spec.session, said, rules.failures, rules.open_ns, rules.open_max_ns
        )
        if said == "failed":
            return structs.replace(verdict, problem=_problem(completion))
        if said == "wanted":
            return structs.replace(verdict, task=policy.login_task, args=policy.login_args)
        return verdict

    def granted(self, event: events.AttemptsGranted) -> None:
        """Note which attempts of the cluster have waited for a login, and what became of that."""
        waited = {
            (each.spec.id, each.claim): each.login_error
            for each in event.attempts
            if each.again or each.login_error
        }
        for task in list(self._state.claimed.values()) if waited else ():
            assert task.claim is not None
            error = waited.get((task.spec.id, task.claim.number))
            if error is None or task.state != TaskState.QUEUED or task.sent_back:
                continue
            if error:
                self._hooks.login_failed(task, login_failure(error))
            else:
                task.sent_back = True

    def _count(self, places: SessionPlaces, task: Task, completion: Completion) -> None:
        failure, login, again = completion.failure, completion.login, task.sent_back
        if login == LOGIN_FAILED or (
            login == LOGIN_WANTED and again and self._is_new(task, places)
        ):
            places.problem = _problem(completion)
            self._tell(places, task, ok=False)
        elif failure is None and (login == LOGGED_IN or again):
            self._tell(places, task, ok=True)
        if login != LOGIN_WANTED:
            task.sent_back = False

    def _is_new(self, task: Task, places: SessionPlaces) -> bool:
        """Whether the attempt has begun after the last login."""
        return task.login_seen == places.logins

    def _tell(self, places: SessionPlaces, task: Task, *, ok: bool) -> None:
        state, breaker = self._state, places.breaker
        if ok and breaker.as_new:
            return
        before = breaker.state
        places.tell(task, state.now_ns, state.rng, ok=ok)
        if breaker.state == BreakerState.OPEN and before != BreakerState.OPEN:
            self._keeper.held[places] = None
            state.timers.at(breaker.open_until_ns, places.waiting.wake_all)
            self._report(places, "session.held", "error", reason=self._why(places))
        elif before != BreakerState.CLOSED and breaker.state == BreakerState.CLOSED:
            self._report(places, "session.resumed", reason="a login has worked")
        self._remember(places)

    def sends_back(self, task: Task, completion: Completion) -> bool:
        """Whether the attempt begins anew after a login; then the login is under way."""
        if task.claim is not None:
            return task.claim.login is not None and task.claim.login.said == "wanted"
        places = task.gate.session if task.gate is not None else None
        if completion.login != LOGIN_WANTED or places is None or task.cancelled:
            return False
        fresh = not self._is_new(task, places)  # somebody has logged in meanwhile
        if task.sent_back and not fresh:
            task.sent_back = False  # the next attempt may want a login again
            return False
        if places.is_held(self._state.now_ns) or not (fresh or self._log_in(places)):
            return False
        task.sent_back = True
        if not fresh:
            places.wanting[task.spec.id] = None
        return True

    def _log_in(self, places: SessionPlaces) -> bool:
        """Submit the login task, unless there is one; return whether one is under way."""
        if places.login:
            return True
        policy = self._keeper.session_policy(places.name)
        if not policy.login_task:
            return False  # not any more
        spec = TaskSpec(
            f"login-{self._state.rng.getrandbits(64):016x}",
            policy.login_task,
            policy.login_args,
            priority=HIGH,
            max_retries=0,
            expires_ns=LOGIN_WAIT_NS,
            session=places.name,
        )
        rejection = self._intake.run(spec, self._state.wall_ns())
        if rejection is not None:
            why = f"its login task is not accepted: {rejection.message}"
            self._report(places, "session.no_login", "warning", reason=why)
            return False
        places.login = spec.id
        return True

    # -- login tasks --------------------------------------------------------------------------

    def ended(self, task: Task, outcome: Outcome | None) -> None:
        """Note the end of a task; without an outcome it is gone with its pool."""
        places = self._keeper.sessions.get(task.spec.session)
        if places is not None and places.login == task.spec.id:
            self._over.append((places, outcome))

    def settle(self) -> bool:
        """Go on after login tasks; end the tasks of sessions that are held.

        Return whether there was something to do.
        """
        if not self._over and not self._keeper.held:
            return False
        over, self._over = self._over, []
        held, self._keeper.held = self._keeper.held, {}
        for places, outcome in over:
            self._login_over(places, outcome)
        for places in held:
            if places.is_held(self._state.now_ns) and places not in self._ending:
                self._end_tasks(places)
        return True

    def _login_over(self, places: SessionPlaces, outcome: Outcome | None) -> None:
        wanting, login, places.wanting = places.wanting, places.login, {}
        places.end_login()
        if outcome is not None and outcome.state == SUCCEEDED:
            places.logins += 1
            return
        error = outcome.error or outcome.state if outcome is not None else "its pool was removed"
        failure = login_failure(login_failed_why(places.name, login, error))
        for id_ in wanting:
            task = self._state.tasks.get(id_)
            if task is None or not task.sent_back or task.state != TaskState.QUEUED:
                continue
            task.sent_back = False
            if not task.behind:  # else it finds out by itself
                self._hooks.login_failed(task, failure)

    def _end_tasks(self, places: SessionPlaces) -> None:
        """End the tasks of a session that is held, some in each turn of the loop."""
        failure = held_failure(self._why(places))
        left = ENDED_MAX
        for lane in list(places.lanes):
            alive = (each for each in lane.tasks if each.lane is lane)
            for task in list(islice(alive, left)):
                if task.route.pool.arriving:
                    break  # others of its key may still be in the store; it is looked at again
                task.route.pool.queue.discard(task)
                self._ledger.finish(task, FAILED, failure=failure)
                left -= 1
            if not left:
                self._ending[places] = None
                self._state.timers.at(self._state.now_ns + 1, self._end_more, places)
                return
        places.waiting.wake_all()  # lanes with more tasks on disk

    def _end_more(self, places: SessionPlaces) -> None:
        del self._ending[places]
        self._keeper.held[places] = None

    # -- people, and a restart ----------------------------------------------------------------

    def _why(self, places: SessionPlaces) -> str:
        breaker = places.breaker
        left_ns = breaker.open_until_ns - self._state.now_ns
        known = (places.name, left_ns, breaker.failures, places.problem)
        return held_why(*known, cluster=False)

    def _report(
        self, places: SessionPlaces, event: str, level: str = "info", *, reason: str
    ) -> None:
        self._state.out.append(Report(event, level, session=places.name, reason=reason))

    def reset(self, event: events.SessionReset) -> None:
        """Let tasks try to log in again: a person says that the login is mended."""
        places = self._keeper.session(event.name)
        held = places.breaker.state != BreakerState.CLOSED
        places.breaker.reset()
        places.problem = ""
        places.waiting.wake_all()
        self._remember(places)
        if held:
            self._report(places, "session.resumed", reason="reset by hand")

    def _remember(self, places: SessionPlaces) -> None:
        value = None
        if not places.breaker.as_new:
            saved = SavedBreaker.of(places.breaker, self._state)
            value = msgpack.encode((saved, places.problem))
        self._ledger.remember(FACT, places.name, value)

    def recovered(self, event: events.FactsRecovered) -> None:
        for name, value in event.facts:
            if name not in self._state.policy.sessions:
                self._ledger.remember(FACT, name, None)
                continue
            saved, problem = msgpack.decode(value, type=tuple[SavedBreaker, str])
            places = self._keeper.session(name)
            places.problem = problem
            restore(places.breaker, saved, self._state.now_ns, event.wall_ns)

    def validate(self) -> None:
        for places in self._keeper.sessions.values():
            task = self._state.tasks.get(places.login)
            alive = task is not None and task.state != TaskState.ENDING
            assert alive or not places.login, (places.name, places.login)
            assert places.login or not places.wanting, places.name
            assert places.breaker.probes >= 0, places.name


def _problem(completion: Completion) -> str:
    """Return why a login failed, for people."""
    return Outcome("", FAILED, failure=completion.failure).error[:PROBLEM_CHARS]
