"""With an unreadable store, no client waits forever: each hears an error or asks again."""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.wire.codec import decode_server, encode
from musterd.ipc.wire.messages import (
    PROTOCOL,
    SUCCEEDED,
    Accepted,
    Fault,
    Hello,
    Results,
    Submit,
    TaskSpec,
    Watch,
    Welcome,
)
from musterd.ipc.wire.zmtp import Connection
from musterd.supervisor.api import rpc
from support.daemon import Jobs, Muster, Musters
from support.waiting import wait_for

SECONDS = 60.0


@contextlib.contextmanager
def unreadable(daemon: Muster, table: str = "finished") -> Iterator[None]:
    """Damage a table: reads of it fail until the table is back."""
    path = next(Path(daemon.state).rglob("*.db"))
    with contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
        connection.execute(f"ALTER TABLE {table} RENAME TO hidden")
        try:
            yield
        finally:
            connection.execute(f"ALTER TABLE hidden RENAME TO {table}")


class Dealer:
    """A client of tasks.sock that hears every message."""

    def __init__(self, path: str) -> None:
        self.connection = Connection(path)
        self.over = False
        self.heard: list[Any] = []
        self.until(lambda: self.connection.ready)
        self.say(Hello(PROTOCOL))
        self.wait(Welcome)

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.connection.put(encode(message))
        self.connection.flush()

    def until(self, condition: Callable[[], Any]) -> None:
        def met() -> Any:
            value = condition()
            if not value:
                assert not self.over, f"put out; heard: {self.heard}"
                self._listen()
            return value

        wait_for("it is heard", met)

    def _listen(self) -> None:
        try:
            self.heard += [decode_server(each) for each in self.connection.receive() if each]
        except ConnectionResetError:
            self.over = True

    def wait(self, kind: type) -> Any:
        self.until(lambda: any(isinstance(each, kind) for each in self.heard))
        return next(each for each in self.heard if isinstance(each, kind))


@pytest.fixture
def dealer(jobs: Jobs) -> Iterator[Callable[[], Dealer]]:
    daemon = jobs(size=1)
    made: list[Dealer] = []

    def make() -> Dealer:
        made.append(Dealer(daemon.tasks_socket))
        return made[-1]

    make.daemon = daemon  # type: ignore[attr-defined]
    yield make
    for each in made:
        each.connection.close()


def test_a_repeated_submit_is_told_that_it_cannot_be_answered_and_asked_again(dealer: Any) -> None:
    submit = Submit(1, [TaskSpec("repeated", "jobs.echo", b"\x80")], resend=True)
    first = dealer()
    with unreadable(dealer.daemon):
        first.say(submit)
        assert "store cannot be read" in first.wait(Fault).reason
    second = dealer()
    second.say(submit)
    assert second.wait(Accepted).rejected == []
    assert [each.state for each in second.wait(Results).outcomes] == [SUCCEEDED]


def test_a_result_that_cannot_be_read_is_not_silently_left_out(dealer: Any) -> None:
    first = dealer()
    first.say(Submit(1, [TaskSpec("one", "jobs.echo", b"\x80")]))
    first.wait(Results)
    second = dealer()
    with unreadable(dealer.daemon):
        second.say(Watch(["one"]))
        assert "store cannot be read" in second.wait(Fault).reason
    third = dealer()
    third.say(Watch(["one"]))
    assert [each.id for each in third.wait(Results).outcomes] == ["one"]


@pytest.mark.parametrize(
    "params",
    [
        rpc.GetTask(id="nobody"),
        rpc.ListDead(),
        rpc.PurgeTasks(ids=["nobody"]),
        rpc.CancelTasks(ids=["nobody"]),
        rpc.SubmitTask(id="new", name="jobs.echo", wait=True),
    ],
)
def test_a_caller_is_told_that_the_store_cannot_be_read(jobs: Jobs, params: Any) -> None:
    daemon = jobs(size=1)
    with unreadable(daemon), pytest.raises(rpc.RpcError, match="store cannot be read"):
        daemon.ask(params)


def test_a_retry_by_hand_is_told_that_the_store_cannot_be_read(jobs: Jobs) -> None:
    daemon = jobs(size=1)
    with unreadable(daemon):
        found = daemon.ask(rpc.RetryTasks(ids=["nobody"]))
    assert [each["code"] for each in found["refused"]] == ["NotKnown"]


READER = """
from musterd import Worker, task

class Reader(Worker):
    @task(max_retries=0)
    def load(self, ctx) -> object:
        try:
            return ctx.state.load()
        except Exception as error:
            return str(error)
"""


def test_a_handler_is_told_that_its_state_cannot_be_read(muster: Musters) -> None:
    daemon = muster({"jobs": {"worker": "reader:Reader", "size": 1}}, start=False)
    Path(daemon.folder, "reader.py").write_text(READER)
    daemon.start()
    with unreadable(daemon, "facts"):
        found = daemon.client().submit("jobs.load").result(timeout=SECONDS)
    assert "store cannot be read" in found
