"""The worker runtime in a real process; the test plays the supervisor."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from worker_standin import PATIENCE_SECONDS, Fleet

from musterd.ipc.wire import codec
from musterd.ipc.wire.messages import (
    CANCEL,
    ERROR,
    INVALID,
    MESSAGE_BYTES_MAX,
    PERMANENT,
    RESULT_BYTES_MAX,
    TIMEOUT,
    CancelLease,
    Completion,
    Done,
    Recall,
    Returned,
    Stop,
)
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.ipc.wire.signals import DUMP_SIGNAL, INTERRUPT_SIGNAL
from musterd.ipc.wire.spoken import Spoken, unmarked
from musterd.workers.runtime.mailbox import Mailbox, connect
from support.waiting import wait_for

SECOND = 10**9

WORKERS = """
    import asyncio, os, signal, socket, sys, threading, time
    from pathlib import Path
    from musterd import Permanent, Retry, Worker, task

    class Sync(Worker):
        def open(self):
            self.opened = self.options["greeting"]
            if self.opened == "fail": raise RuntimeError("no browser here")
            if self.opened == "exit": sys.exit("no licence")
        def close(self):
            if "closed" in self.options: Path(self.options["closed"]).write_text("closed")
            if self.opened == "fail late": raise RuntimeError("cannot let go")

        @task
        def greet(self, ctx, name: str) -> dict:
            return {"text": f"{self.opened} {name}", "pool": self.pool, "index": self.index,
                    "id": ctx.task_id, "attempt": ctx.attempt, "left": ctx.deadline}
        @task
        def bad(self, ctx): return {"rows": [1, object()]}
        @task
        def big(self, ctx, size: int): return b"x" * size
        @task
        def sleep(self, ctx, seconds: float = 60): time.sleep(seconds)
        @task
        def timer(self, ctx, seconds: float = 0):
            time.sleep(seconds)
            return signal.getitimer(signal.ITIMER_REAL)
        @task
        def spin(self, ctx):
            while True: pass
        @task
        def read(self, ctx):
            ours, theirs = socket.socketpair()
            with ours, theirs: return ours.recv(1)
        @task
        def swallow(self, ctx, until: str):
            swallowed = 0
            while not os.path.exists(until):
                try: time.sleep(0.01)
                except BaseException: swallowed += 1
            return swallowed
        @task
        def until(self, ctx, path: str):
            while not os.path.exists(path): time.sleep(0.005)
            return ctx.cancelled
        @task
        def stubborn(self, ctx, path: str):
            seen = []
            while not os.path.exists(path):
                try: time.sleep(0.005)
                except BaseException as error: seen.append(type(error).__name__)
            return [ctx.cancelled, seen]
        @task
        def fail(self, ctx, how: str):
            match how:
                case "value": raise ValueError("not a number")
                case "retry": raise Retry(after=2.5)
                case "permanent": raise Permanent("gone for good")
                case "exit": sys.exit(3)
                case "keyboard": raise KeyboardInterrupt
        @task(retry_on=(ConnectionError,))
        def picky(self, ctx, connection: bool):
            raise ConnectionResetError("reset") if connection else ValueError("nonsense")
        @task
        def log(self, ctx): ctx.log.info("about %s", "this")
        @task
        def fork(self, ctx):
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        @task
        def die(self, ctx): os._exit(9)

    class Async(Worker):
        async def open(self):
            self.beats = 0
            self.beating = asyncio.create_task(self.beat())
        async def beat(self):
            while True:
                await asyncio.sleep(0.01)
                self.beats += 1
        async def close(self):
            Path(self.options["closed"]).write_text(f"{self.beating.done()}")

        @task
        async def greet(self, ctx, name: str):
            await asyncio.sleep(0)
            return f"hello {name}"
        @task
        def plain(self, ctx): return self.beats
        @task
        async def sleep(self, ctx, seconds: float = 60): await asyncio.sleep(seconds)
        @task
        async def exit(self, ctx): sys.exit(3)
        @task
        async def until(self, ctx, path: str):
            while not os.path.exists(path): await asyncio.sleep(0.005)
            return ctx.cancelled
        @task
        async def own(self, ctx): raise TimeoutError("of my own")

    class Sick(Worker):
        def healthy(self): return False
        @task
        def noop(self, ctx): ...

    class SlowOpen(Worker):
        def open(self):
            Path(self.options["opening"]).write_text("")
            threading.Event().wait()
        @task
        def noop(self, ctx): ...
