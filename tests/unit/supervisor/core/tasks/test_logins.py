"""Login tasks and logins that fail, in the whole core."""

from random import Random
from typing import Any

import pytest
from msgspec import structs
from unit.supervisor.core.model.test_gates import WALL_NS, Driver

from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy
from musterd.ipc.wire.messages import (
    HIGH,
    LOGGED_IN,
    LOGIN_FAILED,
    LOGIN_WANTED,
    NO_LOGIN,
    SHUT,
    Completion,
    Failure,
)
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import PoolPolicy, RestartPolicy, SessionPolicy
from musterd.supervisor.core.tasks import logins
from musterd.supervisor.views.fleet import live_view
from support.core import MILLISECOND_NS, Muster

PAUSE_NS = 60 * SECOND_NS
LIMIT = BreakerPolicy(failures=3, open_ns=PAUSE_NS, open_jitter=0.0, successes=1)
BY_TASK = SessionPolicy(login_task="q.x", login_args=b"\x81\xa1a\x01", logins=LIMIT)
SESSIONS = {
    "acme": BY_TASK,
    "wide": structs.replace(BY_TASK, concurrent=3),
    "plain": SessionPolicy(logins=LIMIT),  # whose workers log in
}


class Logins(Driver):
    """Pool p has the tasks of sessions, pool q their login."""

    def __init__(self, muster: type[Muster], size: int = 3, retries: int = 0) -> None:
        super().__init__(muster, size, pools=("p", "q"), max_retries=retries)
        self.notes: list[actions.Report] = []
        self.kept: dict[str, bytes] = {}
        self.specs: dict[str, Any] = {}
        pools = tuple(
            PoolPolicy(name, size, sessions=tuple(SESSIONS), restart=RestartPolicy(limit=1000))
            for name in ("p", "q")
        )
        self.change(pools=pools, sessions=SESSIONS)

    def change(self, **policy: Any) -> list[str]:
        self.m.policy = structs.replace(self.m.policy, **policy)
        return self.note(self.m.tell(events.PolicyChanged(self.m.policy)))

    def note(self, answer: list[Any]) -> list[str]:
        for each in answer:
            if isinstance(each, actions.Report) and each.session:
                self.notes.append(each)
            elif isinstance(each, actions.Persist):
                self.specs |= {spec.id: spec for spec in (task.spec for task in each.added)}
                for fact in each.facts:
                    if fact.kind == logins.FACT and fact.value is None:
                        self.kept.pop(fact.key, None)
                    elif fact.kind == logins.FACT:
                        self.kept[fact.key] = fact.value
        return super().note(answer)

    def end(self, name: str, login: int = NO_LOGIN, error: str = "") -> list[str]:
        worker, lease = self.leases.pop(name)
        failure = Failure("error", "Oops", error) if error else None
        done = Completion(lease, MILLISECOND_NS, b"", failure, login=login)
        return self.note(self.m.tell(events.LeasesCompleted(worker, [done])))

    def want(self, name: str) -> list[str]:
        """End an attempt that finds nobody logged in."""
        return self.end(name, LOGIN_WANTED, "nobody is logged in")

    def log_in(self, name: str, session: str = "acme") -> str:
        """Begin a task that finds nobody logged in; return the login task that begins."""
        assert self.submit(name, session=session) == [name]
        (login,) = self.want(name)
        return login

    def fails(self, session: str = "plain") -> None:
        """Let so many logins fail that the session is held."""
        for number in range(LIMIT.failures):
            name = f"{session}-{number}"
            assert self.submit(name, session=session) == [name]
            self.end(name, LOGIN_FAILED, "wrong password")

    def heard(self) -> list[str]:
        return [f"{each.event} {each.session}" for each in self.notes]


@pytest.fixture
def driver(muster: type[Muster]) -> Logins:
    return Logins(muster)


# -- login tasks --------------------------------------------------------------------------------


