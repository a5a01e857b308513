"""Handlers at breakpoints: who is waited for, for how long, and what stands meanwhile."""

from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import Completion, TaskDeclaration, TaskSpec
from musterd.supervisor.core.model import actions, debug_events, events
from musterd.supervisor.core.model.actions import (
    AnswerDebugger,
    AssignLeases,
    BreakIntoHandler,
    CloseDebugger,
    KillWorker,
    ReadBoard,
    Report,
    ShowDebugger,
)
from support.core import Muster, of

TIMEOUT_NS = 10 * SECOND_NS
WAIT_NS = 60 * SECOND_NS
WHERE = "shop.py:12 in check"


class Debugged(Muster):
    """A fleet whose worker 1 runs the task `t`, with lease 1."""

    def __init__(self, **pool: Any) -> None:
        options = {"debug": True, "debug_wait_ns": WAIT_NS, "task_timeout_ns": TIMEOUT_NS, **pool}
        super().__init__(**options)
        self.start()
        self.submit(TaskSpec("t", "p.x", b""))

    def hit(self, request: int = 7, worker: int = 1, lease: int = 1) -> list[Any]:
        return self.tell(debug_events.BreakpointHit(worker, lease, request, WHERE))

    def attach(self) -> list[Any]:
        return self.tell(debug_events.DebuggerAttached(1, "uid 7"))

    def ask(self, request: int = 8) -> list[Any]:
        return self.tell(debug_events.DebuggerAsked(1, 1, request, "-> x\n", "(Pdb) "))

    def type(self, line: str | None) -> list[Any]:
        return self.tell(debug_events.DebuggerTyped(1, line))

    def detach(self) -> list[Any]:
        return self.tell(debug_events.DebuggerDetached(1))

    def end(self) -> list[Any]:
        return self.tell(debug_events.DebuggerEnded(1, 1, "bye\n"))


def told(answer: list[Any]) -> list[tuple[str, str]]:
    return [(each.event, each.reason) for each in of(Report, answer)]


def test_a_session_from_the_breakpoint_to_its_end() -> None:
    m = Debugged()
    words = f"{WHERE}: type musterctl debug p/0 within 60 s"
    assert told(m.hit()) == [("debug.waiting", words)]
    attached = m.attach()
    assert of(AnswerDebugger, attached) == [AnswerDebugger(1, 7, "")]
    assert told(attached) == [("debug.attached", "uid 7")]
    assert m.ask() == [ShowDebugger(1, "-> x\n", "(Pdb) ")]
    assert m.type("p x") == [AnswerDebugger(1, 8, "p x")]
    assert m.type("typed too early") == []
    assert m.tell(debug_events.DebuggerInterrupted(1)) == [BreakIntoHandler(1, 1)]
    m.ask(9)
    assert m.tell(debug_events.DebuggerInterrupted(1)) == [], "it is at a prompt already"
    m.type("q")
    end = m.end()
    assert told(end) == [("debug.over", "the debugger was left")]
    assert of(ShowDebugger, end) == [ShowDebugger(1, "bye\n")]
    assert of(CloseDebugger, end) == [CloseDebugger(1, "the debugger was left")]
    assert m.fleet.debugged == {}


def test_deadlines_are_not_looked_at_while_the_time_stands_and_later_from_there_on() -> None:
    m = Debugged()
    m.wait(4 * SECOND_NS)
    m.hit()
    m.attach()
    m.ask()
    assert of(ReadBoard, m.wait(3600 * SECOND_NS)) == []
    m.type("q")
    m.end()
    # Six seconds are left, and five to stop by itself.
    assert of(ReadBoard, m.wait(11 * SECOND_NS - 1)) == []
    assert of(ReadBoard, m.wait(2)) == [ReadBoard(1)]
    began_ns = m.now_ns - 3600 * SECOND_NS - TIMEOUT_NS - 5 * SECOND_NS - 1
    late = m.tell(events.BoardRead(1, 1, began_ns))
    assert of(KillWorker, late) == [KillWorker(1, dump=True)]


