"""Schedules of a client: put, get, list, delete, run, pause and resume them while the daemon runs.

What a schedule may have is checked by the daemon, as strictly as in a configuration file. Messages
of one call are sent without waiting for each other, and answered after their commit. A message that
is sent again, on another connection, changes nothing: a run has an id that is made here.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec

from musterd.ipc.client.record import Make, Question
from musterd.ipc.client.taskspec import checked_schedule, shown
from musterd.ipc.errors import (
    InvalidSchedule,
    MusterdError,
    QueueFull,
    ScheduleError,
    ShuttingDown,
    StillRunning,
    UnknownSchedule,
    UnknownTask,
)
from musterd.ipc.secrets.reference import JSON_KEY, Secret
from musterd.ipc.wire import schedule_messages as wire
from musterd.ipc.wire.messages import QUEUE_FULL, SHUTTING_DOWN, UNKNOWN_TASK, Rejection
from musterd.ipc.wire.schedule_messages import (
    PUT_BYTES_MAX,
    PUTS_MAX,
    SECTION_BYTES_MAX,
)

if TYPE_CHECKING:
    from musterd.ipc.client.async_client import AsyncClient
    from musterd.ipc.client.async_submit import AsyncTaskHandle
    from musterd.ipc.client.sync_client import Client
    from musterd.ipc.client.sync_submit import TaskHandle

PROBLEMS_SHOWN_MAX = 20  # in the text of an error; `problems` has all
RUN_BITS = 20  # of the id of a run, random: the last millisecond

Seconds = float | timedelta | str  # "5m", or a number of seconds


class ScheduleKeys(TypedDict, total=False):
    """Keys of a schedule, as [[schedule]] of a configuration file has them."""

    task: str  # POOL.METHOD
    args: Mapping[str, Any]  # with Secret("NAME") where `redact` names an argument
    every: Seconds
    cron: str
    timezone: str  # of cron
    priority: str
    jitter: Seconds  # each run waits for a random part of it
    overlap: bool  # a run may begin while the last one is alive
    catch_up: str  # "one", "none" or "all": after a time in which nothing could be run
    enabled: bool
    target: str
    timeout: Seconds
    max_retries: int
    key: str
    cache: Seconds | bool
    debounce: Seconds | bool
    notify: str  # "task.changed"; the keys below say what counts as a change
    watch: list[str]
    ignore: list[str]
    confirm: int
    above: float
    below: float
    by: float | str  # 10, or "5%"
    keep: int
    stale: int
    attach: str
    session: str


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as the daemon sees it; times are seconds since 1970, 0 for none."""

    name: str
    state: str  # "active", "paused", "disabled", or "unusable": see `problem`
    task: str
    when: str  # "every 5m", "*/5 * * * * (Europe/Berlin)"
    keys: dict[str, Any]  # as they were put; {} where the schedule is of a configuration file
    origin: str = ""  # the configuration file that has it; "" where it was put
    problem: str = ""  # why it is not run, and what to do
    next_at: float = 0.0
    last_at: float = 0.0  # the due time of its newest run
    last_task: str = ""
    last_state: str = ""
    runs: int = 0
    skipped: int = 0
    skipped_why: str = ""  # of the newest one since the daemon's start


# -- what is sent -------------------------------------------------------------------------------


def _as_written(value: Any) -> Any:
    if isinstance(value, Secret):
        return {JSON_KEY: value.name}
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"objects of type {type(value).__name__} cannot be sent")


_encode = msgspec.msgpack.Encoder(enc_hook=_as_written).encode


def _put(name: str, keys: Mapping[str, Any]) -> wire.SchedulePut:
    checked_schedule(name)
    given = {key: value for key, value in keys.items() if value is not None}
    for key in [key for key, value in given.items() if isinstance(value, timedelta)]:
        given[key] = given[key].total_seconds()
    try:
        section = _encode(given)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        why = f"schedule '{name}': its keys cannot be sent: {error}"
        raise InvalidSchedule(why, {name: [why]}) from None
    if len(section) > SECTION_BYTES_MAX:
        why = f"schedule '{name}': it takes {len(section)} bytes, and {SECTION_BYTES_MAX} at most"
        raise InvalidSchedule(f"{why}: shorten its arguments", {name: [why]})
    return wire.SchedulePut(name, section)


def _puts(schedules: Mapping[str, Mapping[str, Any]]) -> list[Make]:
    """Return the messages that put schedules; all are checked before one is sent."""
    if not isinstance(schedules, Mapping):
        raise InvalidSchedule(f"give schedules by their names, not {shown(schedules)}", {})
    puts = [_put(name, keys) for name, keys in schedules.items()]
    return [partial(_make_puts, portion) for portion in _portions(puts)]


def _make_puts(puts: list[wire.SchedulePut], number: int, _: bool) -> wire.ScheduleMessage:
    return wire.PutSchedules(number, puts)


