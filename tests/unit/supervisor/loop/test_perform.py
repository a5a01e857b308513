"""What the action runner does with actions, and its own few rules."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from musterd.ipc.wire.messages import SUCCEEDED, Outcome, TaskSpec
from musterd.ipc.wire.signals import DUMP_SIGNAL
from musterd.supervisor.control.answers import LaterAnswers
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.loop import perform
from musterd.supervisor.loop.perform import DUMP_PAUSE_NS, ActionRunner
from musterd.supervisor.store.interface import FindTasks, StoredTask
from support.core import action_kinds

NOW_NS = 10**12


class Calls:
    """An object that notes every call of a method, as (method, arguments)."""

    def __init__(self, **known: Any) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.made.append((name, *given))


class Rig:
    """A runner whose store answers when told to."""

    def __init__(self) -> None:
        self.fed: list[Any] = []
        self.asked: list[tuple[Any, ...]] = []
        store_requests = SimpleNamespace(ask=lambda *given: self.asked.append(given))
        shell = Calls(fleet=None, feed=self.fed.append, store_requests=store_requests)
        self.answers = LaterAnswers()
        self.spawner, self.clients = Calls(), Calls(knows=lambda name: name == b"1")
        others: Any = Calls()
        self.runner = ActionRunner(
            shell,  # type: ignore[arg-type]
            store=others,
            spawner=self.spawner,  # type: ignore[arg-type]
            workers=others,
            clients=self.clients,  # type: ignore[arg-type]
            answers=self.answers,
            debug=others,
            control=others,
            sidecars=others,
            calls=others,
            declarations=others,
            reloading=others,
            leave=others.leave,
            log_tasks=0,
            tasks_socket="",
        )


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(perform.time, "monotonic_ns", lambda: NOW_NS)
    return Rig()


def stored(spec: TaskSpec, *, ended: bool) -> StoredTask:
    outcome = Outcome(spec.id, SUCCEEDED, attempts=1) if ended else None
    return SimpleNamespace(spec=spec, outcome=outcome)  # type: ignore[return-value]


def test_there_is_something_to_do_for_every_action(rig: Rig) -> None:
    assert rig.runner._table.keys() == action_kinds()


def test_a_kill_with_a_dump_is_done_a_moment_later_whatever_happens_in_between(rig: Rig) -> None:
    rig.runner.do(actions.KillWorker(7, dump=True))
    asked = [("signal", 7, DUMP_SIGNAL), ("signal", 7, signal.SIGCONT)]
    assert rig.spawner.made == asked
    assert rig.runner.next_deadline() == NOW_NS + DUMP_PAUSE_NS
    rig.runner.do(actions.KillWorker(8))
    rig.runner.tick(NOW_NS + DUMP_PAUSE_NS - 1)
    assert rig.spawner.made == [*asked, ("kill", 8)]
    rig.runner.tick(NOW_NS + DUMP_PAUSE_NS)
    assert rig.spawner.made == [*asked, ("kill", 8), ("kill", 7)]
    assert rig.runner.next_deadline() is None


def test_spares_are_kept_as_the_core_says(rig: Rig) -> None:
    rig.runner.do(actions.KeepSpares((("p", "1"),)))
    assert rig.spawner.made == [("keep_spares", {("p", "1")})]


def test_what_the_store_finds_of_a_repeated_submit_is_told_and_not_judged(rig: Rig) -> None:
    old, live = TaskSpec("old", "p.x", b""), TaskSpec("live", "p.x", b"another body")
    submitted = events.TasksSubmitted(
        b"1", 3, [TaskSpec("old", "p.x", b""), TaskSpec("live", "p.x", b"")], 0, True
    )
    rig.runner.do(actions.CheckResent(submitted))
    ((query, found, _),) = rig.asked
    assert query == FindTasks(["old", "live"])
    found([stored(old, ended=True), stored(live, ended=False)])
    known = {"old": old, "live": live}
    assert rig.fed == [
        events.ResendChecked(submitted, frozenset({"old"}), frozenset({"live"}), known)
    ]
    assert len(rig.asked) == 1


def test_a_repeated_submit_that_the_store_cannot_judge_is_told_as_such(rig: Rig) -> None:
    submitted = events.TasksSubmitted(b"1", 3, [TaskSpec("t", "p.x", b"")], 0, True)
    rig.runner.do(actions.CheckResent(submitted))
    rig.asked[0][2]()
    assert rig.fed == [events.ResendUnknown(submitted)]


def test_what_the_store_has_of_a_callers_task_is_told_to_caller_and_core(rig: Rig) -> None:
    told: list[Any] = []
    for id_ in ("ended", "lives", "nowhere"):
        token, pending = rig.answers.begin(told.append, told.append)
        pending.bind(told.append)
        rig.runner.do(actions.LookUp(token, [id_]))
    (_, ended, _), (_, lives, _), (_, nowhere, _) = rig.asked
    ended([stored(TaskSpec("ended", "p.x", b""), ended=True)])
    assert [each.id for each in told] == ["ended"]
    assert rig.fed == []
    lives([stored(TaskSpec("lives", "p.x", b""), ended=False)])
    nowhere([])
    assert [(each.unfinished, each.absent) for each in rig.fed] == [
        ([("lives", "p")], []),
        ([], ["nowhere"]),
    ]
    rig.runner.do(actions.TellMissing(rig.fed[1].peer, ["nowhere"]))
    assert "no such task: 'nowhere'" in str(told[-1])


def test_answers_go_to_the_caller_with_that_token_or_to_the_clients(rig: Rig) -> None:
    told: list[Any] = []
    token, _ = rig.answers.begin(told.append)
    rig.runner.do(actions.Acknowledge(token, 0, []))
    rig.runner.do(actions.Acknowledge(token, 0, []))  # the caller has its answer already
    rig.runner.do(actions.Acknowledge(b"1", 5, []))
    rig.runner.do(actions.TellMissing(b"1", ["t"]))
    assert told == [[]]
    assert rig.clients.made == [
        ("acknowledge", 0, []),
        ("acknowledge", 5, []),
        ("missing", b"1", ["t"]),
    ]
