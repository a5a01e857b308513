"""ctx.state, ctx.lock and ctx.progress with real processes that are killed meanwhile."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from musterd import AsyncClient, TaskFailed
from musterd.supervisor.api import rpc
from support.daemon import Muster, Musters
from support.waiting import Waiting

STEPS = """
import asyncio, dataclasses, os, threading, time
from pathlib import Path
from musterd import LockTimeout, StateError, Worker, task

def wait_until(path):
    while not os.path.exists(path):
        time.sleep(0.005)

@dataclasses.dataclass
class Place:
    page: int

class Steps(Worker):
    def open(self):
        self.token = os.urandom(4).hex()

    def note(self, path, what):
        with open(path, "a") as file:
            file.write(f"{what} {self.token}\\n")

    def encode_state(self, value):
        return {"place": value.page} if isinstance(value, Place) else value

    def decode_state(self, value):
        if isinstance(value, dict) and "place" in value:
            return Place(value["place"])
        return value

    @task
    def speak(self, ctx, text: str) -> None:
        ctx.log.warning(text)

    @task
    def walk(self, ctx, steps: int, trace: str, gate: str, stop_at: int = -1) -> int:
        first = ctx.state.load(default=0)
        for step in range(first, steps):
            self.note(trace, step)
            ctx.state.save(step + 1)
            self.note(trace, "saved")
            if step == stop_at:
                wait_until(gate)
        return first

    @task
    async def awalk(self, ctx, steps: int, trace: str, gate: str, stop_at: int = -1) -> int:
        first = await ctx.state.aload(default=0)
        for step in range(first, steps):
            self.note(trace, step)
            await ctx.state.asave(step + 1)
            self.note(trace, "saved")
            if step == stop_at:
                while not os.path.exists(gate):
                    await asyncio.sleep(0.005)
        return first

    @task(max_retries=0)
    def keep(self, ctx, how: str, value: object = None) -> object:
        if how == "save":
            return ctx.state.save(value, key="shared")
        if how == "load":
            return ctx.state.load("shared", "nothing")
        if how == "clear":
            return ctx.state.clear("shared")
        if how == "short":
            return ctx.state.save(value, key="shared", ttl=0.05)
        if how == "object":
            return ctx.state.save({"a": [1, object()]})
        if how == "large":
            return ctx.state.save("x" * (1024 * 1024))
        if how == "place":
            ctx.state.save(Place(value), key="place")
            return repr(ctx.state.load("place"))
        if how == "thread":
            errors = []
            def run():
                try:
                    ctx.state.load()
                except RuntimeError as error:
                    errors.append(str(error))
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return errors

    @task(max_retries=0)
    def resume(self, ctx, works: str, keep: bool) -> object:
        found = ctx.state.load()
        ctx.state.save("half", keep=keep)
        if not os.path.exists(works):
            raise ConnectionError("not now")
        return found

    @task(max_retries=0)
    async def wrong(self, ctx, what: str) -> str:
        try:
            if what == "lock":
                with ctx.lock("a"):
                    pass
            else:
                ctx.state.load()
        except RuntimeError as error:
            return str(error)

    @task
    async def many(self, ctx, count: int) -> list:
        await asyncio.gather(*[ctx.state.asave(n, f"k{n}") for n in range(count)])
        return await asyncio.gather(*[ctx.state.aload(f"k{n}") for n in range(count)])

    @task(max_retries=0)
    def hold(self, ctx, name: str, gate: str, timeout: float = 20.0, told: str = "") -> str:
        with ctx.lock(name, timeout=timeout):
            if told:
                Path(told).write_text(str(os.getpid()))
            wait_until(gate)
            return ctx.task_id

    @task(max_retries=0)
    async def ahold(self, ctx, name: str, gate: str, timeout: float = 20.0, told: str = "") -> str:
        async with ctx.lock(name, timeout=timeout):
            if told:
                Path(told).write_text(str(os.getpid()))
            while not os.path.exists(gate):
                await asyncio.sleep(0.005)
            return ctx.task_id

    @task(max_retries=0)
    def again(self, ctx) -> str:
        with ctx.lock("mine"):
            try:
                with ctx.lock("mine"):
                    return "twice"
            except RuntimeError as error:
                return str(error)

    @task
    def count(self, ctx, path: str, times: int) -> None:
        for _ in range(times):
            with ctx.lock("count"):
                number = int(Path(path).read_text())
                time.sleep(0.001)
                Path(path).write_text(str(number + 1))

    @task
    def tell(self, ctx, gate: str) -> str:
        for step in range(1000):
            ctx.progress(step / 1000, f"step {step}")
        wait_until(gate)
        ctx.progress(1, "done")
        return "over"

    @task
    async def atell(self, ctx, gate: str) -> str:
        ctx.progress(0.5, "half")
        while not os.path.exists(gate):
            await asyncio.sleep(0.005)
        ctx.progress(1, "done")
        return "over"

    @task
    def tell_from_thread(self, ctx, gate: str) -> str:
        thread = threading.Thread(target=lambda: (ctx.progress(0.3, "thread"), wait_until(gate)))
        thread.start()
        thread.join()
        return "over"
