"""Commands about results of schedules on control.sock: changes, history."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

from musterd.supervisor.api import rpc
from musterd.supervisor.api.history import Answer, ChangeItem, ChangeList, HistoryItem, HistoryList
from musterd.supervisor.control.answers import Methods, Pending
from musterd.supervisor.control.commands.schedules import no_such_schedule
from musterd.supervisor.core.model.watching import HISTORY, Kept, history_key
from musterd.supervisor.core.tasks.schedule import Schedule
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import FindFacts
from musterd.supervisor.views.history import brief_change, entries_of

# Bytes of entries that one turn of the loop reads and compares: some 10 ms of its time.
PART_BYTES_MAX = 512 * 1024
PART_ITEMS_MAX = 50
READ_BYTES_MAX = 32 * 1024 * 1024  # of one answer; what is older has no content

T = TypeVar("T")
Key = tuple[str, int]  # schedule, number
Take = Callable[[list[T], list[bytes | None]], None]


class Reading(Generic[T]):
    """Items whose entries are read in parts, as many as one answer may have."""

    def __init__(
        self, items: list[T], keys: Callable[[T], list[Key]], size: Callable[[Key], int]
    ) -> None:
        self.left = items
        self._keys = keys
        self._size = size
        self._room = READ_BYTES_MAX

    def next_part(self) -> tuple[list[T], list[Key]]:
        """Return the next items and the keys of their entries; none where there is no room."""
        count, size = 0, 0
        for item in self.left[:PART_ITEMS_MAX]:
            size += sum(map(self._size, self._keys(item)))
            if size > self._room or (count and size > PART_BYTES_MAX):
                break
            count += 1
        part, self.left = self.left[:count], self.left[count:]
        keys = [key for item in part for key in self._keys(item)]
        self._room -= sum(map(self._size, keys))
        return part, keys


class HistoryCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def methods(self) -> Methods:
        return {rpc.ListChanges: self._changes, rpc.ShowHistory: self._history}

    def _changes(self, params: rpc.ListChanges) -> Pending | ChangeList:
        schedules = self._shell.fleet.schedules
        named = {params.name: self._known(params.name)} if params.name else schedules
        changed = (
            (name, kept)
            for name, schedule in named.items()
            for kept in schedule.record.watched.history
            if kept.changed_ns
        )
        newest = heapq.nlargest(params.limit, changed, key=lambda each: each[1].changed_ns)
        pools = {name: named[name].policy.task.partition(".")[0] for name, _ in newest}
        sizes = {
            (name, kept.number): kept.size
            for name in pools
            for kept in named[name].record.watched.history
        }
        items: list[ChangeItem] = []

        def take(part: list[tuple[str, Kept]], values: list[bytes | None]) -> None:
            entries = entries_of(values)
            for place, (name, _) in enumerate(part):
                before, after = entries[2 * place : 2 * place + 2]
                if after is not None:  # else it was trimmed meanwhile
                    items.append(answer.change(name, pools[name], before, after))

        def finish(rest: list[tuple[str, Kept]]) -> ChangeList:
            others = [brief_change(name, pools[name], kept) for name, kept in rest]
            return ChangeList(changes=[*items, *others][::-1])

        if params.brief:
            return finish(newest)
        answer = Answer()
        reading = Reading(
            newest,
            lambda each: [(each[0], each[1].before), (each[0], each[1].number)],
            lambda key: sizes.get(key, 0),
        )
        return self._read(reading, take, finish)

    def _history(self, params: rpc.ShowHistory) -> Pending:
        kept = self._known(params.name).record.watched.history[-params.limit :]
        sizes = {each.number: each.size for each in kept}
        answer = Answer()
        items: list[HistoryItem] = []

        def take(_: list[Kept], values: list[bytes | None]) -> None:
            items.extend(answer.entry(each) for each in entries_of(values) if each is not None)

        def finish(_: list[Kept]) -> HistoryList:
            return HistoryList(schedule=params.name, entries=items[::-1])

        reading = Reading(
            kept[::-1], lambda each: [(params.name, each.number)], lambda key: sizes[key[1]]
        )
        return self._read(reading, take, finish)

    def _read(
        self, reading: Reading[T], take: Take[T], finish: Callable[[list[T]], object]
    ) -> Pending:
        """Read entries part by part, so that no turn of the loop takes long."""

        def ask() -> None:
            part, keys = reading.next_part()
            if not part or pending.abandoned:
                pending.resolve(finish(reading.left))
                return

            def found(values: list[bytes | None]) -> None:
                take(part, values)
                ask()

            facts = FindFacts(HISTORY, [history_key(*key) for key in keys])
            self._shell.store_requests.ask_slow(facts, found, pending.unreadable)

        pending = Pending()
        ask()
        return pending

    def _known(self, name: str) -> Schedule:
        schedules = self._shell.fleet.schedules
        if name not in schedules:
            raise no_such_schedule(self._shell, name)
        return schedules[name]
