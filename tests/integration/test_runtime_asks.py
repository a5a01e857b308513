"""Requests of a handler while messages and signals strike its worker. The test plays the supervisor
and decides when to answer."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from musterd.ipc.wire import codec
from musterd.ipc.wire.messages import (
    CANCEL,
    PROTOCOL,
    TIMEOUT,
    Assign,
    CancelLease,
    Completion,
    Done,
    Lease,
    LoadState,
    LockAnswer,
    LockState,
    Progress,
    Recall,
    Returned,
    SaveState,
    StateAnswer,
    WorkerHello,
)
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.ipc.wire.signals import INTERRUPT_SIGNAL

SECOND = 10**9
PATIENCE_MS = 20_000

WORKERS = """
    import asyncio, os, threading, time
    from musterd import Worker, task
    from musterd.workers.authoring.base import TaskTimeout

    class Sync(Worker):
        @task
        def load(self, ctx): return ctx.state.load()
        @task
        def swallow(self, ctx):
            try: ctx.state.load("first")
            except TaskTimeout: return ctx.state.load("second")
        @task
        def locked(self, ctx):
            with ctx.lock("l", timeout=60): return "had it"
        @task
        def many(self, ctx, count: int):
            total = 0
            for number in range(count):
                ctx.state.save(number)
                total += ctx.state.load()
                ctx.progress(number / count)
            return total
        @task
        def waits_with_progress(self, ctx):
            ctx.progress(0.1)
            ctx.progress(0.2)
            return ctx.state.load()
        @task
        def echo(self, ctx, value: int): return value

    class Async(Worker):
        @task
        async def load(self, ctx): return await ctx.state.aload()
        @task
        async def locked(self, ctx):
            async with ctx.lock("l", timeout=60): return "had it"
        @task
        async def many(self, ctx, count: int):
            total = 0
            for number in range(count):
                await ctx.state.asave(number)
                total += await ctx.state.aload()
                ctx.progress(number / count)
            return total
        @task
        async def leave_behind(self, ctx):
            self.ctx, self.left = ctx, asyncio.create_task(ctx.state.aload("left"))
            await asyncio.sleep(0.01)
        @task
        async def what_became_of_it(self, ctx):
            try: await self.left
            except asyncio.CancelledError: pass
            try: await self.ctx.state.aload()
            except RuntimeError as error: return [self.left.cancelled(), str(error)]
        @task
        def echo(self, ctx, value: int): return value
"""
PROGRAM = """
import sys
from types import SimpleNamespace
from musterd.workers.runtime import run as runtime
worker, path, fd = sys.argv[1:]
sys.exit(runtime.run(runtime.load(worker), pool="p", socket=path,
                     called=lambda: SimpleNamespace(index=0, token="t"),
                     board_fd=int(fd), options=bytes([0x80]), health_seconds=0, beat_seconds=1))
"""


class Supervisor:
    """The supervisor's end of workers.sock, and one worker."""

    def __init__(self, directory: Path, worker: str) -> None:
        (directory / "asking.py").write_text(textwrap.dedent(WORKERS))
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        path = str(directory / "w.sock")
        self._router.bind(f"ipc://{path}")
        self._board = Scoreboard.create()
        self._leases = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, f"asking:{worker}", path, str(self._board.fd)],
            pass_fds=[self._board.fd],
            env={**os.environ, "PYTHONPATH": str(directory)},
        )
        self._identity = b""
        assert self.receive() == WorkerHello(PROTOCOL, "t")

    def receive(self, kind: type | None = None) -> Any:
        assert self._router.poll(PATIENCE_MS), "the worker says nothing"
        self._identity, frame = self._router.recv_multipart()
        message = codec.decode_worker(frame)
        assert kind is None or isinstance(message, kind), message
        return message

    def send(self, message: object, *, signalled: bool = False) -> None:
        self._router.send_multipart([self._identity, codec.encode(message)])
        if signalled:
            self.process.send_signal(INTERRUPT_SIGNAL)

    def lease(self, method: str, timeout_ns: int = 0, **arguments: Any) -> Lease:
        self._leases += 1
        data = msgspec.msgpack.encode(arguments)
        return Lease(self._leases, f"task-{self._leases}", method, data, 1, timeout_ns)

    def assign(self, method: str, timeout_ns: int = 0, **arguments: Any) -> Lease:
        lease = self.lease(method, timeout_ns, **arguments)
        self.send(Assign([lease]))
        return lease

    def completion(self) -> Completion:
        (completion,) = self.receive(Done).completions
        return completion

    def value(self) -> Any:
        completion = self.completion()
        assert completion.failure is None, completion.failure
        return msgspec.msgpack.decode(completion.value)

    def kind(self) -> str:
        failure = self.completion().failure
        assert failure is not None
        return failure.kind

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._router.close()
        self._context.term()
        self._board.close()


