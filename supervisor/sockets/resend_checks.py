"""Repeated submits that wait for the store to say which of their tasks it knows.

Theory of operation. A repeated submit is kept here, whole, until the store has answered. While the
store's reader is slow, clients lose patience or their connections and send the same submits again.
The submits of a connection that is over are given up at once: nothing was promised, and the client
asks again. So the submits that wait are bounded by what the present connections may have under way
(core/tasks/client_limits.py). The store is asked few questions at a time, because none can be taken
back.
"""

from collections.abc import Callable
from itertools import count

from musterd.supervisor.core.model import events
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import FindTasks, StoredTask

ASKED_MAX = 100  # with the store at a time: some milliseconds of its work


class ResendChecks:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._numbers = count(1)
        self._kept: dict[int, events.TasksSubmitted] = {}  # until they are answered or given up
        self._waiting: dict[int, None] = {}  # those that the store was not asked about yet
        self._of_peers: dict[bytes, dict[int, None]] = {}
        self._asked = 0

    def __len__(self) -> int:
        return len(self._kept)

    def check(self, submitted: events.TasksSubmitted) -> None:
        """Ask the store; answer with ResendChecked or ResendUnknown."""
        number = next(self._numbers)
        self._kept[number] = submitted
        self._waiting[number] = None
        self._of_peers.setdefault(submitted.peer, {})[number] = None
        self._ask_next()

    def give_up(self, peer: bytes) -> None:
        """Give up the submits of a connection that is over."""
        for number in self._of_peers.pop(peer, ()):
            self._waiting.pop(number, None)
            self._shell.feed(events.ResendUnknown(self._kept.pop(number)))

    def _ask_next(self) -> None:
        while self._waiting and self._asked < ASKED_MAX:
            number = next(iter(self._waiting))
            del self._waiting[number]
            self._asked += 1
            ids = [spec.id for spec in self._kept[number].tasks]
            found, unknown = self._answers(number)
            self._shell.store_requests.ask(FindTasks(ids), found, unknown)

    def _answers(
        self, number: int
    ) -> tuple[Callable[[list[StoredTask]], None], Callable[[], None]]:
        def found(stored: list[StoredTask]) -> None:
            submitted = self._take(number)
            if submitted is not None:
                ended = {each.spec.id for each in stored if each.outcome is not None}
                known = {each.spec.id: each.spec for each in stored}
                live = frozenset(known.keys() - ended)
                self._shell.feed(events.ResendChecked(submitted, frozenset(ended), live, known))
            self._ask_next()

        def unknown() -> None:
            submitted = self._take(number)
            if submitted is not None:
                self._shell.feed(events.ResendUnknown(submitted))
            self._ask_next()

        return found, unknown

    def _take(self, number: int) -> events.TasksSubmitted | None:
        """Return the submit that the store has answered; None if it was given up meanwhile."""
        self._asked -= 1
        submitted = self._kept.pop(number, None)
        if submitted is not None:
            of_peer = self._of_peers[submitted.peer]
            del of_peer[number]
            if not of_peer:
                del self._of_peers[submitted.peer]
        return submitted