"""


@pytest.fixture
def steps(muster: Musters) -> Callable[..., Muster]:
    """Make a daemon whose pool `steps` runs the tasks above: steps(size=2, ...)."""

    def make(size: int = 2, **settings: Any) -> Any:
        pool = {"worker": "steps:Steps", "size": size, **settings.pop("pool", {})}
        made = muster({"steps": pool}, start=False, **settings)
        Path(made.folder, "steps.py").write_text(STEPS)
        return made.start()

    return make


def trace_of(path: Path) -> list[tuple[str, str]]:
    """Return what was done, and by which process."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(what, token) for what, token in map(str.split, lines)]


# -- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["walk", "awalk"])
@pytest.mark.parametrize("victim", ["worker", "supervisor"])
def test_a_long_operation_goes_on_where_it_was_killed(
    steps: Callable[..., Muster], waiting: Waiting, method: str, victim: str
) -> None:
    daemon = steps(1)
    trace, gate = daemon.folder / "trace", daemon.folder / "gate"
    args = {"steps": 6, "trace": str(trace), "gate": str(gate), "stop_at": 2}
    client = daemon.client()
    handle = client.submit(f"steps.{method}", args)
    waiting("it is in the middle", lambda: len(trace_of(trace)) == 6)
    if victim == "worker":
        os.kill(daemon.worker("steps/0").pid, signal.SIGKILL)
    else:
        daemon.kill()
        daemon.start()
    gate.touch()
    assert handle.result(timeout=30) == 3
    done = [(what, token) for what, token in trace_of(trace) if what != "saved"]
    assert [int(what) for what, _ in done] == [0, 1, 2, 3, 4, 5]
    assert len({token for _, token in done}) == 2
    # The success has cleared the state: the same task begins anew.
    assert client.submit(f"steps.{method}", args).result(timeout=30) == 0


@pytest.mark.parametrize("keep", [False, True])
def test_a_failed_task_leaves_its_state_to_the_next_with_the_same_arguments(
    steps: Callable[..., Muster], keep: bool
) -> None:
    daemon = steps(2)
    client, works = daemon.client(), daemon.folder / "works"
    args = {"works": str(works), "keep": keep}
    with pytest.raises(TaskFailed, match="not now"):
        client.submit("steps.resume", args).result(timeout=30)
    daemon.stop()
    daemon.start()
    works.touch()
    other = {"works": str(works), "keep": not keep}
    assert client.submit("steps.resume", other).result(timeout=30) is None
    assert client.submit("steps.resume", args).result(timeout=30) == "half"
    # A success clears the state unless told to keep it.
    again = client.submit("steps.resume", args).result(timeout=30)
    assert again == ("half" if keep else None)


@pytest.mark.parametrize("level", ["debug", "info"])
def test_saving_and_restoring_is_logged_where_one_wants_to_know(
    steps: Callable[..., Muster], waiting: Waiting, level: str
) -> None:
    daemon = steps(1, supervisor__log_level=level)
    client = daemon.client()
    for how in ("save", "load", "clear"):
        args = {"how": how, "value": "a thing"}
        client.submit("steps.keep", args).result(timeout=30)
    client.submit("steps.speak", {"text": "an end"}).result(timeout=30)
    waiting("the worker's words", lambda: "an end" in daemon.log())
    log = daemon.log()
    for words in ("state saved: steps/", "state restored: steps/", "state cleared: steps/"):
        assert (words in log) == (level == "debug"), words
    assert "a thing" not in log