@pytest.fixture(params=["Sync", "Async"])
def any_worker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path, request.param)
    yield supervisor
    supervisor.close()


@pytest.fixture
def sync_worker(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path, "Sync")
    yield supervisor
    supervisor.close()


@pytest.fixture
def async_worker(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path, "Async")
    yield supervisor
    supervisor.close()


def kept(value: Any) -> bytes:
    return msgspec.msgpack.encode([False, value])


def test_an_answer_is_the_result_of_the_call(any_worker: Supervisor) -> None:
    any_worker.assign("load")
    asked = any_worker.receive(LoadState)
    any_worker.send(StateAnswer(asked.request, kept({"a": 1})))
    completion = any_worker.completion()
    assert msgspec.msgpack.decode(completion.value) == {"a": 1}
    assert completion.clears == asked.key


def test_messages_are_obeyed_while_a_handler_waits_for_an_answer(any_worker: Supervisor) -> None:
    any_worker.assign("load")
    asked = any_worker.receive(LoadState)
    waiting = any_worker.lease("echo", value=1)
    any_worker.send(Assign([waiting]))
    any_worker.send(Recall(), signalled=True)
    assert any_worker.receive(Returned).leases == [waiting.lease]
    dropped = any_worker.lease("echo", value=2)
    any_worker.send(Assign([dropped]))
    any_worker.send(CancelLease(dropped.lease), signalled=True)
    assert any_worker.completion().failure is not None
    after = any_worker.assign("echo", value=3)
    any_worker.send(StateAnswer(asked.request, None))
    done = any_worker.receive(Done).completions
    if len(done) == 1:
        done += any_worker.receive(Done).completions
    assert [each.lease for each in done] == [1, after.lease]


def test_a_cancellation_ends_the_wait(any_worker: Supervisor) -> None:
    lease = any_worker.assign("load")
    asked = any_worker.receive(LoadState)
    any_worker.send(CancelLease(lease.lease), signalled=True)
    assert any_worker.kind() == CANCEL
    any_worker.send(StateAnswer(asked.request, kept("late")))
    any_worker.assign("echo", value=5)
    assert any_worker.value() == 5