def _portions(puts: list[wire.SchedulePut]) -> Iterator[list[wire.SchedulePut]]:
    portion: list[wire.SchedulePut] = []
    size = 0
    for put in puts:
        if len(portion) == PUTS_MAX or (portion and size + len(put.section) > PUT_BYTES_MAX):
            yield portion
            portion, size = [], 0
        portion.append(put)
        size += len(put.section)
    if portion:
        yield portion


def _deletes(names: Iterable[str]) -> list[Make]:
    known = [checked_schedule(name) for name in names]
    portions = [known[start : start + PUTS_MAX] for start in range(0, len(known), PUTS_MAX)]

    def make(portion: list[str], number: int, _: bool) -> wire.ScheduleMessage:
        return wire.DeleteSchedules(number, portion)

    return [partial(make, portion) for portion in portions]


def _new_run(name: str) -> tuple[str, Make]:
    """Return the id of a run, and what asks for it."""
    moment = time.time_ns() >> RUN_BITS << RUN_BITS | secrets.randbits(RUN_BITS)
    id_ = f"@{checked_schedule(name)}.{moment:x}m"
    return id_, lambda number, again: wire.RunSchedule(number, name, id_, again)


def _pause(name: str, paused: bool) -> Make:
    checked_schedule(name)
    return lambda number, _: wire.PauseSchedule(number, name, paused)


def _show(name: str = "", after: str = "") -> Make:
    return lambda number, _: wire.ShowSchedules(number, name, after)


# -- what is answered ---------------------------------------------------------------------------

_ERRORS: dict[str, type[MusterdError]] = {
    wire.UNKNOWN_SCHEDULE: UnknownSchedule,
    SHUTTING_DOWN: ShuttingDown,
    QUEUE_FULL: QueueFull,
    UNKNOWN_TASK: UnknownTask,
}
_INVALID = (wire.INVALID_SCHEDULE, wire.READ_ONLY, wire.TOO_MANY)


def _check(questions: Iterable[Question], *, deleted: bool = False) -> None:
    """Raise what the answers refuse; a delete that is asked for again may find nothing."""
    rejected: list[Rejection] = []
    for question in questions:
        answer = question.answer
        assert isinstance(answer, wire.ScheduleAnswer)
        done = deleted and question.asked > 1
        rejected += [
            each for each in answer.rejected if not (done and each.code == wire.UNKNOWN_SCHEDULE)
        ]
    if rejected:
        raise _error_of(rejected)


def _error_of(rejected: list[Rejection]) -> MusterdError:
    problems = {each.id: each.message.splitlines() for each in rejected}
    lines = [line for found in problems.values() for line in found]
    if len(lines) > PROBLEMS_SHOWN_MAX:
        left = len(lines) - PROBLEMS_SHOWN_MAX
        lines = [*lines[:PROBLEMS_SHOWN_MAX], f"and {left} more problems"]
    text, code = "\n".join(lines), rejected[0].code
    if code in _INVALID:
        return InvalidSchedule(text, problems)
    if code == wire.STILL_RUNNING:
        return StillRunning(text, rejected[0].id)
    return _ERRORS.get(code, ScheduleError)(text)


def _found(question: Question) -> wire.Schedules:
    if isinstance(question.answer, wire.ScheduleAnswer):  # refused as a whole
        _check([question])
    assert isinstance(question.answer, wire.Schedules)
    return question.answer


def _one(name: str, question: Question) -> Schedule:
    found = _found(question).schedules
    if not found:
        raise UnknownSchedule(f"there is no schedule '{name}'")
    return _schedule(found[0])


def _schedule(view: wire.ScheduleView) -> Schedule:
    keys = msgspec.msgpack.decode(view.section) if view.section else {}
    return Schedule(
        name=view.name,
        state=view.state,
        task=view.task,
        when=view.when,
        keys=keys,
        origin=view.origin,
        problem=view.problem,
        next_at=view.next_ns / 1e9,
        last_at=view.last_ns / 1e9,
        last_task=view.last_task,
        last_state=view.last_state,
        runs=view.runs,
        skipped=view.skipped,
        skipped_why=view.skipped_why,
    )


# -- for people ---------------------------------------------------------------------------------