def test_a_state_with_a_key_is_shared_and_survives_a_restart(
    steps: Callable[..., Muster], waiting: Waiting
) -> None:
    daemon = steps(2)
    client = daemon.client()

    def keep(how: str, value: Any = None) -> Any:
        args = {"how": how, "value": value}
        return client.submit("steps.keep", args).result(timeout=30)

    assert keep("load") == "nothing"
    keep("save", {"seen": ["a", "b"], "blob": b"\x00\xff"})
    daemon.kill()
    daemon.start()
    assert keep("load") == {"seen": ["a", "b"], "blob": b"\x00\xff"}
    keep("clear")
    assert keep("load") == "nothing"
    keep("short", 1)
    waiting("its time is over", lambda: keep("load") == "nothing")
    assert keep("place", 7) == "Place(page=7)"


def test_what_cannot_be_kept_is_a_clear_error(steps: Callable[..., Muster]) -> None:
    client = steps(1).client()

    def error(how: str) -> TaskFailed:
        with pytest.raises(TaskFailed) as caught:
            client.submit("steps.keep", {"how": how}).result(timeout=30)
        return caught.value

    unfit = error("object")
    assert "value of type object at state['a'][1]" in str(unfit)
    assert unfit.kind == "permanent"
    assert "over the limit of 1048576" in str(error("large"))
    (text,) = client.submit("steps.keep", {"how": "thread"}).result(timeout=30)
    assert "call it in the handler itself" in text
    text = client.submit("steps.wrong", {"what": "state"}).result(timeout=30)
    assert "await ctx.state.aload()" in text
    text = client.submit("steps.wrong", {"what": "lock"}).result(timeout=30)
    assert "async with ctx.lock" in text


@pytest.mark.parametrize("durability", ["full", "memory"])
def test_coroutines_of_one_handler_save_and_load_at_once(
    steps: Callable[..., Muster], durability: str
) -> None:
    client = steps(1, store__durability=durability).client()
    handle = client.submit("steps.many", {"count": 60})
    assert handle.result(timeout=30) == list(range(60))


# -- locks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hold", "ahold"])
def test_a_lock_is_held_by_one_and_passed_on(
    steps: Callable[..., Muster], waiting: Waiting, method: str
) -> None:
    daemon = steps(2)
    client, gate, told = daemon.client(), daemon.folder / "gate", daemon.folder / "told"
    args = {"name": "one", "gate": str(gate)}
    first = client.submit(f"steps.{method}", {**args, "told": str(told)})
    waiting("the first has it", told.exists)
    with pytest.raises(TaskFailed, match=rf"within 0.1 s: steps/\d \(task {first.id}\) has it"):
        client.submit(f"steps.{method}", {**args, "timeout": 0.1}).result(timeout=30)
    second = client.submit(f"steps.{method}", args)
    gate.touch()
    assert first.result(timeout=30) == first.id
    assert second.result(timeout=30) == second.id


def test_the_lock_of_a_killed_worker_goes_to_who_waits(
    steps: Callable[..., Muster], waiting: Waiting
) -> None:
    daemon = steps(2, pool={"max_crashes": 1})
    client, gate, told = daemon.client(), daemon.folder / "gate", daemon.folder / "told"
    never = str(daemon.folder / "never")
    first = client.submit("steps.hold", {"name": "a", "gate": never, "told": str(told)})
    waiting("the first has it", lambda: told.exists() and told.read_text())
    gate.touch()
    second = client.submit("steps.ahold", {"name": "a", "gate": str(gate)})
    waiting("the second runs", lambda: second.status(timeout=10).state == "running")
    slot = next(w for w in daemon.pool("steps").workers if w.task_id == first.id)
    os.kill(slot.pid, signal.SIGKILL)
    assert second.result(timeout=30) == second.id
    with pytest.raises(TaskFailed, match="quarantined"):
        first.result(timeout=30)


def test_a_cancelled_wait_and_a_timeout_let_go(
    steps: Callable[..., Muster], waiting: Waiting
) -> None:
    daemon = steps(3)
    client, gate, told = daemon.client(), daemon.folder / "gate", daemon.folder / "told"
    args = {"name": "a", "gate": str(gate)}
    first = client.submit("steps.hold", {**args, "told": str(told)})
    waiting("the first has it", told.exists)
    second = client.submit("steps.hold", args, timeout=0.3, max_retries=0)
    third = client.submit("steps.ahold", args)
    waiting("the third waits", lambda: third.status(timeout=10).state == "running")
    with pytest.raises(TaskFailed, match="ran longer than its timeout") as caught:
        second.result(timeout=30)
    assert caught.value.kind == "timeout"
    third.cancel()
    assert third.outcome(timeout=30).state == "cancelled"
    gate.touch()
    assert first.result(timeout=30) == first.id
    assert client.submit("steps.hold", args).result(timeout=30)


