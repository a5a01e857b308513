"""Commands about schedules on control.sock: list, get, put, delete, run, pause, resume."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from musterd.ipc.wire.messages import Rejection
from musterd.ipc.wire.schedule_messages import (
    SECTION_BYTES_MAX,
    ScheduleView,
)
from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.rpc import INVALID_PARAMS, NO_SUCH_NAME, RpcError
from musterd.supervisor.api.status import (
    CommandResult,
    RefusedSchedule,
    ScheduleKeys,
    ScheduleList,
    SchedulesPut,
    ScheduleStatus,
)
from musterd.supervisor.control.answers import LaterAnswers, Methods, Pending
from musterd.supervisor.core.model import schedule_events
from musterd.supervisor.shell import Shell
from musterd.supervisor.views.schedules import find_schedule, list_schedules, section_keys

NAMES_SHOWN_MAX = 20  # in the message that a schedule is not known
SCHEDULES_LISTED_MAX = 500  # of one answer, which takes some milliseconds of the loop's time


class ScheduleCommands:
    def __init__(self, shell: Shell, answers: LaterAnswers) -> None:
        self._shell = shell
        self._answers = answers

    def methods(self) -> Methods:
        return {
            rpc.ListSchedules: self._list,
            rpc.GetSchedule: self._get,
            rpc.PutSchedule: self._put,
            rpc.PutSchedules: self._put_many,
            rpc.DeleteSchedule: self._delete,
            rpc.RunSchedule: self._run,
            rpc.PauseSchedule: lambda params: self._pause(params.name, True),
            rpc.ResumeSchedule: lambda params: self._pause(params.name, False),
        }

    def _list(self, params: rpc.ListSchedules) -> ScheduleList:
        views, more = list_schedules(
            self._shell.fleet,
            self._shell.now_ns(),
            after=params.after,
            limit=SCHEDULES_LISTED_MAX,
            state=params.state,
        )
        return ScheduleList(schedules=[_status(each) for each in views], more=more)

    def _get(self, params: rpc.GetSchedule) -> ScheduleKeys:
        view = self._found(params.name)
        return ScheduleKeys(
            keys=section_keys(view.section), **msgspec.structs.asdict(_status(view))
        )

    def _put(self, params: rpc.PutSchedule) -> Pending:
        section = _section(params.name, params.keys)
        if why := _too_long(params.name, section):
            raise RpcError(INVALID_PARAMS, why)
        puts = [(params.name, section)]
        return self._ask(params.name, lambda token: self._shell.put_schedules(puts, token))

    def _put_many(self, params: rpc.PutSchedules) -> Pending:
        puts = [(each.name, _section(each.name, each.keys)) for each in params.schedules]
        long = {name: why for name, section in puts if (why := _too_long(name, section))}
        refused = [RefusedSchedule(name=name, why=why) for name, why in long.items()]

        def acknowledged(rejected: list[Rejection]) -> None:
            told = [RefusedSchedule(name=each.id, why=each.message) for each in rejected]
            pending.resolve(SchedulesPut(refused=refused + told))

        token, pending = self._answers.begin(acknowledged)
        self._shell.put_schedules(
            [(name, section) for name, section in puts if name not in long],
            token,
            paused=frozenset(each.name for each in params.schedules if each.paused),
            replace=params.replace,
            dry_run=params.dry_run,
        )
        return pending

    def _delete(self, params: rpc.DeleteSchedule) -> Pending:
        def acknowledged(rejected: list[Rejection]) -> None:
            if rejected:
                pending.fail(convert.rejected(rejected[0]))
            else:
                pending.resolve(CommandResult())

        self._found(params.name)
        token, pending = self._answers.begin(acknowledged)
        self._shell.feed(schedule_events.ScheduleDeleteRequested([params.name], token))
        return pending

    def _run(self, params: rpc.RunSchedule) -> Pending:
        return self._change(
            params.name, lambda token: schedule_events.ScheduleRunRequested(params.name, token)
        )

    def _pause(self, name: str, paused: bool) -> Pending:
        return self._change(
            name, lambda token: schedule_events.SchedulePauseRequested(name, paused, token)
        )

    def _change(self, name: str, make: Callable[[bytes], object]) -> Pending:
        view = self._found(name)
        if name not in self._shell.fleet.schedules:
            raise RpcError(rpc.FAILED, f"schedule {name!r} cannot be used: {view.problem}")
        return self._ask(name, lambda token: self._shell.feed(make(token)))

    def _ask(self, name: str, ask: Callable[[bytes], None]) -> Pending:
        """Ask the core about a schedule; answer with what has become of it."""

        def acknowledged(rejected: list[Rejection]) -> None:
            if rejected:
                pending.fail(convert.rejected(rejected[0]))
                return
            try:
                pending.resolve(_status(self._found(name)))
            except RpcError as error:  # it was removed meanwhile
                pending.fail(error)

        token, pending = self._answers.begin(acknowledged)
        ask(token)
        return pending

    def _found(self, name: str) -> ScheduleView:
        """Return a schedule; RpcError if there is none of this name."""
        view = find_schedule(self._shell.fleet, name, self._shell.now_ns())
        if view is None:
            raise no_such_schedule(self._shell, name)
        return view


def _section(name: str, keys: dict[str, Any]) -> bytes:
    """Return the keys of a schedule as they are stored; RpcError for what cannot be."""
    try:
        return msgspec.msgpack.encode(keys)
    except OverflowError:
        why = "a number has more than 64 bits"
        raise RpcError(INVALID_PARAMS, f"schedule {name!r}: {why}: give it as text") from None


def _too_long(name: str, section: bytes) -> str:
    if len(section) <= SECTION_BYTES_MAX:
        return ""
    why = f"the keys take {len(section)} bytes, and {SECTION_BYTES_MAX} at most"
    return f"schedule {name!r}: {why}: shorten its args"


def _status(view: ScheduleView) -> ScheduleStatus:
    return ScheduleStatus(
        name=view.name,
        state=view.state,
        task=view.task,
        when=view.when,
        next_at=view.next_ns / 1e9 or None,
        last_at=view.last_ns / 1e9 or None,
        last_task=view.last_task,
        last_state=view.last_state,
        runs=view.runs,
        skipped=view.skipped,
        skipped_why=view.skipped_why,
        origin=view.origin,
        problem=view.problem,
        failures=view.failures,
        stale=view.stale,
    )


def no_such_schedule(shell: Shell, name: str) -> RpcError:
    names = list(islice(shell.fleet.schedules, NAMES_SHOWN_MAX + 1))
    known = ", ".join(names[:NAMES_SHOWN_MAX]) or "none"
    more = " and others" if len(names) > NAMES_SHOWN_MAX else ""
    why = f"no such schedule: {name!r}: there are {known}{more}"
    if any(pool.policy.clustered for pool in shell.fleet.pools.values()):
        why += "; those that all nodes share: use --cluster"
    return RpcError(NO_SUCH_NAME, why)
