"""Commands about results of schedules on control.sock: changes, history."""

import heapq

from musterd.supervisor.api import rpc
from musterd.supervisor.api.history import Answer, ChangeItem, ChangeList, HistoryList
from musterd.supervisor.control.answers import Methods, Pending
from musterd.supervisor.control.commands.schedules import no_such_schedule
from musterd.supervisor.core.model.watching import HISTORY, Kept, history_key
from musterd.supervisor.core.tasks.schedule import Schedule
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import FindFacts
from musterd.supervisor.views.history import entries_of


class HistoryCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def methods(self) -> Methods:
        return {rpc.ListChanges: self._changes, rpc.ShowHistory: self._history}

    def _changes(self, params: rpc.ListChanges) -> Pending | ChangeList:
        schedules = self._shell.fleet.schedules
        named = {params.name: self._known(params.name)} if params.name else schedules
        changed: list[tuple[str, Kept]] = [
            (name, kept)
            for name, schedule in named.items()
            for kept in schedule.record.watched.history
            if kept.changed_ns
        ]
        newest = heapq.nlargest(params.limit, changed, key=lambda each: each[1].changed_ns)[::-1]
        pools = {name: named[name].policy.task.partition(".")[0] for name, _ in newest}
        if params.brief:
            return ChangeList(
                changes=[
                    ChangeItem(
                        schedule=name,
                        at=kept.changed_ns / 1e9,
                        task="",
                        number=kept.number,
                        digest="",
                        cut=True,
                        pool=pools[name],
                    )
                    for name, kept in newest
                ]
            )
        keys = [
            history_key(name, number)
            for name, kept in newest
            for number in (kept.before, kept.number)
        ]

        def found(values: list[bytes | None]) -> None:
            entries, answer = entries_of(values), Answer()
            items = []
            for place in reversed(range(len(newest))):
                before, after = entries[2 * place : 2 * place + 2]
                if after is not None:  # else it was trimmed meanwhile
                    name = newest[place][0]
                    items.append(answer.change(name, pools[name], before, after))
            pending.resolve(ChangeList(changes=items[::-1]))

        pending = Pending()
        self._shell.store_requests.ask(FindFacts(HISTORY, keys), found, pending.unreadable)
        return pending

    def _history(self, params: rpc.ShowHistory) -> Pending:
        kept = self._known(params.name).record.watched.history[-params.limit :]

        def found(values: list[bytes | None]) -> None:
            answer = Answer()
            newest_first = [entry for entry in entries_of(values)[::-1] if entry is not None]
            items = [answer.entry(entry) for entry in newest_first]
            pending.resolve(HistoryList(schedule=params.name, entries=items[::-1]))

        pending = Pending()
        keys = [history_key(params.name, each.number) for each in kept]
        self._shell.store_requests.ask(FindFacts(HISTORY, keys), found, pending.unreadable)
        return pending

    def _known(self, name: str) -> Schedule:
        schedules = self._shell.fleet.schedules
        if name not in schedules:
            raise no_such_schedule(self._shell, name)
        return schedules[name]
