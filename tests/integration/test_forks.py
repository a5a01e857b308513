"""A process that a handler forks ends with the handler, and never speaks for the worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from worker_standin import Fleet

from musterd.ipc.wire.messages import Done, Progress, Stop, WorkerHello

FORKING = """
    import asyncio, atexit, multiprocessing, os, signal, sys, threading, time
    from pathlib import Path
    from musterd import Worker, on_close, task

    def ended(child): return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    class Forking(Worker):
        def open(self):
            self.closed = Path(self.options["closed"])
            on_close(self.note, "on_close")
            atexit.register(self.note, "atexit")
            if self.options["greeting"] == "fork" and not (child := os.fork()): return
            if self.options["greeting"] == "fork": self.child = ended(child)
        def note(self, what):
            with self.closed.open("a") as f: f.write(f"{what} {os.getpid()}\\n")
        def close(self): self.note("close")

        @task
        def returns(self, ctx): return ended(child) if (child := os.fork()) else "a second worker"
        @task
        def raises(self, ctx):
            if child := os.fork(): return ended(child)
            raise ValueError("of the child")
        @task
        def exits(self, ctx):
            if child := os.fork(): return ended(child)
            sys.exit(7)
        @task
        def exits_with_words(self, ctx):
            if child := os.fork(): return ended(child)
            sys.exit("enough")
        @task
        def speaks(self, ctx):
            if child := os.fork(): return ended(child)
            ctx.progress(0.5, "of the child")
            ctx.metrics.counter("of_the_child").inc()
            errors = 0
            for call in (ctx.state.load, lambda: ctx.lock("l").__enter__()):
                try: call()
                except RuntimeError as error: errors += "forked" in str(error)
            os._exit(errors)
        @task
        def in_a_thread(self, ctx):
            told = []
            def work():
                child = os.fork()
                if child: told.append(ended(child))
                else: ctx.progress(0.5, "of the child")
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return told
        @task
        def by_multiprocessing(self, ctx):
            context = multiprocessing.get_context("fork")
            child = context.Process(target=ctx.progress, args=(0.5, "of the child"))
            child.start()
            child.join()
            return child.exitcode
        @task
        async def a_returns(self, ctx):
            return ended(child) if (child := os.fork()) else "a second worker"
        @task
        async def a_raises(self, ctx):
            if child := os.fork(): return ended(child)
            raise ValueError("of the child")
        @task
        def pid(self, ctx): return os.getpid()
        @task
        def child_of_open(self, ctx): return self.child

    def hook(ctx, error):
        if child := os.fork(): Path("hooked").write_text(str(ended(child)))

    class Hooked(Worker):
        @task(on_retry=hook)
        def fails(self, ctx): raise ValueError
"""


class Heard(Fleet):
    """Notes every message that is no result."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {"forking": FORKING})
        self.others: list[Any] = []

    def receive(self) -> Any:
        while not isinstance(message := super().receive(), Done | WorkerHello):
            self.others.append(message)
        return message


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Heard]:
    fleet = Heard(tmp_path)
    yield fleet
    fleet.close()


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("returns", 0),
        ("raises", 1),
        ("exits", 7),
        ("exits_with_words", 1),
        ("speaks", 2),
        ("in_a_thread", [0]),
        ("by_multiprocessing", 0),
        ("a_returns", 0),
        ("a_raises", 1),
    ],
)
def test_a_child_ends_and_its_worker_goes_on(
    fleet: Heard, tmp_path: Path, method: str, code: Any
) -> None:
    closed = tmp_path / "closed"
    fleet.start("forking:Forking", closed=str(closed))
    assert fleet.value(method) == code
    assert fleet.value("pid") == fleet.pid
    assert not psutil.Process(fleet.pid).children()
    assert not [each for each in fleet.others if isinstance(each, Progress)]
    assert ("of the child" in fleet.errors.read_text()) == method.endswith("raises")
    fleet.send(Stop())
    assert fleet.exit_code() == 0
    notes = [f"{what} {fleet.pid}" for what in ("on_close", "close")]
    assert closed.read_text().splitlines()[:2] == notes


def test_a_child_that_comes_out_of_open_is_no_worker(fleet: Heard, tmp_path: Path) -> None:
    fleet.start("forking:Forking", closed=str(tmp_path / "closed"), greeting="fork")
    assert fleet.value("child_of_open") == 0
    assert fleet.value("pid") == fleet.pid


def test_a_child_of_a_hook_ends_with_it(fleet: Heard, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    fleet.start("forking:Hooked")
    assert fleet.failure("fails").type == "ValueError"
    assert (tmp_path / "hooked").read_text() == "0"
