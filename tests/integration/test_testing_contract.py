"""Handlers behave alike in a worker under test and in a real daemon."""

from collections.abc import Callable
from typing import Any, NamedTuple

import contract_workers
import pytest
from msgspec import Struct

from musterd import MusterdError, Secret, TaskStatus
from musterd.ipc.errors import Rejected
from musterd.testing import LocalDaemon, LocalWorker, OpenWorker, StartDaemon
from support.waiting import wait_for

CONFIG: dict[str, Any] = {
    "retry": {"base": "1ms", "jitter": 0},
    "breaker": {"failures": 3},
    "sessions": {"shop": {"login": "contract_workers:log_in", "args": {"user": "ada"}}},
    "pools": {
        "jobs": {
            "worker": "contract_workers:Jobs",
            "options": {"colour": "blue"},
            "restart": {"base": "1ms"},
            "env": {"API_TOKEN": "t0ken-of-the-api"},
            "secrets": ["API_*"],
        },
        "functions": {"worker": "contract_workers"},
        "wide": {"worker": "contract_workers:Wide", "concurrency": 4},
    },
}


class Case(Struct, frozen=True):
    name: str
    args: dict[str, Any] = {}
    options: dict[str, Any] = {}
    times: int = 1  # so many tasks, one after the other


CASES = {
    "a result": Case("echo", {"value": {"a": [1, 2.5, None, "x", b"y", True]}}),
    "no result": Case("echo"),
    "arguments of all kinds": Case(
        "typed", {"name": "n", "many": [1, 2], "offer": {"name": "kite", "price": 9.5}}
    ),
    "an argument of the wrong type": Case("typed", {"name": "n", "many": [1, "2"]}),
    "an argument is missing": Case("typed", {"name": "n"}),
    "an argument too many": Case("typed", {"name": "n", "many": [], "colour": "red"}),
    "no such task": Case("nothing"),
    "a result that cannot be sent": Case("unserialisable"),
    "options and attempt": Case("about"),
    "an error, again and again": Case("fail"),
    "an error, twice": Case("fail", {"times": 2}),
    "fewer retries by the submit": Case("fail", options={"max_retries": 1}),
    "fewer retries by @task": Case("fail_twice_at_most"),
    "retry_on names other errors": Case("fail_otherwise"),
    "Retry": Case("ask_again"),
    "Permanent": Case("give_up"),
    "backoff and on_retry": Case("with_hooks"),
    "sys.exit": Case("leave"),
    "a status of HTTP": Case("fail", {"kind": "SiteError"}, {"max_retries": 0}),
    "a timeout": Case("sleep", {"seconds": 60}, {"max_retries": 1}),
    "in time": Case("sleep", {"seconds": 0.01}),
    "an async timeout": Case("asleep", {"seconds": 60}, {"max_retries": 1}),
    "async in time": Case("asleep", {"seconds": 0.01}),
    "a timeout while it blocks": Case("block", options={"max_retries": 0}),
    "a timeout inside another error": Case("wrap_timeout", options={"max_retries": 0}),
    "a timeout that is put up with": Case("clean_up_late"),
    "a timeout of the submit": Case("asleep", {"seconds": 60}, {"timeout": 0.05, "max_retries": 0}),
    "an event loop of its own": Case("run_loop"),
    "a deadline": Case("budget"),
    "state over an error": Case("steps", {"count": 4, "fails_at": 2}),
    "state over crashes": Case("steps", {"count": 4, "dies_at": 2}),
    "async state over an error": Case("asteps", {"count": 4, "fails_at": 2}),
    "state with a key": Case("remember", {"key": "k", "value": [1]}, times=2),
    "state that is cleared": Case("forget"),
    "state that cannot be kept": Case("save_rubbish", options={"max_retries": 0}),
    "a lock": Case("lock", times=2),
    "an async lock": Case("alock", times=2),
    "a lock in itself": Case("lock_twice", options={"max_retries": 0}),
    "a poison task": Case("die_always"),
    "a secret": Case("use_secret", {"token": Secret("API_TOKEN")}),
    "a secret in an error": Case(
        "use_secret", {"token": Secret("API_TOKEN"), "tell": "error"}, {"max_retries": 0}
    ),
    "a secret in a result": Case("use_secret", {"token": Secret("API_TOKEN"), "tell": "result"}),
    "a secret as a literal": Case("use_secret", {"token": "t0ken"}),
    "a secret for others": Case("look_up", {"name": "SHOP_KEY"}),
    "a secret that is missing": Case("look_up", {"name": "API_OTHER"}),
    "a breaker opens": Case(
        "visit", {"url": "https://a.example/x"}, {"max_retries": 0, "on_open": "fail"}, times=5
    ),
    "a fallback": Case(
        "fail", options={"max_retries": 0, "fallback": "none", "fallback_on": "failure"}
    ),
    "a cached result": Case("about", options={"cache": 30}, times=2),
    "retries of the toolkit": Case("use_toolkit"),
    "a session with a login": Case("page", options={"session": "shop"}, times=2),
    "no session": Case("page", options={"max_retries": 0}),
    "an option that is wrong": Case("echo", options={"priority": "soon"}),
    "it expires": Case("echo", options={"delay": 0.2, "expires": 0.05}),
    "a delay": Case("echo", {"value": 1}, {"delay": 0.05}),
}


