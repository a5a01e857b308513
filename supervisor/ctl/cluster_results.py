"""What `musterctl --cluster changes` and `musterctl --cluster history` show."""

from zoneinfo import ZoneInfo

from musterd.ipc.wire.history import HistoryEntry
from musterd.supervisor.api import rpc
from musterd.supervisor.api.history import Answer, ChangeList, HistoryList
from musterd.supervisor.api.rpc import NO_SUCH_NAME, RpcError
from musterd.supervisor.cluster.engine import Engine
from musterd.supervisor.core.model.shared import schedule_of
from musterd.supervisor.ctl.cluster_schedules import known_names


def changes(engine: Engine, asked: rpc.ListChanges) -> ChangeList:
    """Return the newest changes that history keeps, of one schedule or all, oldest first."""
    if asked.name:
        _found(engine, asked.name, limit=1)
    answer, items = Answer(), []
    for each in engine.changed(asked.name, asked.limit):  # the newest first, while there is room
        items.append(answer.change(each.schedule, _pool(each.plan), each.before, each.after))
    return ChangeList(changes=items[::-1])


def history(engine: Engine, asked: rpc.ShowHistory) -> HistoryList:
    answer = Answer()
    entries = _found(engine, asked.name, limit=asked.limit)
    items = [answer.entry(entry) for entry in reversed(entries)]
    return HistoryList(schedule=asked.name, entries=items[::-1])


def _found(engine: Engine, name: str, *, limit: int) -> list[HistoryEntry]:
    entries = engine.history(name, limit=limit)
    if entries is None:
        raise RpcError(NO_SUCH_NAME, f"no such schedule: {name!r}: {known_names(engine)}")
    return entries


def _pool(plan: bytes) -> str:
    try:
        return schedule_of(plan, ZoneInfo).task.partition(".")[0]
    except ValueError:  # of a newer musterd
        return ""
