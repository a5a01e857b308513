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
LISTED = rpc.LIST_MAX  # changes of a schedule: more than its history keeps
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
            missing: dict[str, list[int]] = {}  # places of changes by schedule
            for place, change in enumerate(self._message.changes):
                if place < ASKED_MAX or not change.summary:
                    if change.cut and change.number:
                        missing.setdefault(change.schedule, []).append(place)
                    self._ask_url(asking, place, change.task)
            for schedule, places in missing.items():
                self._ask_results(asking, schedule, places)
        self._asked_all = True
        if not self._waiting:
            self.finish()

    def _ask_results(self, asking: Asking, schedule: str, places: list[int]) -> None:
        """Ask once for all changes of a schedule: the answer may be large."""

        def results(answer: Raw) -> None:
            found = {
                item.number: item for item in msgspec.json.decode(answer, type=ChangeList).changes
            }
            for place in places:
                change = self._message.changes[place]
                item = found.get(change.number)
                if item is not None and abs(item.at - change.at) < SAME_SECONDS:
                    self._put(place, structs.replace(change_of(item), url=change.url))
                    if not change.task:  # found in the list, which does not say
                        self._ask_url(asking, place, item.task)
            self._answered()

        self._waiting += 1
        asking.ask(rpc.ListChanges(name=schedule, limit=LISTED), results)

    def _ask_url(self, asking: Asking, place: int, task: str) -> None:
        def url(answer: Raw) -> None:
            args = msgspec.json.decode(answer, type=TaskStatus).args
            value = args.get(URL) if isinstance(args, dict) else None
            known = self._message.changes[place]
            found = value if isinstance(value, str) else ""
            self._put(place, structs.replace(known, url=found))
            self._answered()

        if self._urls and task and not asking.gone:
            self._waiting += 1
            asking.ask(rpc.GetTask(id=task, value=False), url)

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