"""
FUNCTIONS = """
    from musterd import task
    @task
    def double(ctx, number: int) -> int: return 2 * number
    @task
    async def triple(ctx, number: int) -> int: return 3 * number
    @task
    def count(ctx, number: int) -> int: return sum(each for each in range(number))
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    modules = {"sample_workers": WORKERS, "sample_functions": FUNCTIONS}
    fleet = Fleet(tmp_path, modules)
    yield fleet
    fleet.close()


# -- results ----------------------------------------------------------------------------------


def test_a_sync_handler_sees_its_worker_and_its_context(fleet: Fleet) -> None:
    fleet.start()
    assert fleet.value("greet", {"name": "you"}, attempt=2) == {
        "text": "hello you",
        "pool": "parser",
        "index": 3,
        "id": "task-1",
        "attempt": 2,
        "left": float("inf"),
    }
    before = time.monotonic()
    left = fleet.value("greet", {"name": "you"}, timeout_ns=50 * SECOND)["left"]
    assert before + 50 <= left <= time.monotonic() + 50


def test_async_handlers_and_sync_ones_share_a_worker(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start("sample_workers:Async", closed=str(tmp_path / "closed"))
    assert fleet.value("greet", {"name": "you"}) == "hello you"
    assert isinstance(fleet.value("plain"), int)


def test_the_event_loop_of_an_idle_worker_lives_on(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start("sample_workers:Async", closed=str(tmp_path / "closed"))
    first = fleet.value("plain")
    wait_for("the background task goes on", lambda: fleet.value("plain") >= first + 5)


def test_functions_of_a_module_are_a_worker(fleet: Fleet) -> None:
    fleet.start("sample_functions")
    assert fleet.value("double", {"number": 4}) == 8
    assert fleet.value("triple", {"number": 4}) == 12


def test_a_batch_is_answered_in_order_and_completely(fleet: Fleet) -> None:
    fleet.start("sample_functions")
    leases = [fleet.lease("double", {"number": number}) for number in range(1000)]
    fleet.assign(*leases)
    found = fleet.completions(1000)
    assert [each.lease for each in found] == [lease.lease for lease in leases]
    assert [msgspec.msgpack.decode(each.value) for each in found] == [2 * n for n in range(1000)]
    reading = fleet.board.read()
    assert (reading.lease, reading.begun, reading.done) == (0, 1000, 1000)


def test_a_slow_task_does_not_hold_back_what_finished_before_it(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start()
    quick = fleet.lease("greet", {"name": "a"})
    slow = fleet.lease("until", {"path": str(tmp_path / "go")})
    fleet.assign(quick, slow)
    assert fleet.completions(1)[0].lease == quick.lease
    assert fleet.board.read().lease == slow.lease
    (tmp_path / "go").touch()
    assert fleet.completions(1)[0].lease == slow.lease


def test_an_async_handler_does_not_hold_back_what_finished_before_it(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start("sample_workers:Async", closed=str(tmp_path / "closed"))
    fleet.assign(
        fleet.lease("greet", {"name": "a"}),
        fleet.lease("until", {"path": str(tmp_path / "go")}),
    )
    assert fleet.completions(1)[0].lease == 1
    (tmp_path / "go").touch()
    assert fleet.completions(1)[0].lease == 2


def test_large_results_are_spread_over_messages(fleet: Fleet) -> None:
    mailbox = Mailbox(connect(fleet.path), Scoreboard.create())
    try:
        for number in range(1, 5):
            mailbox.complete(Completion(number, 0, b"x" * RESULT_BYTES_MAX), 0)
        mailbox.flush()
        leases: list[int] = []
        while len(leases) < 4:
            _, frame = fleet.router.recv_multipart()
            assert len(frame) < MESSAGE_BYTES_MAX
            leases += [each.lease for each in codec.decode_worker(frame).completions]  # type: ignore[union-attr]
        assert leases == [1, 2, 3, 4]
    finally:
        mailbox.close()


# -- failures ---------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_invalid_and_the_handler_never_runs(fleet: Fleet) -> None:
    fleet.start()
    failure = fleet.failure("greet", {"name": 5})
    assert (failure.kind, failure.type) == (INVALID, "musterd.InvalidTask")
    assert "do not fit greet(name): name must be str, not int" in failure.message
    assert fleet.failure("greet", args=b"\xc1").kind == INVALID
    assert fleet.failure("greet", args=b"\x91" * 100_000).kind == INVALID
    assert fleet.failure("open").message.startswith("this worker has no task 'open'; it has bad,")


def test_results_that_cannot_be_sent_are_permanent_failures(fleet: Fleet) -> None:
    fleet.start()
    failure = fleet.failure("bad")
    assert failure.kind == PERMANENT
    assert "value of type object at result['rows'][1]; return plain data" in failure.message
    failure = fleet.failure("big", {"size": RESULT_BYTES_MAX})
    assert failure.kind == PERMANENT
    assert str(RESULT_BYTES_MAX) in failure.message


def test_exceptions_come_back_with_type_message_and_traceback(fleet: Fleet) -> None:
    fleet.start()
    failure = fleet.failure("fail", {"how": "value"})
    assert (failure.kind, failure.type, failure.message) == (ERROR, "ValueError", "not a number")
    assert "sample_workers.py" in failure.traceback
    assert 'raise ValueError("not a number")' in failure.traceback
    assert "runtime.py" not in failure.traceback
    assert "attention.py" not in failure.traceback


def test_retry_permanent_and_retry_on(fleet: Fleet) -> None:
    fleet.start()
    retry = fleet.run("fail", {"how": "retry"})
    assert retry.failure is not None
    assert (retry.failure.kind, retry.retry_delay_ns) == (ERROR, 2_500_000_000)
    permanent = fleet.failure("fail", {"how": "permanent"})
    assert (permanent.kind, permanent.message) == (PERMANENT, "gone for good")
    assert fleet.failure("picky", {"connection": True}).kind == ERROR
    assert fleet.failure("picky", {"connection": False}).kind == PERMANENT


def test_a_handler_that_exits_does_not_end_its_worker(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    assert fleet.failure("fail", {"how": "exit"}).type == "SystemExit"
    assert fleet.failure("fail", {"how": "keyboard"}).type == "KeyboardInterrupt"
    assert fleet.value("greet", {"name": "still"})["text"] == "hello still"


def test_an_async_handler_that_exits_does_not_break_the_event_loop(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start("sample_workers:Async", closed=str(tmp_path / "closed"))
    assert fleet.failure("exit").type == "SystemExit"
    assert fleet.value("greet", {"name": "still"}) == "hello still"
    fleet.send(Stop())
    assert fleet.exit_code() == 0
    assert fleet.errors.read_text() == ""


def test_the_board_tells_which_lease_killed_the_worker(fleet: Fleet) -> None:
    fleet.start()
    fatal = fleet.lease("die")
    fleet.assign(fleet.lease("greet", {"name": "a"}), fatal)
    assert fleet.exit_code() == 9
    assert fleet.board.read().lease == fatal.lease


# -- timeouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sleep", "spin", "read"])
def test_a_handler_is_interrupted_at_its_timeout(fleet: Fleet, method: str) -> None:
    fleet.start()
    completion = fleet.run(method, timeout_ns=SECOND // 10)
    failure = completion.failure
    assert failure is not None
    assert (failure.kind, failure.type) == (TIMEOUT, "musterd.TaskTimeout")
    assert failure.message == f"task parser.{method} ran longer than its timeout of 0.1 s"
    assert f"in {method}" in failure.traceback
    assert completion.run_ns >= SECOND // 10


def test_an_async_handler_is_cancelled_at_its_timeout(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start("sample_workers:Async", closed=str(tmp_path / "closed"))
    failure = fleet.failure("sleep", timeout_ns=SECOND // 10)
    assert (failure.kind, failure.type) == (TIMEOUT, "musterd.TaskTimeout")
    assert "await asyncio.sleep(seconds)" in failure.traceback
    own = fleet.failure("own", timeout_ns=30 * SECOND)
    assert (own.kind, own.type, own.message) == (ERROR, "TimeoutError", "of my own")


def test_a_timeout_never_strikes_the_next_task(fleet: Fleet) -> None:
    """Many tasks take about as long as their timeout; each ends by itself or by the timeout."""
    fleet.start()
    limit_ns = SECOND // 500
    leases = [
        fleet.lease(
            "sleep", {"seconds": limit_ns / 1e9 * (0.9 + n % 20 / 100)}, timeout_ns=limit_ns
        )
        for n in range(400)
    ]
    fleet.assign(*leases)
    found = fleet.completions(400)
    assert [each.lease for each in found] == [lease.lease for lease in leases]
    for each in found:
        assert each.failure is None or each.failure.kind == TIMEOUT
        assert each.failure is None or each.run_ns >= limit_ns
    assert any(each.failure for each in found)
    assert fleet.value("greet", {"name": "after"}, timeout_ns=limit_ns * 100)


def test_the_timer_repeats_until_it_is_seen_and_then_rests(fleet: Fleet) -> None:
    """A signal right before a system call does not interrupt the call, which once lost timeouts."""
    fleet.start()
    first, again = fleet.value("timer", timeout_ns=3600 * SECOND)
    assert 0 < first <= 3600
    assert 0 < again < 1
    assert fleet.failure("sleep", timeout_ns=SECOND // 20).kind == TIMEOUT
    assert fleet.value("timer", {"seconds": 0.1}) == [0, 0]


def test_a_short_timeout_after_a_long_one_is_kept(fleet: Fleet) -> None:
    fleet.start()
    assert fleet.value("greet", {"name": "long"}, timeout_ns=3600 * SECOND)
    assert fleet.failure("sleep", timeout_ns=SECOND // 10).kind == TIMEOUT
    assert fleet.failure("sleep", timeout_ns=SECOND // 20).kind == TIMEOUT


OWN_CODE = """
import sys, time
from musterd.ipc.wire.messages import Lease
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.workers.runtime.interrupts import Interrupts
from musterd.workers.runtime.mailbox import Mailbox, connect
mailbox, interrupts = Mailbox(connect(sys.argv[1]), Scoreboard.create()), Interrupts("parser")
interrupts.listen()
interrupts.obey(mailbox)
lease = Lease(1, "task", "sleep", b"", 1, 20_000_000)
# A handler in C has no frame of its own, so the signal strikes the runtime's.
interrupts.call(time.sleep, 0.2, {}, lease, time.monotonic_ns())
interrupts.rest()
mailbox.close()
print("unharmed")
"""


def test_a_timeout_never_strikes_the_code_of_the_runtime(fleet: Fleet) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_CODE, fleet.path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("unharmed\n", "")


# -- commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["Sync", "Async"])
def test_a_recall_returns_exactly_what_has_not_begun(
    fleet: Fleet, tmp_path: Path, worker: str
) -> None:
    fleet.start(f"sample_workers:{worker}", closed=str(tmp_path / "closed"))
    running = fleet.lease("until", {"path": str(tmp_path / "go")})
    waiting = [fleet.lease("greet", {"name": "a"}) for _ in range(5)]
    fleet.assign(running, *waiting)
    fleet.begun(running)
    fleet.command(Recall())
    assert fleet.receive() == Returned([lease.lease for lease in waiting])
    fleet.command(Recall())
    assert fleet.receive() == Returned([])
    (tmp_path / "go").touch()
    assert [each.lease for each in fleet.completions(1)] == [running.lease]
    assert fleet.value("greet", {"name": "again"})


def test_a_recall_is_noticed_in_a_blocking_read(fleet: Fleet) -> None:
    fleet.start()
    running, waiting = fleet.lease("read"), fleet.lease("greet", {"name": "a"})
    fleet.assign(running, waiting)
    fleet.begun(running)
    fleet.command(Recall())
    assert fleet.receive() == Returned([waiting.lease])


def test_a_signal_that_overtakes_its_message_is_not_in_vain(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    running = fleet.lease("until", {"path": str(tmp_path / "go")})
    waiting = fleet.lease("greet", {"name": "a"})
    fleet.assign(running, waiting)
    fleet.begun(running)
    os.kill(fleet.pid, INTERRUPT_SIGNAL)
    fleet.send(Recall())
    assert fleet.receive() == Returned([waiting.lease])


def test_every_lease_is_answered_once_whatever_strikes_a_stream_of_tiny_tasks(
    fleet: Fleet,
) -> None:
    fleet.start("sample_functions")
    chance = random.Random(7)
    answered: list[int] = []
    wrongly_cancelled: list[int] = []
    cancelled: set[int] = set()
    for _ in range(100):
        leases = [
            fleet.lease(
                chance.choice(["double", "count", "triple"]),
                {"number": chance.choice([1, 1000])},
                timeout_ns=chance.choice([0, 20_000, 200_000, 30 * SECOND]),
            )
            for _ in range(100)
        ]
        fleet.assign(*leases)
        victim = chance.choice(leases).lease
        cancelled.add(victim)
        fleet.command(CancelLease(victim))
        fleet.command(Recall())
        recalled = False
        while len(answered) < fleet.leases or not recalled:
            message = fleet.receive()
            if isinstance(message, Returned):
                recalled = True
                answered += message.leases
                continue
            for each in message.completions:
                answered.append(each.lease)
                kind = each.failure.kind if each.failure else ""
                assert kind in ("", CANCEL, TIMEOUT), each.failure
                if kind == CANCEL and each.lease not in cancelled:
                    wrongly_cancelled.append(each.lease)
    assert sorted(answered) == list(range(1, fleet.leases + 1))
    assert wrongly_cancelled == []


@pytest.mark.parametrize(
    ("worker", "method"),
    [("Sync", "sleep"), ("Sync", "spin"), ("Sync", "read"), ("Async", "sleep")],
)
def test_a_running_task_can_be_cancelled(
    fleet: Fleet, tmp_path: Path, worker: str, method: str
) -> None:
    fleet.start(f"sample_workers:{worker}", closed=str(tmp_path / "closed"))
    running, waiting = fleet.lease(method), fleet.lease("greet", {"name": "a"})
    fleet.assign(running, waiting)
    fleet.begun(running)
    fleet.command(CancelLease(running.lease))
    first, second = fleet.completions(2)
    assert (first.lease, second.lease) == (running.lease, waiting.lease)
    assert first.failure is not None
    assert first.failure.kind == CANCEL
    assert first.failure.message == "the task was cancelled while its handler ran"
    assert second.failure is None


def test_a_waiting_task_is_cancelled_while_another_runs(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    running = fleet.lease("until", {"path": str(tmp_path / "go")})
    waiting = fleet.lease("greet", {"name": "a"})
    fleet.assign(running, waiting)
    fleet.begun(running)
    fleet.command(CancelLease(waiting.lease))
    completion = fleet.completions(1)[0]
    assert completion.lease == waiting.lease
    assert completion.failure is not None
    assert completion.failure.kind == CANCEL
    (tmp_path / "go").touch()
    completion = fleet.completions(1)[0]
    assert completion.lease == running.lease
    assert msgspec.msgpack.decode(completion.value) is False


def test_a_handler_can_see_that_it_was_cancelled(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    lease = fleet.lease("stubborn", {"path": str(tmp_path / "go")})
    fleet.assign(lease)
    fleet.begun(lease)
    fleet.command(CancelLease(lease.lease))
    fleet.command(Recall())
    assert fleet.receive() == Returned([])
    (tmp_path / "go").touch()
    value = msgspec.msgpack.decode(fleet.completions(1)[0].value)
    assert (value[0], set(value[1])) == (True, {"TaskInterrupted"})


def test_a_cancel_of_a_finished_task_disturbs_nobody(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    finished = fleet.lease("greet", {"name": "a"})
    running = fleet.lease("until", {"path": str(tmp_path / "go")})
    fleet.assign(finished, running)
    fleet.begun(running)
    fleet.completions(1)
    fleet.command(CancelLease(finished.lease))
    fleet.command(Recall())
    assert fleet.receive() == Returned([])
    (tmp_path / "go").touch()
    assert msgspec.msgpack.decode(fleet.completions(1)[0].value) is False


def test_malformed_messages_are_dropped_and_logged_once(fleet: Fleet) -> None:
    fleet.start()
    for frame in (b"", b"\xc1", b"\x91\xa4nope", b"\x92\xa6assign\x01"):
        fleet.router.send_multipart([fleet.identity, frame])
    assert fleet.value("greet", {"name": "still"})
    assert fleet.errors.read_text().count("malformed message") == 1


# -- shutdown ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["message", "signal"])
@pytest.mark.parametrize("worker", ["Sync", "Async"])
def test_a_stop_finishes_what_runs_and_gives_back_the_rest(
    fleet: Fleet, tmp_path: Path, worker: str, how: str
) -> None:
    closed = tmp_path / "closed"
    fleet.start(f"sample_workers:{worker}", closed=str(closed))
    running = fleet.lease("until", {"path": str(tmp_path / "go")})
    waiting = fleet.lease("greet", {"name": "a"})
    fleet.assign(running, waiting)
    fleet.begun(running)
    if how == "message":
        fleet.command(Stop())
    else:
        os.kill(fleet.pid, signal.SIGTERM)
    assert fleet.receive() == Returned([waiting.lease])
    late = fleet.lease("greet", {"name": "late"})
    fleet.assign(late)
    if how == "message":
        assert fleet.receive() == Returned([late.lease])
    (tmp_path / "go").touch()
    messages = [fleet.receive()]
    assert fleet.exit_code() == 0
    while fleet.router.poll(0):
        messages.append(fleet.receive())
    (done,) = (message for message in messages if isinstance(message, Done))
    assert [each.lease for each in done.completions] == [running.lease]
    messages.remove(done)
    # After a signal the worker may have ended when the late lease came.
    assert not messages or (how == "signal" and messages == [Returned([late.lease])])
    assert closed.exists()


@pytest.mark.parametrize("worker", ["Sync", "Async"])
def test_an_idle_worker_obeys_a_term_at_once(fleet: Fleet, tmp_path: Path, worker: str) -> None:
    closed = tmp_path / "closed"
    fleet.start(f"sample_workers:{worker}", closed=str(closed), idle=1000.0)
    assert fleet.value("greet", {"name": "a"})
    os.kill(fleet.pid, signal.SIGTERM)
    assert fleet.exit_code() == 0
    assert closed.exists()


@pytest.mark.parametrize(("worker", "method"), [("Sync", "sleep"), ("Async", "sleep")])
def test_a_second_term_interrupts_the_handler(
    fleet: Fleet, tmp_path: Path, worker: str, method: str
) -> None:
    closed = tmp_path / "closed"
    fleet.start(f"sample_workers:{worker}", closed=str(closed))
    running, waiting = fleet.lease(method), fleet.lease("greet", {"name": "a"})
    fleet.assign(running, waiting)
    fleet.begun(running)
    os.kill(fleet.pid, signal.SIGTERM)
    assert fleet.receive() == Returned([waiting.lease])
    os.kill(fleet.pid, signal.SIGTERM)
    failure = fleet.completions(1)[0].failure
    assert failure is not None
    assert failure.kind == CANCEL
    assert fleet.exit_code() == 0
    assert closed.exists()


def test_an_interrupt_from_the_terminal_is_ignored(fleet: Fleet) -> None:
    fleet.start()
    os.kill(fleet.pid, signal.SIGINT)
    assert fleet.value("greet", {"name": "still"})


@pytest.mark.parametrize(
    ("greeting", "words"),
    [("fail", "RuntimeError: no browser here"), ("exit", "SystemExit: no licence")],
)
def test_a_failing_open_leaves_last_words(fleet: Fleet, greeting: str, words: str) -> None:
    fleet.launch("sample_workers:Sync", greeting=greeting)
    assert fleet.exit_code() == 1
    assert fleet.board.read().last_words == words
    assert "Traceback" in fleet.errors.read_text()
    assert not fleet.router.poll(0)


def test_a_failing_close_is_told(fleet: Fleet) -> None:
    fleet.start(greeting="fail late")
    fleet.send(Stop())
    assert fleet.exit_code() == 1
    assert fleet.board.read().last_words == "RuntimeError: cannot let go"


def test_a_term_during_open_ends_the_process(fleet: Fleet, tmp_path: Path) -> None:
    opening = tmp_path / "opening"
    fleet.launch("sample_workers:SlowOpen", opening=str(opening))
    wait_for("open() runs", opening.exists)
    os.kill(fleet.pid, INTERRUPT_SIGNAL)
    os.kill(fleet.pid, signal.SIGTERM)
    assert fleet.exit_code() == -signal.SIGTERM


def test_an_unhealthy_worker_ends_while_it_is_idle(fleet: Fleet) -> None:
    fleet.start("sample_workers:Sick", health=0.001, idle=0.01)
    assert fleet.exit_code() == 3
    assert fleet.board.read().last_words == "unhealthy: healthy() returned False"


def test_an_idle_worker_beats(fleet: Fleet) -> None:
    fleet.start()
    before = fleet.board.read().since_ns
    wait_for("a sign of life", lambda: fleet.board.read().since_ns > before)


# -- what can be seen from outside ------------------------------------------------------------


def test_the_title_tells_what_runs(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    assert fleet.title() == "musterd: worker parser/3"
    lease = fleet.lease("until", {"path": str(tmp_path / "go")})
    fleet.assign(lease)
    fleet.begun(lease)
    wait_for("the busy title", lambda: fleet.title() == "musterd: worker parser/3 until")
    (tmp_path / "go").touch()
    fleet.completions(1)
    wait_for("the idle title", lambda: fleet.title() == "musterd: worker parser/3")


def test_a_stack_dump_can_be_asked_for(fleet: Fleet) -> None:
    fleet.start()
    lease = fleet.lease("spin")
    fleet.assign(lease)
    fleet.begun(lease)
    wait_for("it spins", lambda: fleet.title().endswith("spin"))
    os.kill(fleet.pid, DUMP_SIGNAL)
    wait_for("the stack of spin()", lambda: "sample_workers.py" in fleet.errors.read_text())
    assert fleet.process is not None
    assert fleet.process.poll() is None


def test_the_log_of_a_task_goes_to_stderr_with_its_id(fleet: Fleet) -> None:
    fleet.start()
    fleet.run("log")
    said = unmarked(fleet.errors.read_bytes())
    assert said == Spoken(b"INFO musterd.task [task-1] about this\n", "task-1", "INFO")


def test_a_fork_of_a_handler_ends_when_it_is_told_to(fleet: Fleet) -> None:
    fleet.start()
    assert fleet.value("fork") == -signal.SIGTERM