def test_a_task_that_takes_its_own_lock_again_is_told_so(steps: Callable[..., Muster]) -> None:
    client = steps(1).client()
    assert "would wait for itself" in client.submit("steps.again").result(timeout=30)


def test_a_lock_keeps_what_it_guards_whole(steps: Callable[..., Muster]) -> None:
    daemon = steps(4)
    path = daemon.folder / "number"
    path.write_text("0")
    client = daemon.client()
    args = {"path": str(path), "times": 25}
    for handle in [client.submit("steps.count", args) for _ in range(4)]:
        handle.result(timeout=60)
    assert path.read_text() == "100"


# -- progress -----------------------------------------------------------------------------------


def test_progress_is_seen_by_the_client_and_in_status(
    steps: Callable[..., Muster], waiting: Waiting
) -> None:
    daemon = steps(1)
    client, gate = daemon.client(), daemon.folder / "gate"
    handle = client.submit("steps.tell", {"gate": str(gate)})
    notes = []
    for note in handle.progress(timeout=30):
        notes.append((note.fraction, note.text))
        if note.text == "step 999":
            view = handle.status(timeout=10)
            assert (view.progress, view.progress_text) == (0.999, "step 999")
            shown = daemon.ctl("task", handle.id)
            assert "99%" in shown.stdout
            assert "step 999" in shown.stdout
            gate.touch()
    assert notes[-1] == (1.0, "done")
    assert len(notes) < 50, "a thousand words within a moment are not a thousand messages"
    assert handle.result(timeout=30) == "over"


def test_progress_is_an_event(steps: Callable[..., Muster], waiting: Waiting) -> None:
    daemon = steps(1)
    client, gate = daemon.client(), daemon.folder / "gate"
    gate.touch()
    handle = client.submit("steps.tell", {"gate": str(gate)})
    handle.result(timeout=30)
    recent = daemon.ask(rpc.Events(follow=False))["recent"]
    mine = [each for each in recent if each.get("event") == "task.progress"]
    assert mine
    assert {each["task"] for each in mine} == {handle.id}


def test_the_async_client_and_async_handlers_have_progress_too(
    steps: Callable[..., Muster],
) -> None:
    daemon = steps(1)
    gate = daemon.folder / "gate"

    async def run() -> list[tuple[float, str]]:
        async with AsyncClient(daemon.tasks_socket) as client:
            handle = await client.submit("steps.atell", {"gate": str(gate)})
            notes = []
            async for note in handle.progress(timeout=30):
                notes.append((note.fraction, note.text))
                gate.touch()
            assert await handle.result() == "over"
            return notes

    assert asyncio.run(run()) == [(0.5, "half"), (1.0, "done")]


def test_a_thread_of_a_handler_has_progress_too(steps: Callable[..., Muster]) -> None:
    daemon = steps(1)
    client, gate = daemon.client(), daemon.folder / "gate"
    handle = client.submit("steps.tell_from_thread", {"gate": str(gate)})
    for note in handle.progress(timeout=30):
        assert (note.fraction, note.text) == (0.3, "thread")
        gate.touch()
    assert handle.result(timeout=30) == "over"


def test_a_watcher_sees_progress(steps: Callable[..., Muster]) -> None:
    daemon = steps(1)
    gate = daemon.folder / "gate"
    handle = daemon.client().submit("steps.atell", {"gate": str(gate)})
    for _ in handle.progress(timeout=30):
        break
    watched = daemon.client().task(handle.id)
    notes = []
    for note in watched.progress(timeout=30):
        notes.append(note.text)
        gate.touch()
    assert notes == ["half", "done"]
    assert json.loads(daemon.ctl("task", handle.id, "--json").stdout)["state"] == "succeeded"


def test_musterctl_shows_progress_on_a_terminal(steps: Callable[..., Muster]) -> None:
    daemon = steps(1)
    gate = daemon.folder / "gate"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket]
    with subprocess.Popen(
        [*command, "submit", "steps.atell", f"gate={gate}", "--wait"],
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        assert process.stdout is not None
        shown = b""
        while b"50% half" not in shown:
            shown += os.read(ours, 1000)
        gate.touch()
        assert process.stdout.read() == b"over\n"
        assert process.wait(20) == 0
    os.close(ours)
