"""Ask the daemon for what a message leaves out: results of changes, and addresses of pages."""

from collections.abc import Callable

import msgspec
from msgspec import Raw, structs

from musterd.supervisor.alerts.changes import SAME_SECONDS, Change
from musterd.supervisor.alerts.link import Asking
from musterd.supervisor.alerts.rules import Message
from musterd.supervisor.api import rpc
from musterd.supervisor.api.history import ChangeItem, ChangeList
from musterd.supervisor.api.status import TaskStatus

WAIT_NS = 5_000_000_000  # for an answer; the message is then sent without
ASKED_MAX = 10  # large results of a message: one has up to 512 KiB, and a phone shows few
LISTED = 20  # newest changes of a schedule: older ones have no content any more
URL = "url"  # argument and placeholder


class Contents:
    """A message whose content is being asked for."""

    def __init__(
        self, message: Message, deadline_ns: int, then: Callable[[Message], None], *, urls: bool
    ) -> None:
        self._message = message
        self._then = then
        self._urls = urls
        self._waiting = 0
        self._over = False
        self._asked_all = False
        self.deadline_ns = deadline_ns

    def ask(self, asking: Asking | None) -> None:
        """Ask for what is missing; `then` gets the message at once if there is nothing to ask."""
        if asking is not None and not asking.gone:
            for place, change in enumerate(self._message.changes):
                if place < ASKED_MAX or not change.summary:
                    self._ask_for(asking, place, change)
        self._asked_all = True
        if not self._waiting:
            self.finish()

    def _ask_for(self, asking: Asking, place: int, change: Change) -> None:
        def results(answer: Raw) -> None:
            for item in msgspec.json.decode(answer, type=ChangeList).changes:
                if item.number == change.number and abs(item.at - change.at) < SAME_SECONDS:
                    known = self._message.changes[place]
                    self._put(place, structs.replace(change_of(item), url=known.url))
                    if not change.task:  # found in the list, which does not say
                        ask_url(item.task)
            self._answered()

        def url(answer: Raw) -> None:
            args = msgspec.json.decode(answer, type=TaskStatus).args
            value = args.get(URL) if isinstance(args, dict) else None
            known = self._message.changes[place]
            found = value if isinstance(value, str) else ""
            self._put(place, structs.replace(known, url=found))
            self._answered()

        def ask_url(task: str) -> None:
            if self._urls and task and not asking.gone:
                self._waiting += 1
                asking.ask(rpc.GetTask(id=task, value=False), url)

        if change.cut and change.number:
            self._waiting += 1
            asking.ask(rpc.ListChanges(name=change.schedule, limit=LISTED), results)
        ask_url(change.task)

    def _put(self, place: int, change: Change) -> None:
        changes = list(self._message.changes)
        changes[place] = change
        self._message = structs.replace(self._message, changes=changes)

    def _answered(self) -> None:
        self._waiting -= 1
        if not self._waiting and self._asked_all:
            self.finish()

    def finish(self) -> None:
        """Hand over the message with what has come so far."""
        if not self._over:
            self._over = True
            self._then(self._message)


def change_of(item: ChangeItem) -> Change:
    return Change(
        item.schedule,
        item.number,
        item.at,
        item.task,
        item.digest,
        item.summary,
        item.before,
        item.after,
        item.cut,
        item.pool,
    )