def test_a_login_task_runs_once_and_the_tasks_of_the_session_wait_for_it(driver: Logins) -> None:
    login = driver.log_in("a")
    spec = driver.specs[login]
    assert (spec.name, spec.args, spec.session) == ("q.x", BY_TASK.login_args, "acme")
    assert (spec.priority, spec.max_retries) == (HIGH, 0)
    assert driver.submit("b", session="acme") == []
    assert driver.submit("other") == ["other"]
    assert f"login task {login}" in live_view(driver.m.fleet.tasks["b"], driver.m.now_ns).waits_for
    assert driver.end(login) == ["a"]  # before those that came later
    assert driver.m.fleet.tasks["a"].attempt == 1  # the first one was no attempt
    assert driver.end("a") == ["b"]
    assert driver.end("b") == []
    assert driver.outcomes["a"].state == driver.outcomes["b"].state == "succeeded"


def test_several_tasks_that_find_nobody_logged_in_share_one_login(driver: Logins) -> None:
    assert driver.submit("a", "b", "c", session="wide") == ["a", "b", "c"]
    (login,) = driver.want("a")
    assert driver.want("b") == []
    assert sorted(driver.end(login)) == ["a", "b"]
    # It began before the login: what it found is no news.
    assert driver.want("c") == ["c"]
    for name in "abc":
        driver.end(name)
    assert {each.state for each in driver.outcomes.values()} == {"succeeded"}


def test_a_login_that_a_person_submits_waits_for_a_place_before_anybody_else(
    driver: Logins,
) -> None:
    assert driver.submit("a", session="acme") == ["a"]
    assert driver.submit("early", session="acme", priority=0) == []
    assert driver.submit("by-hand", pool="q", session="acme", priority=3) == []
    assert driver.submit("late", session="acme", target="elsewhere") == []
    assert driver.end("a") == ["by-hand"]
    assert driver.end("by-hand") == ["early"]
    assert driver.end("early") == ["late"]


def test_a_single_worker_suffices(muster: type[Muster]) -> None:
    driver = Logins(muster, size=1)
    pools = (PoolPolicy("p", 1, sessions=("acme",)), PoolPolicy("q", 1))
    sessions = {"acme": structs.replace(BY_TASK, login_task="p.x")}
    driver.change(pools=pools, sessions=sessions)
    driver.submit("a", session="acme")  # p.x is the login itself
    assert driver.end("a") == []
    assert driver.outcomes["a"].state == "succeeded"


def test_a_second_logged_out_right_after_a_login_is_a_failure(driver: Logins) -> None:
    login = driver.log_in("a")
    driver.end(login)
    assert driver.want("a") == []
    assert driver.outcomes["a"].failure == Failure("error", "Oops", "nobody is logged in")
    assert driver.m.fleet.sessions["acme"].breaker.failures == 1


def test_a_login_that_fails_fails_the_attempts_that_wanted_it(muster: type[Muster]) -> None:
    driver = Logins(muster, retries=1)
    login = driver.log_in("a")
    driver.submit("b", session="acme")
    assert driver.end(login, LOGIN_FAILED, "wrong password") == ["b"]
    assert driver.m.fleet.tasks["a"].attempt == 1
    assert driver.m.fleet.sessions["acme"].breaker.failures == 1
    again = driver.want("b")
    assert len(again) == 1
    assert again != [login]
    driver.end(again[0])
    driver.end("b")
    (second,) = driver.wait(3)
    assert second == "a"
    assert driver.end("a") == []


def test_the_error_of_a_login_task_is_that_of_the_task(driver: Logins) -> None:
    driver.end(driver.log_in("a"), LOGIN_FAILED, "wrong password")
    failure = driver.outcomes["a"].failure
    assert failure is not None
    assert failure.type == "LoginFailed"
    assert "wrong password" in failure.message


