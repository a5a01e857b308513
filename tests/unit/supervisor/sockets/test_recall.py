"""Questions of clients for results of schedules, answered by what the schedule has kept."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.messages import History
from musterd.supervisor.core.model.watching import Kept, Watched
from musterd.supervisor.sockets.peers import HistoryWanted
from musterd.supervisor.sockets.recall import recall
from musterd.supervisor.store.interface import FindFacts
from musterd.supervisor.store.requests import BUSY


class Desk:
    """A shell with one schedule, and a port of clients that notes its answers."""

    def __init__(self) -> None:
        watched = Watched(history=[Kept(number, 1) for number in range(3, 9)])
        schedule = SimpleNamespace(record=SimpleNamespace(watched=watched))
        self.fleet = SimpleNamespace(schedules={"kites": schedule})
        self.store_requests = self
        self.full = False
        self.readable = True
        self.answers: list[tuple[list[int], str, bool]] = []

    def ask(self, query: FindFacts, found: Any, otherwise: Any) -> None:
        assert query.kind == "history"
        values = [
            msgspec.msgpack.encode(HistoryEntry(int(key.removeprefix("kites.")), 0, "", "", b""))
            for key in query.keys
        ]
        if self.readable:
            found([*values, None])
        else:
            otherwise()

    def recall(
        self, _: Any, entries: list[HistoryEntry], error: str = "", *, unknown: bool = False
    ) -> None:
        self.answers.append(([each.number for each in entries], error, unknown))


@pytest.fixture
def desk() -> Any:
    return Desk()


@pytest.mark.parametrize(
    ("question", "numbers"),
    [
        (History(1, "kites"), [3, 4, 5, 6, 7, 8]),
        (History(1, "kites", 2), [7, 8]),
        (History(1, "kites", numbers=[1, 8, 4]), [4, 8]),  # 1 is not kept any more
    ],
)
def test_the_newest_are_found_or_those_of_the_numbers(
    desk: Any, question: History, numbers: list[int]
) -> None:
    recall(desk, desk, HistoryWanted(1, question))
    assert desk.answers == [(numbers, "", False)]


def test_who_cannot_be_answered_is_told_why(desk: Any) -> None:
    recall(desk, desk, HistoryWanted(1, History(1, "boats")))
    desk.readable = False
    recall(desk, desk, HistoryWanted(2, History(1, "kites")))
    desk.full = True
    recall(desk, desk, HistoryWanted(3, History(1, "kites")))
    assert desk.answers[0] == ([], "there is no schedule 'boats'", True)
    assert desk.answers[1][1].startswith("the store cannot be read")
    assert desk.answers[2] == ([], BUSY, False)