def test_a_timeout_ends_the_wait_and_a_late_answer_is_not_taken_for_another(
    sync_worker: Supervisor,
) -> None:
    began = time.monotonic()
    sync_worker.assign("swallow", timeout_ns=SECOND // 5)
    first = sync_worker.receive(LoadState)
    second = sync_worker.receive(LoadState)
    assert time.monotonic() - began >= 0.2
    sync_worker.send(StateAnswer(first.request, kept("late")))
    sync_worker.send(StateAnswer(second.request, kept("right")))
    assert sync_worker.value() == "right"


def test_without_an_answer_the_task_times_out(any_worker: Supervisor) -> None:
    any_worker.assign("load", timeout_ns=SECOND // 5)
    any_worker.receive(LoadState)
    assert any_worker.kind() == TIMEOUT


def test_a_wait_for_a_lock_that_is_given_up_is_told(any_worker: Supervisor) -> None:
    lease = any_worker.assign("locked")
    asked = any_worker.receive(LockState)
    assert (asked.name, asked.take, asked.timeout_ns) == ("l", True, 60 * SECOND)
    any_worker.send(CancelLease(lease.lease), signalled=True)
    assert any_worker.receive(LockState) == LockState(0, "l", False, 0, lease.lease)
    assert any_worker.kind() == CANCEL
    any_worker.assign("locked")
    asked = any_worker.receive(LockState)
    any_worker.send(LockAnswer(asked.request, True))
    assert not any_worker.receive(LockState).take
    assert any_worker.value() == "had it"


def test_a_term_is_obeyed_while_a_handler_waits(sync_worker: Supervisor) -> None:
    sync_worker.assign("load")
    asked = sync_worker.receive(LoadState)
    late = sync_worker.lease("echo", value=1)
    sync_worker.process.send_signal(signal.SIGTERM)
    sync_worker.send(Assign([late]))
    while late.lease not in sync_worker.receive(Returned).leases:
        pass
    sync_worker.send(StateAnswer(asked.request, kept(7)))
    assert sync_worker.value() == 7
    assert sync_worker.process.wait(20) == 0


def test_a_second_term_interrupts_the_wait(sync_worker: Supervisor) -> None:
    sync_worker.assign("load")
    sync_worker.receive(LoadState)
    sync_worker.process.send_signal(signal.SIGTERM)
    sync_worker.assign("echo", value=1)
    sync_worker.receive(Returned)  # the first SIGTERM arrived: two at once would count as one
    sync_worker.process.send_signal(signal.SIGTERM)
    assert sync_worker.kind() == CANCEL
    assert sync_worker.process.wait(20) == 0


def test_the_newest_progress_is_told_while_a_handler_waits(sync_worker: Supervisor) -> None:
    sync_worker.assign("waits_with_progress")
    assert sync_worker.receive(Progress).fraction == 0.1
    asked = sync_worker.receive(LoadState)
    assert sync_worker.receive(Progress).fraction == 0.2
    sync_worker.send(StateAnswer(asked.request, None))
    assert sync_worker.value() is None


def test_what_outlives_its_handler_is_cancelled(async_worker: Supervisor) -> None:
    async_worker.assign("leave_behind")
    asked = async_worker.receive(LoadState)
    assert async_worker.value() is None
    async_worker.send(StateAnswer(asked.request, kept("late")))
    async_worker.assign("what_became_of_it")
    cancelled, text = async_worker.value()
    assert cancelled
    assert "task task-1 is not running any more" in text


@pytest.mark.parametrize("seed", range(3))
def test_every_question_gets_its_own_answer_in_a_storm_of_signals(
    any_worker: Supervisor, seed: int
) -> None:
    count, rng = 150, random.Random(seed)
    any_worker.assign("many", timeout_ns=60 * SECOND, count=count)
    state, notes, asked = b"", 0, 0
    while True:
        message = any_worker.receive()
        if isinstance(message, Done):
            break
        if isinstance(message, Progress):
            notes += 1
            continue
        if isinstance(message, Returned):
            continue
        asked += 1
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.5:
                any_worker.send(Recall(), signalled=True)
            else:
                any_worker.process.send_signal(INTERRUPT_SIGNAL)
        if isinstance(message, SaveState):
            state = message.value or b""
            any_worker.send(StateAnswer(message.request))
        else:
            assert isinstance(message, LoadState)
            any_worker.send(StateAnswer(message.request, state))
    (completion,) = message.completions
    assert completion.failure is None, completion.failure
    assert msgspec.msgpack.decode(completion.value) == sum(range(count))
    assert asked == 2 * count
    assert 1 <= notes <= count // 2