def test_a_login_task_that_nobody_runs_expires(driver: Logins) -> None:
    driver.m.tell(events.PauseRequested((("q", -1),)))
    driver.submit("a", session="acme")
    assert driver.want("a") == []
    driver.wait(logins.LOGIN_WAIT_NS / SECOND_NS + 1)
    failure = driver.outcomes["a"].failure
    assert failure is not None
    assert "expired" in failure.message
    assert driver.m.fleet.sessions["acme"].breaker.failures == 0  # nobody has tried


def test_the_death_of_its_worker_begins_a_login_anew(driver: Logins) -> None:
    login = driver.log_in("a")
    worker, lease = driver.leases[login]
    assert driver.note(driver.m.tell(events.WorkerExited(worker, -9, lease))) == [login]
    assert driver.end(login) == ["a"]


def test_a_login_whose_pool_is_removed_holds_nobody(driver: Logins) -> None:
    driver.m.tell(events.PauseRequested((("q", -1),)))
    driver.submit("a", session="acme")
    driver.want("a")
    driver.change(pools=driver.m.policy.pools[:1])
    for worker in [each for each, slot in driver.m.fleet._state.workers.items() if slot.removed]:
        driver.note(driver.m.tell(events.WorkerExited(worker, 0, 0)))
    assert driver.m.fleet.sessions["acme"].login == ""
    failure = driver.outcomes["a"].failure
    assert failure is not None
    assert "its pool was removed" in failure.message


def test_a_login_task_that_is_refused_fails_the_attempt(driver: Logins) -> None:
    driver.m.tell(events.DrainRequested((("q", -1),)))
    driver.submit("a", session="acme")
    assert driver.want("a") == []
    assert driver.outcomes["a"].failure == Failure("error", "Oops", "nobody is logged in")
    assert driver.heard() == ["session.no_login acme"]


def test_a_cancelled_task_is_not_begun_anew(driver: Logins) -> None:
    driver.submit("a", session="acme")
    driver.m.tell(events.CancelRequested(["a"]))
    assert driver.want("a") == []
    assert driver.outcomes["a"].state == "cancelled"


# -- logins that fail ---------------------------------------------------------------------------