class Schedules:
    """Schedules of the daemon, as `client.schedules`. Each call returns when its change is on disk.

    `timeout` is how long to wait for that, in seconds; TimeoutError after it.
    """

    def __init__(self, client: "Client") -> None:
        self._client = client

    def put(self, name: str, **keys: Unpack[ScheduleKeys]) -> None:
        """Add a schedule, or replace it: its keys are those of [[schedule]] in a configuration.

        Raises InvalidSchedule with all its problems. One with the same task and timing goes on
        where it is. `timeout` is the key of that name: of an attempt.
        """
        self.put_many({name: keys})

    def put_many(
        self, schedules: Mapping[str, ScheduleKeys], *, timeout: float | None = None
    ) -> None:
        """Put many at once, by their names. Those that are new begin spread over their interval.

        Raises InvalidSchedule for those that have problems; the others are stored.
        """
        _check(self._client._ask_all(_puts(schedules), timeout, "the answer to a put"))

    def get(self, name: str, *, timeout: float | None = None) -> Schedule:
        """Return a schedule; raise UnknownSchedule if there is none of this name."""
        [asked] = self._client._ask_all(
            [_show(checked_schedule(name))], timeout, f"schedule {name}"
        )
        return _one(name, asked)

    def list(self, *, timeout: float | None = None) -> "list[Schedule]":
        """Return all schedules by name, those of configuration files too."""
        listed: list[Schedule] = []
        more = True
        while more:
            after = listed[-1].name if listed else ""
            [asked] = self._client._ask_all([_show("", after)], timeout, "the list of schedules")
            found = _found(asked)
            listed += [_schedule(view) for view in found.schedules]
            more = found.more and bool(found.schedules)
        return listed

    def delete(self, *names: str, timeout: float | None = None) -> None:
        """Forget schedules that were put; raise UnknownSchedule for a name that is not known.

        No run is made after this; one that is under way ends as it would.
        """
        asked = self._client._ask_all(_deletes(names), timeout, "the answer to a delete")
        _check(asked, deleted=True)

    def run(self, name: str, *, timeout: float | None = None) -> "TaskHandle":
        """Run a schedule now, paused or not, and return the handle of the task.

        Raises StillRunning while its last run is alive, unless it may overlap.
        """
        id_, make = _new_run(name)
        _check(self._client._ask_all([make], timeout, f"the run of schedule {name}"))
        return self._client.task(id_)

    def pause(self, name: str, *, timeout: float | None = None) -> None:
        """Pause a schedule, over restarts, until resume()."""
        _check(self._client._ask_all([_pause(name, True)], timeout, f"the pause of {name}"))

    def resume(self, name: str, *, timeout: float | None = None) -> None:
        """Let a paused schedule go on; runs of the pause are not caught up with."""
        _check(self._client._ask_all([_pause(name, False)], timeout, f"the resume of {name}"))


class AsyncSchedules:
    """Schedules with `await`."""

    def __init__(self, client: "AsyncClient") -> None:
        self._client = client

    async def put(self, name: str, **keys: Unpack[ScheduleKeys]) -> None:
        """Add a schedule, or replace it: its keys are those of [[schedule]] in a configuration.

        Raises InvalidSchedule with all its problems. One with the same task and timing goes on
        where it is. `timeout` is the key of that name: of an attempt.
        """
        await self.put_many({name: keys})

    async def put_many(
        self, schedules: Mapping[str, ScheduleKeys], *, timeout: float | None = None
    ) -> None:
        """Put many at once, by their names. Those that are new begin spread over their interval.

        Raises InvalidSchedule for those that have problems; the others are stored.
        """
        _check(await self._client._ask_all(_puts(schedules), timeout, "the answer to a put"))

    async def get(self, name: str, *, timeout: float | None = None) -> Schedule:
        """Return a schedule; raise UnknownSchedule if there is none of this name."""
        question = _show(checked_schedule(name))
        [asked] = await self._client._ask_all([question], timeout, f"schedule {name}")
        return _one(name, asked)

    async def list(self, *, timeout: float | None = None) -> "list[Schedule]":
        """Return all schedules by name, those of configuration files too."""
        listed: list[Schedule] = []
        more = True
        while more:
            question = _show("", listed[-1].name if listed else "")
            [asked] = await self._client._ask_all([question], timeout, "the list of schedules")
            found = _found(asked)
            listed += [_schedule(view) for view in found.schedules]
            more = found.more and bool(found.schedules)
        return listed

    async def delete(self, *names: str, timeout: float | None = None) -> None:
        """Forget schedules that were put; raise UnknownSchedule for a name that is not known.

        No run is made after this; one that is under way ends as it would.
        """
        asked = await self._client._ask_all(_deletes(names), timeout, "the answer to a delete")
        _check(asked, deleted=True)

    async def run(self, name: str, *, timeout: float | None = None) -> "AsyncTaskHandle":
        """Run a schedule now, paused or not, and return the handle of the task.

        Raises StillRunning while its last run is alive, unless it may overlap.
        """
        id_, make = _new_run(name)
        _check(await self._client._ask_all([make], timeout, f"the run of schedule {name}"))
        return await self._client.task(id_)

    async def pause(self, name: str, *, timeout: float | None = None) -> None:
        """Pause a schedule, over restarts, until resume()."""
        asked = await self._client._ask_all([_pause(name, True)], timeout, f"the pause of {name}")
        _check(asked)

    async def resume(self, name: str, *, timeout: float | None = None) -> None:
        """Let a paused schedule go on; runs of the pause are not caught up with."""
        asked = await self._client._ask_all([_pause(name, False)], timeout, f"the resume of {name}")
        _check(asked)