def test_a_look_at_the_board_that_was_under_way_kills_nobody() -> None:
    m = Debugged()
    began_ns = m.now_ns
    m.wait(TIMEOUT_NS + 5 * SECOND_NS)
    m.hit()
    assert m.tell(events.BoardRead(1, 1, began_ns)) == []


def test_a_worker_that_is_debugged_gets_no_other_task() -> None:
    m = Debugged()
    m.hit()
    m.tell(events.LeasesReturned(1, []))
    assert of(AssignLeases, m.submit(TaskSpec("u", "p.x", b""))) == []
    m.attach()
    m.detach()
    m.end()
    done = m.tell(events.LeasesCompleted(1, [Completion(1, 1, b"value")]))
    assert [lease.id for each in of(AssignLeases, done) for lease in each.leases] == ["u"]


@pytest.mark.parametrize("request_", [7, 12])
def test_where_debugging_is_not_allowed_the_handler_goes_on_and_a_line_says_how(
    request_: int,
) -> None:
    m = Debugged(debug=False)
    refused = m.hit(request_)
    assert of(AnswerDebugger, refused) == [AnswerDebugger(1, request_)]
    ((event, reason),) = told(refused)
    assert event == "debug.refused"
    assert reason.startswith(f"{WHERE}: pool p allows no debugging: set pools.p.debug = true")
    assert m.fleet.debugged == {}
    assert m.attach() == [CloseDebugger(1, "the task does not wait any more")]


def test_nobody_is_waited_for_longer_than_the_pool_says() -> None:
    m = Debugged()
    m.hit()
    assert of(AnswerDebugger, m.wait(WAIT_NS - 1)) == []
    over = m.wait(1)
    assert of(AnswerDebugger, over) == [AnswerDebugger(1, 7)]
    assert told(over) == [("debug.over", "nobody has come")]
    assert of(AnswerDebugger, m.wait(2 * WAIT_NS)) == []


@pytest.mark.parametrize(
    "order",
    [
        events.StopRequested((("p", 0),)),
        events.RestartRequested((("p", 0),)),
        events.DrainRequested((("p", -1),)),
        events.ScaleRequested("p", 0, b"c"),
        events.ShutdownRequested("TERM"),
    ],
    ids=lambda order: type(order).__name__,
)
def test_a_worker_that_is_to_stop_waits_for_nobody_and_tells_who_is_there(order: Any) -> None:
    m = Debugged()
    m.hit()
    assert of(AnswerDebugger, m.tell(order)) == [AnswerDebugger(1, 7)]
    assert m.fleet.debugged == {}
    m = Debugged()
    m.hit()
    m.attach()
    shown = of(ShowDebugger, m.tell(order))
    assert [each.text.partition(":")[0] for each in shown] == ["its worker is to stop"]
    assert of(ShowDebugger, m.wait(SECOND_NS)) == [], "once"
    refused = Debugged()
    refused.tell(order)
    assert of(AnswerDebugger, refused.hit()) == [AnswerDebugger(1, 7)]


def test_a_terminal_that_goes_lets_the_handler_go_on() -> None:
    m = Debugged()
    m.hit()
    m.attach()
    m.ask()
    assert m.detach() == [AnswerDebugger(1, 8)]
    assert m.fleet._state.suspended == {1: 0}
    end = m.end()
    assert told(end) == [("debug.over", "the terminal has gone")]
    assert of(CloseDebugger, end) == of(ShowDebugger, end) == [], "nobody is there"


def test_a_terminal_that_goes_while_code_runs_is_noticed_at_once() -> None:
    m = Debugged()
    m.hit()
    m.attach()
    assert m.detach() == [BreakIntoHandler(1, 1, leave=True)]
    assert m.ask() == [AnswerDebugger(1, 8)]
    assert m.detach() == []