class Told(NamedTuple):
    """All that a client learns of one task."""

    result: Any
    error: str  # the class and the text of what result() raises, without the task's id
    state: str
    attempts: int
    kind: str = ""
    type: str = ""
    status: int = 0
    errors: tuple[tuple[str, str, str], ...] = ()  # of each failed attempt
    crashes: int = 0
    policy: str = ""
    source: str = ""
    progress: tuple[float, str] = (0.0, "")


def learn(submit: Callable[[], Any], status: Callable[[Any], TaskStatus]) -> Told:
    try:
        handle = submit()
    except MusterdError as error:
        return Told(None, f"{type(error).__name__}: {error}", "refused", 0)
    result, said = None, ""
    try:
        result = handle.result(timeout=60)
    except MusterdError as error:
        said = f"{type(error).__name__}: {error}".replace(handle.id, "ID")
        if isinstance(error, Rejected):
            return Told(None, said, "refused", 0)
    outcome, view = handle.outcome(), status(handle)
    failure = outcome.failure
    return Told(
        result,
        said,
        outcome.state,
        outcome.attempts,
        failure.kind if failure is not None else "",
        failure.type if failure is not None else "",
        failure.status if failure is not None else 0,
        tuple(
            (each.failure.kind, each.failure.type, each.failure.message.replace(handle.id, "ID"))
            for each in view.attempts
        ),
        view.crashes,
        view.policy,
        outcome.source,
        (handle._note.fraction, handle._note.text) if handle._note is not None else (0.0, ""),
    )


@pytest.fixture(scope="module")
def daemon(musterd_daemon: StartDaemon) -> LocalDaemon:
    return musterd_daemon(CONFIG)


@pytest.fixture
def jobs(
    musterd_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch
) -> LocalWorker[contract_workers.Jobs]:
    worker = musterd_worker(contract_workers.Jobs, config=CONFIG)
    monkeypatch.setattr(contract_workers, "die", worker.crash)
    return worker


@pytest.mark.parametrize("case", CASES)
def test_a_handler_behaves_alike_without_a_daemon_and_with_one(
    case: str, jobs: LocalWorker[contract_workers.Jobs], daemon: LocalDaemon
) -> None:
    assert_alike(jobs, daemon, CASES[case])


FUNCTIONS = {"a function": Case("double", {"number": 21}), "async": Case("slowly", {"number": 1})}
SEVERAL = {
    "several at once": Case("meet", {"seconds": 0.01}),
    "a timeout beside others": Case("asleep", {"seconds": 60}, {"max_retries": 0}),
    "an error beside others": Case("fail", options={"max_retries": 1}),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions_of_a_module_behave_alike(
    case: str, musterd_worker: OpenWorker, daemon: LocalDaemon
) -> None:
    worker = musterd_worker(contract_workers, config=CONFIG)
    assert worker.settings.pool == "functions"
    assert_alike(worker, daemon, FUNCTIONS[case])


@pytest.mark.parametrize("case", SEVERAL)
def test_tasks_of_a_worker_that_runs_several_at_once_behave_alike(
    case: str, musterd_worker: OpenWorker, daemon: LocalDaemon
) -> None:
    assert_alike(musterd_worker(contract_workers.Wide, config=CONFIG), daemon, SEVERAL[case])


def test_tasks_that_run_at_once_wait_for_each_others_locks_alike(
    musterd_worker: OpenWorker, daemon: LocalDaemon
) -> None:
    worker = musterd_worker(contract_workers.Wide, config=CONFIG)
    with daemon.client() as client:
        there = [client.submit("wide.line_up") for _ in range(6)]
        here = [worker.submit("line_up") for _ in range(6)]
        for handles in (here, there):
            assert sorted(each.result(timeout=60) for each in handles) == [0, 1, 2, 3, 4, 5]


def assert_alike(worker: LocalWorker[Any], daemon: LocalDaemon, case: Case) -> None:
    name, args, options, times = case.name, case.args, case.options, case.times
    pool = worker.settings.pool
    with daemon.client() as client:
        there = [
            learn(lambda: client.submit(f"{pool}.{name}", args, **options), lambda h: h.status())
            for _ in range(times)
        ]
    here = [
        learn(lambda: worker.submit(name, args, **options), lambda h: h.status())
        for _ in range(times)
    ]
    assert here == there


def test_what_handlers_count_and_log_is_alike(
    jobs: LocalWorker[contract_workers.Jobs], daemon: LocalDaemon
) -> None:
    def counted() -> dict[str, float]:
        pool = next(each for each in daemon.status().pools if each.name == "jobs")
        return {
            str(each.labels.get("text", each.name)): each.value
            for each in pool.metrics
            if each.name.startswith("notes")
        }

    with daemon.client() as client:
        for number in range(3):
            client.submit("jobs.note", {"text": f"text {number}"}).result(timeout=60)
            jobs.run("note", text=f"text {number}")
        assert counted() == {"notes": 3, "text 0": 1, "text 1": 1, "text 2": 1}
    assert jobs.metrics == {"notes": 3} | {f'notes_of{{text="text {n}"}}': 1 for n in range(3)}
    for number in range(3):
        text = f"noted: text {number}"
        assert any(text in line for line in jobs.log)
        wait_for("it is in the daemon's log", lambda text=text: text in daemon.log)
    assert "a debug line" not in daemon.log + "".join(jobs.log)
