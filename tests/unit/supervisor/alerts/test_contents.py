"""What a message asks of the daemon before it is sent: results of changes, addresses of pages."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from musterd.supervisor.alerts.changes import SAME_SECONDS, Change
from musterd.supervisor.alerts.contents import ASKED_MAX, Contents
from musterd.supervisor.alerts.rules import Message
from musterd.supervisor.api import rpc
from musterd.supervisor.api.history import ChangeItem, ChangeList
from musterd.supervisor.api.status import TaskStatus


class Daemon:
    """The connection to the daemon, which answers when the test says so."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone
        self.asked: list[tuple[rpc.Params, Callable[[Raw], None]]] = []

    def ask(self, params: rpc.Params, then: Callable[[Raw], None]) -> None:
        self.asked.append((params, then))

    @property
    def questions(self) -> list[str]:
        return [
            each.name if isinstance(each, rpc.ListChanges) else each.id  # type: ignore[attr-defined]
            for each, _ in self.asked
        ]

    def answer(self, value: Any) -> None:
        _, then = self.asked.pop(0)
        then(Raw(msgspec.json.encode(value)))


def cut(number: int, schedule: str = "kites", task: str = "t", at: float = 9.0) -> Change:
    return Change(schedule, number, at, task, summary="price 2 → 1", cut=True, url="old")


def item(number: int, after: int, at: float = 9.0, task: str = "t") -> ChangeItem:
    return ChangeItem(
        schedule="kites", at=at, task=task, number=number, digest="d", before=0, after=after
    )


def asked(
    daemon: Daemon | None, *changes: Change, urls: bool = False
) -> tuple[Contents, list[Message]]:
    sent: list[Message] = []
    contents = Contents(Message("me", 1, 0.0, changes=list(changes)), 5, sent.append, urls=urls)
    contents.ask(daemon)  # type: ignore[arg-type]
    return contents, sent


@pytest.mark.parametrize("daemon", [None, Daemon(gone=True), Daemon()])
def test_a_message_that_lacks_nothing_or_can_ask_nobody_is_sent_at_once(
    daemon: Daemon | None,
) -> None:
    changes = [cut(1)] if daemon is None or daemon.gone else [Change("kites", 1, task="t"), cut(0)]
    _, [sent] = asked(daemon, *changes, urls=daemon is not None and daemon.gone)
    assert sent.changes == changes
    assert daemon is None or not daemon.asked


def test_each_schedule_is_asked_once_and_the_message_waits_for_all() -> None:
    daemon = Daemon()
    _, sent = asked(daemon, cut(3), cut(4), cut(7, "lamps"))
    assert daemon.questions == ["kites", "lamps"]
    daemon.answer(ChangeList(changes=[item(2, 2), item(3, 3), item(4, 4)]))
    assert sent == []
    daemon.answer(ChangeList(changes=[]))
    [message] = sent
    assert [each.after for each in message.changes] == [3, 4, None]
    assert [each.cut for each in message.changes] == [False, False, True]
    assert [each.url for each in message.changes] == ["old"] * 3


def test_a_change_of_another_time_is_another_change() -> None:
    daemon = Daemon()
    _, sent = asked(daemon, cut(3), cut(4), cut(5))
    later, earlier = 9.0 + 2 * SAME_SECONDS, 9.0 - 2 * SAME_SECONDS
    nearly = 9.0 + SAME_SECONDS / 2
    found = [item(3, 3, at=later), item(4, 4, at=earlier), item(5, 5, at=nearly)]
    daemon.answer(ChangeList(changes=found))
    assert [each.after for each in sent[0].changes] == [None, None, 5]


def test_the_address_of_the_page_is_an_argument_of_the_run() -> None:
    daemon = Daemon()
    changes = [Change("kites", number, task=f"t{number}") for number in (1, 2, 3)]
    _, sent = asked(daemon, *changes, urls=True)
    assert daemon.questions == ["t1", "t2", "t3"]
    for args in ({"url": "https://shop.example/"}, {"url": {"$secret": "A"}}, ["url"]):
        daemon.answer(TaskStatus(id="t", name="p.x", state="succeeded", args=args))
    assert [each.url for each in sent[0].changes] == ["https://shop.example/", "", ""]


def test_the_run_of_a_change_that_was_found_in_the_list_is_known_with_its_results() -> None:
    daemon = Daemon()
    _, sent = asked(daemon, cut(3, task=""), urls=True)
    assert daemon.questions == ["kites"]
    daemon.answer(ChangeList(changes=[item(3, 3, task="run")]))
    assert (daemon.questions, sent) == (["run"], [])
    args = {"url": "https://shop.example/"}
    daemon.answer(TaskStatus(id="run", name="p.x", state="succeeded", args=args))
    [change] = sent[0].changes
    assert (change.task, change.after, change.url) == ("run", 3, "https://shop.example/")


def test_of_many_changes_the_first_are_asked_for_and_those_without_a_summary() -> None:
    daemon = Daemon()
    many = [cut(number + 1, f"s{number}") for number in range(ASKED_MAX + 2)]
    bare = msgspec.structs.replace(cut(1, "bare"), summary="")
    asked(daemon, *many, bare)
    assert daemon.questions == [*(f"s{number}" for number in range(ASKED_MAX)), "bare"]


def test_a_message_that_waited_long_enough_is_sent_once_with_what_has_come() -> None:
    daemon = Daemon()
    contents, sent = asked(daemon, cut(3), cut(4, "lamps"))
    daemon.answer(ChangeList(changes=[item(3, 3)]))
    contents.finish()
    daemon.answer(ChangeList(changes=[]))
    [message] = sent
    assert [each.after for each in message.changes] == [3, None]