def test_after_some_failed_logins_tasks_fail_at_once_and_one_event_tells(driver: Logins) -> None:
    driver.submit("waiting", session="plain", target="elsewhere", delay_ns=SECOND_NS // 2)
    driver.fails()
    assert driver.heard() == ["session.held plain"]
    (report,) = driver.notes
    assert (report.level, "3 logins in a row failed (Oops: wrong password)" in report.reason) == (
        "error",
        True,
    )
    assert driver.submit("late", session="plain") == []
    driver.wait(1)
    for name in ("late", "waiting"):
        failure = driver.outcomes[name].failure
        assert failure is not None
        assert (failure.kind, failure.type) == (SHUT, "SessionHeld")
        assert "musterctl sessions reset plain" in failure.message
    assert driver.submit("other", session="acme") == ["other"]


def test_tasks_that_wait_for_the_session_fail_when_it_is_held(driver: Logins) -> None:
    for number in range(LIMIT.failures):
        assert driver.submit(f"t{number}", session="plain") == [f"t{number}"]
        if number == LIMIT.failures - 1:
            driver.submit("queued", session="plain")
        driver.end(f"t{number}", LOGIN_FAILED, "wrong password")
    failure = driver.outcomes["queued"].failure
    assert failure is not None
    assert failure.type == "SessionHeld"


def test_pauses_grow_and_one_task_tries_at_a_time(driver: Logins) -> None:
    driver.fails("wide")
    driver.wait(PAUSE_NS / SECOND_NS)
    assert driver.submit("a", "b", session="wide") == ["a"]
    driver.end("a", LOGIN_FAILED, "still wrong")
    assert driver.outcomes["b"].failure.type == "SessionHeld"  # type: ignore[union-attr]
    driver.wait(PAUSE_NS / SECOND_NS)
    assert driver.submit("c", session="wide") == []
    driver.wait(PAUSE_NS / SECOND_NS)
    assert driver.submit("d", "e", session="wide") == ["d"]
    assert driver.end("d", LOGGED_IN) == ["e"]
    assert driver.heard() == ["session.held wide", "session.held wide", "session.resumed wide"]
    assert driver.kept == {}


def test_many_tasks_of_a_held_session_end_in_several_turns(
    driver: Logins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "ENDED_MAX", 3)
    driver.m.tell(events.PauseRequested((("p", -1), ("q", -1))))
    for number in range(8):
        driver.submit(f"t{number}", session="plain", pool="pq"[number % 2])
    driver.note(driver.m.tell(events.ResumeRequested((("p", -1), ("q", -1)))))
    for _ in range(LIMIT.failures):
        (name,) = driver.leases
        driver.end(name, LOGIN_FAILED, "wrong password")
    left = []
    while True:
        left.append(sum(task.spec.session == "plain" for task in driver.m.fleet.tasks.values()))
        if not left[-1]:
            break
        assert len(left) < 10, left
        driver.note(driver.m.wait(1))
    assert left == [2, 0]
    held = [driver.outcomes[f"t{number}"].failure.type for number in range(8)]  # type: ignore[union-attr]
    assert held.count("SessionHeld") == 8 - LIMIT.failures


def test_a_probe_that_needs_no_login_leaves_its_place_to_the_next(driver: Logins) -> None:
    driver.fails("wide")
    driver.wait(PAUSE_NS / SECOND_NS)
    assert driver.submit("a", "b", session="wide") == ["a"]
    assert driver.end("a") == ["b"]
    driver.end("b", LOGGED_IN)
    assert driver.heard()[-1] == "session.resumed wide"


def test_a_login_task_after_the_pause_decides(driver: Logins) -> None:
    driver.fails("acme")
    driver.wait(PAUSE_NS / SECOND_NS)
    login = driver.log_in("a")
    driver.submit("queued", session="acme")
    assert driver.end(login, LOGIN_FAILED, "still wrong") == []
    assert driver.outcomes["a"].failure.type == "LoginFailed"  # type: ignore[union-attr]
    assert driver.outcomes["queued"].failure.type == "SessionHeld"  # type: ignore[union-attr]
    driver.wait(2 * PAUSE_NS / SECOND_NS)
    assert driver.end(driver.log_in("b")) == ["b"]
    assert driver.m.fleet.sessions["acme"].breaker.state == "half-open"  # not known to work yet
    driver.end("b")
    assert driver.m.fleet.sessions["acme"].breaker.state == "closed"


def test_a_login_that_works_ends_the_row(driver: Logins) -> None:
    for number in range(2 * LIMIT.failures):
        name = f"t{number}"
        assert driver.submit(name, session="plain") == [name]
        if number % 2:
            driver.end(name, LOGGED_IN)
        else:
            driver.end(name, LOGIN_FAILED, "sometimes")
    assert driver.heard() == []


def test_a_person_ends_the_pause(driver: Logins) -> None:
    driver.fails()
    driver.note(driver.m.tell(events.SessionReset("plain")))
    assert driver.heard() == ["session.held plain", "session.resumed plain"]
    assert driver.submit("a", session="plain") == ["a"]
    assert driver.kept == {}


def test_a_restart_is_no_new_beginning(driver: Logins) -> None:
    driver.m.tell(events.ClockRead(WALL_NS + driver.m.now_ns))
    driver.fails()
    kept = list(driver.kept.items())
    driver.restart(1)
    m = driver.m
    driver.note(m.tell(events.FactsRecovered(logins.FACT, kept, WALL_NS + m.now_ns)))
    assert driver.submit("late", session="plain") == []
    failure = driver.outcomes["late"].failure
    assert failure is not None
    assert "wrong password" in failure.message
    driver.wait(PAUSE_NS / SECOND_NS)
    assert driver.submit("a", session="plain") == ["a"]


def test_a_worker_that_lies_about_a_login_harms_nobody(driver: Logins) -> None:
    driver.submit("a", session="plain")
    driver.end("a", LOGIN_FAILED)
    assert driver.outcomes["a"].state == "succeeded"
    driver.submit("b")
    driver.end("b", LOGIN_WANTED, "what session?")
    assert driver.outcomes["b"].state == "failed"


# -- anything in any order ----------------------------------------------------------------------


class Chance(Logins):
    """Sessions under random ends, deaths and commands. validate() runs after each event."""

    def __init__(self, muster: type[Muster], rng: Random) -> None:
        super().__init__(muster, retries=rng.randint(0, 2))
        self.rng = rng
        self.names: list[str] = []

    def note(self, answer: list[Any]) -> list[str]:
        began = super().note(answer)
        for spawn in self.of(actions.SpawnWorker, answer):
            began += self.note(self.m.bring_up(spawn.worker))
        for recall in self.of(actions.RecallLeases, answer):
            began += self.note(self.m.tell(events.LeasesReturned(recall.worker, [])))
        for kill in self.of(actions.KillWorker, answer):
            began += self.note(self.m.tell(events.WorkerExited(kill.worker, -9, 0)))
        for session, policy in SESSIONS.items():
            running = [
                task.spec.name
                for task in self.m.fleet.tasks.values()
                if task.spec.session == session and task.slot is not None
            ]
            assert len(running) <= policy.concurrent
            assert running.count("q.x") <= 1, "two logins race"
        return began

    def wait(self, seconds: float) -> list[str]:
        """Let time pass, in steps: new workers must not wait for long."""
        return [name for _ in range(int(seconds * 2)) for name in super(Chance, self).wait(0.5)]

    def step(self) -> None:
        rng = self.rng
        chance = rng.random()
        if chance < 0.3:
            self.names.append(f"t{len(self.names)}")
            fields = {
                "target": rng.choice(("", "site", "elsewhere")),
                "priority": rng.randint(0, 3),
            }
            self.submit(self.names[-1], session=rng.choice(list(SESSIONS)), **fields)
        elif chance < 0.34:
            self.note(self.m.tell(events.SessionReset(rng.choice(list(SESSIONS)))))
        elif chance < 0.38:
            self.wait(rng.choice((0.5, 5, 70)))
        elif chance < 0.42 and self.names:
            self.note(self.m.tell(events.CancelRequested([rng.choice(self.names)])))
        elif self.running:
            self.end_one(calm=False)

    @property
    def running(self) -> list[str]:
        alive = self.m.fleet.tasks
        return [name for name in self.leases if name in alive and alive[name].slot is not None]

    def end_one(self, *, calm: bool) -> None:
        name = self.rng.choice(self.running)
        session = self.m.fleet.tasks[name].spec.session
        if calm or self.rng.random() < 0.3:
            self.end(name, LOGGED_IN if session == "plain" else NO_LOGIN)
        elif self.rng.random() < 0.1:
            worker, lease = self.leases.pop(name)
            self.note(self.m.tell(events.WorkerExited(worker, -9, lease)))
        elif name.startswith("login") or session == "plain":
            self.end(name, LOGIN_FAILED, "wrong password")
        else:
            self.want(name)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_two_logins_never_race_and_every_task_ends(
    muster: type[Muster], seed: int
) -> None:
    driver = Chance(muster, Random(seed))
    for _ in range(120):
        driver.step()
    for _ in range(1000):
        if not driver.m.fleet.tasks:
            break
        if driver.running:
            driver.end_one(calm=True)
        else:
            driver.wait(10)
    assert not driver.m.fleet.tasks
    assert set(driver.names) <= driver.outcomes.keys()