def test_a_handler_that_does_not_hear_is_late_like_any_other() -> None:
    m = Debugged()
    began_ns = m.now_ns
    m.hit()
    m.attach()
    m.wait(100 * SECOND_NS)
    m.detach()
    assert of(ReadBoard, m.wait(TIMEOUT_NS + 5 * SECOND_NS + 1)) == [ReadBoard(1)]
    assert of(KillWorker, m.tell(events.BoardRead(1, 1, began_ns))) == [KillWorker(1, dump=True)]


def test_the_end_of_the_attempt_or_of_the_worker_ends_the_session() -> None:
    m = Debugged()
    m.hit()
    m.attach()
    done = m.tell(events.LeasesCompleted(1, [Completion(1, 1, b"value")]))
    assert of(CloseDebugger, done) == [CloseDebugger(1, "the attempt has ended")]
    assert m.fleet._state.suspended == {}
    m = Debugged()
    m.hit()
    m.attach()
    gone = m.tell(events.WorkerExited(1, -9, 1))
    assert of(CloseDebugger, gone) == [CloseDebugger(1, "the worker has ended")]
    assert m.fleet._state.suspended == {}
    assert m.slots[0].debugged_ns == 0


def test_a_cancelled_task_is_not_waited_for() -> None:
    m = Debugged()
    m.tell(events.CancelRequested(["t"]))
    assert of(AnswerDebugger, m.hit()) == [AnswerDebugger(1, 7)]
    m = Debugged()
    m.hit()
    m.attach()
    m.tell(events.CancelRequested(["t"]))
    assert told(m.end()) == [("debug.over", "the task was cancelled")]
    kill = of(KillWorker, m.wait(5 * SECOND_NS))
    assert kill == [KillWorker(1, dump=True)], "and is no excuse for a handler that ignores it"


def test_no_worker_speaks_for_another_or_for_an_attempt_that_is_over() -> None:
    m = Debugged(size=2)
    assert m.hit(worker=2) == m.hit(lease=9) == m.hit(worker=9) == []
    m.hit()
    second = of(AnswerDebugger, m.hit(8))
    assert second == [AnswerDebugger(1, 8)], "one at a time"
    m.attach()
    for event in (
        debug_events.DebuggerEnded(2, 1, ""),
        debug_events.DebuggerEnded(1, 2, ""),
        debug_events.DebuggerTyped(2, "q"),
        debug_events.DebuggerInterrupted(2),
        debug_events.DebuggerDetached(2),
        events.LeasesCompleted(2, [Completion(1, 1, b"not so")]),
    ):
        assert m.tell(event) == []
    assert m.tell(debug_events.DebuggerAsked(1, 2, 9, "", "")) == [AnswerDebugger(1, 9)]
    assert list(m.fleet.debugged) == [1]


def test_tasks_beside_a_debugged_one_have_their_time_too() -> None:
    m = Muster(1, debug=True, task_timeout_ns=TIMEOUT_NS)
    m.tell(events.Started())
    ready = events.ForkServerReady("p", (TaskDeclaration("x"),))
    (spawn,) = of(actions.SpawnWorker, m.tell(ready))
    m.tell(events.WorkerForked(spawn.worker, 5001))
    m.tell(events.WorkerReady(spawn.worker, 2))
    began_ns = m.now_ns
    m.submit(TaskSpec("t", "p.x", b""), TaskSpec("u", "p.x", b""))
    m.tell(debug_events.BreakpointHit(1, 1, 7, WHERE))
    m.wait(100 * SECOND_NS)
    m.tell(debug_events.DebuggerEnded(1, 1, ""))
    board = events.BoardRead(1, 1, began_ns, beside=((2, began_ns),))
    m.wait(TIMEOUT_NS + 4 * SECOND_NS)
    assert of(KillWorker, m.tell(board)) == []
    m.wait(2 * SECOND_NS)
    assert of(KillWorker, m.tell(board)) == [KillWorker(1, dump=True)]
