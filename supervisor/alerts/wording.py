"""The text of a message: title and lines for people, data for programs.

Runs in the courier, which knows how much text the service takes, and which may be killed: a diff of
long texts takes a while.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from musterd.ipc.watching.difference import changed_fields, unified_diff
from musterd.supervisor.alerts.changes import Change
from musterd.supervisor.alerts.kinds import CHANGED, KINDS, SCHEDULE
from musterd.supervisor.alerts.rules import Line, Message
from musterd.supervisor.alerts.settings import Destination
from musterd.supervisor.alerts.template import PLACEHOLDERS, fill

# The rest of the sentence, for each kind that is likely to wake an operator.
MEANINGS = {
    "daemon.silent": "the supervisor does not answer",
    "daemon.crashed": "the supervisor crashed and was started again",
    "memory.warning": "memory is low: the fleet shrinks",
    "memory.critical": "memory is nearly exhausted: each pool keeps one worker",
    "pool.fatal": "the pool cannot start",
    "worker.fatal": "the worker keeps failing and stays down until it is reset",
    "worker.crashed": "the worker crashed",
    "worker.hung": "the worker hung",
    "breaker.open": "the site keeps failing: its circuit breaker is open",
    "session.held": "its logins fail: its tasks fail, too, until a login is tried again",
    "task.dead": "tasks failed for good",
    "task.quarantined": "tasks crashed too many workers",
    "task.fallback": "tasks failed and fell back",
    "store.failing": "the store cannot write: no task is acknowledged until it can",
    "clock.doubted": "the clock looks wrong: nothing is deleted for its age",
    "cluster.unreachable": "the cluster's database does not answer: submits are refused, running "
    "tasks go on",
    "cluster.fatal": "the cluster cannot be used: clients of this node wait",
    "cluster.crashed": "the cluster sidecar crashed and is restarted",
    "cluster.fenced": "the cluster gave this node up: what it ran runs again elsewhere",
    "cluster.node_lost": "a node of the cluster was lost",
    "cluster.vacuum_stalled": "an open transaction slows down the cluster's database: end it",
    "watch.stale": "its runs fail: changes are not seen until it recovers",
    "watch.recovered": "its runs succeed again",
    "sockets.lost": "a socket file is gone: restart the daemon to recreate it",
}
# Titles about a site begin with its name, as those of changes do.
SITE_TITLES = {"watch.stale": "its runs fail", "watch.recovered": "its runs succeed again"}
MINUTE, HOUR, DAY = 60, 3600, 86400
VALUE_CHARS_MAX = 1000  # of a result in a template
DIFF_CHARS_MAX = 100_000  # for programs; people get what the service has room for
LONG_CHARS = 40  # a longer text has a diff: the summary has no room for it
NAMED_MAX = 3  # schedules in a title
PART_CHARS = 10  # for " (2/3)"
AGAIN = " (again)"
# Control characters of sites, and signs that turn the order of letters around: some services refuse
# them, and terminals obey them.
_UNSAFE = dict.fromkeys(
    [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F)], " "
) | dict.fromkeys(range(0x2066, 0x206A), " ")
_UNSAFE = {sign: text for sign, text in _UNSAFE.items() if chr(sign) not in "\n\t"}


class Room(Struct, frozen=True):
    """Characters that a service takes."""

    title: int = 250  # 0: the title is the first line of the body
    body: int = 1024 * 1024


class Text(Struct, frozen=True):
    """A message, or a part of one that is too long for the service."""

    title: str
    body: str
    lines: int  # of the message that end here


def texts(message: Message, host: str, destination: Destination, room: Room) -> list[Text]:
    """Return the message as the service has room for it: in one part, if its lines fit."""
    head = " ".join(title(message, host, destination).translate(_UNSAFE).split())
    head_room = room.title or min(250, room.body)
    body_room = room.body if room.title else room.body - min(len(head), head_room) - PART_CHARS
    blocks = _blocks(message, host, destination)
    parts: list[tuple[str, int]] = [("", 0)]
    for block in blocks:
        fitted = _cut(block.translate(_UNSAFE), body_room)
        text, count = parts[-1]
        if text and len(text) + 1 + len(fitted) > body_room:
            parts.append((fitted, 1))
        else:
            parts[-1] = (f"{text}\n{fitted}" if text else fitted, count + 1)
    if len(parts) == 1 and not destination.body:
        parts = [(_with_details(message, parts[0][0], body_room), parts[0][1])]
    if len(parts) == 1:
        return [Text(_short(head, head_room), *parts[0])]
    return [
        Text(f"{_short(head, head_room - PART_CHARS)} ({number}/{len(parts)})", *part)
        for number, part in enumerate(parts, 1)
    ]


def _blocks(message: Message, host: str, destination: Destination) -> list[str]:
    """Return the text of each line of the message: what must be told, whatever the room."""
    if message.test:
        return ["This is a test message. If you can read it, the alert works."]
    if destination.body:
        blocks = [fill(destination.body, each) for each in _values(message, host)]
    elif _is_one_change(message):  # the title has it
        (change,) = message.changes
        blocks = [f"{_clock(change.at)}, musterd on {host}"]
    else:
        blocks = [f"{_changed(change)} [{_clock(change.at)}]" for change in message.changes]
        blocks += [_began(line) for line in message.began]
        blocks += [_ended(line) for line in message.ended]
    if message.more:
        blocks.append(f"... and {message.more} more: see musterctl alerts")
    return blocks


def _with_details(message: Message, text: str, room: int) -> str:
    """Return the text with the diffs of its changes, as far as there is room."""
    for change in message.changes:
        diff = diff_of(change).translate(_UNSAFE)
        left = room - len(text) - 2
        if diff and left >= LONG_CHARS:
            named = "" if len(message.changes) == 1 else f"{change.schedule}:\n"
            text = f"{text}\n\n{_cut(named + diff, left)}"
    return text


def title(message: Message, host: str, destination: Destination) -> str:
    if message.test:
        return f"musterd on {host}: test of alert {message.rule}"
    count = len(message.changes) + len(message.began) + len(message.ended) + message.more
    if destination.title:
        filled = fill(destination.title, next(iter(_values(message, host)), _nothing(host)))
        text = " ".join(filled.split()) + (f" (+{count - 1} more)" if count > 1 else "")
    elif count == 1:
        text = _title_of_one(message, host)
    elif count == len(message.changes):
        names = list(dict.fromkeys(change.schedule for change in message.changes))
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        text = f"{count} changes: {', '.join(names[:NAMED_MAX])}{more}"
    else:
        parts = [f"{len(message.changes)} changes"] if message.changes else []
        parts += [f"{len(message.began)} alerts"] if message.began else []
        parts += [f"{len(message.ended)} resolved"] if message.ended else []
        parts += [f"{message.more} more"] if message.more else []
        text = f"musterd on {host}: {', '.join(parts)}"
    return text + (AGAIN if message.again else "")


def _title_of_one(message: Message, host: str) -> str:
    if message.changes:
        return _changed(message.changes[0])
    if message.more:
        return f"musterd on {host}: 1 more"
    (line,) = [*message.began, *message.ended]
    kind = "watch.recovered" if message.ended and line.kind == "watch.stale" else line.kind
    if kind in SITE_TITLES:
        return f"{line.subject}: {SITE_TITLES[kind]}"
    return f"musterd on {host}: {'resolved: ' if message.ended else ''}{_named(line)}"


def as_data(
    message: Message, host: str, destination: Destination, pictures: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the message as data, for a command's standard input and for a web hook.

    `pictures` are paths, by task: a web hook gets the pictures themselves.
    """
    told: dict[str, Any] = msgspec.to_builtins(message)
    del told["made_ns"]
    told["alert"] = told.pop("rule")
    told["changes"] = [
        _change_data(change) | {"picture": (pictures or {}).get(change.task, "")}
        for change in message.changes
    ]
    text = texts(message, host, destination, Room())[0]
    return {**told, "host": host, "title": text.title, "body": text.body}


def _change_data(change: Change) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(change)
    both = change.before is not None and change.after is not None
    fields = changed_fields(change.before, change.after) if both else {}
    told["fields"] = msgspec.to_builtins(fields)
    diff = unified_diff(change.before, change.after) if both else ""
    told["diff"] = _cut(diff, DIFF_CHARS_MAX)
    return told


# -- changes ----------------------------------------------------------------------------------


def _is_one_change(message: Message) -> bool:
    return len(message.changes) == 1 and not (message.began or message.ended or message.more)


def _changed(change: Change) -> str:
    where = f"task {change.task}" if change.task else f"history {change.schedule}"
    summary = change.summary or f"another result: musterctl {where}"
    return f"{change.schedule}: {summary}"


def diff_of(change: Change) -> str:
    """Return a unified diff of texts that the summary has no room for; "" if there is none."""
    pairs = [("", change.before, change.after)]
    if isinstance(change.before, dict) and isinstance(change.after, dict):
        fields = changed_fields(change.before, change.after)
        pairs = [(f"{name}:\n", each.before, each.after) for name, each in fields.items()]
    return "\n".join(
        name + "\n".join(unified_diff(before, after).splitlines()[2:])
        for name, before, after in pairs
        if before is not None and after is not None and (_is_long(before) or _is_long(after))
    )


def _is_long(value: Any) -> bool:
    return isinstance(value, list | dict) or (
        isinstance(value, str) and (len(value) > LONG_CHARS or "\n" in value.strip())
    )


# -- templates --------------------------------------------------------------------------------


def _values(message: Message, host: str) -> list[dict[str, str]]:
    """Return the values of placeholders for each line of the message."""
    common = {**_nothing(host), "alert": message.rule}
    found = [
        common
        | {
            "after": _value(change.after),
            "at": _clock(change.at),
            "before": _value(change.before),
            "diff": unified_diff(change.before, change.after)
            if change.before is not None and change.after is not None
            else "",
            "event": CHANGED,
            "number": str(change.number),
            "schedule": change.schedule,
            "subject": change.schedule,
            "summary": change.summary or "another result",
            "task": change.task,
            "url": change.url,
        }
        for change in message.changes
    ]
    for line, summary, at in [
        *((each, _meaning(each), each.since) for each in message.began),
        *((each, f"over {_over(each)}", each.over_at) for each in message.ended),
    ]:
        schedule = line.subject if KINDS[line.kind].subject == SCHEDULE else ""
        found.append(
            common
            | {
                "at": _clock(at),
                "event": line.kind,
                "schedule": schedule,
                "subject": line.subject,
                "summary": summary,
            }
        )
    return found


def _nothing(host: str) -> dict[str, str]:
    return dict.fromkeys(PLACEHOLDERS, "") | {"host": host}


def _value(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return _short(text, VALUE_CHARS_MAX)


# -- text that fits ---------------------------------------------------------------------------


def _short(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(0, room - 1)]}…"


def _cut(text: str, room: int) -> str:
    """Return the first lines of a text that fit, and how many others there are."""
    if len(text) <= room:
        return text
    lines = text.split("\n")
    kept: list[str] = []
    left = room - len(f"\n… {len(lines)} more lines")
    for line in lines:
        left -= len(line) + 1
        if left < 0:
            break
        kept.append(line)
    if not kept:
        return _short(lines[0], room)
    return "\n".join([*kept, f"… {len(lines) - len(kept)} more lines"])


# -- incidents --------------------------------------------------------------------------------


def severity(message: Message) -> str:
    """Return the severity as a notification type of apprise."""
    if message.test:
        return "info"
    if message.began or message.more:
        return "failure"
    return "info" if message.changes else "success"


def _named(line: Line) -> str:
    return f"{line.kind} {line.subject}".rstrip()


def _began(line: Line) -> str:
    text = f"{_named(line)}: {_meaning(line)}".rstrip(": ")
    if line.times > 1:
        text += f" ({line.times} times)"
    text += f" [{_clock(line.since)}"
    if line.over_at:
        text += f", over after {duration(line.over_at - line.since)}"
    return text + "]"


def _ended(line: Line) -> str:
    return f"resolved: {_named(line)} {_over(line)} [{_clock(line.over_at)}]"


def _meaning(line: Line) -> str:
    return "; ".join(part for part in (MEANINGS.get(line.kind, ""), line.text) if part)


def _over(line: Line) -> str:
    again = f", {line.times} more times" if line.times > 1 else ""
    return f"after {duration(line.over_at - line.since)}{again}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE} s"
    if whole < DAY:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"
    return f"{whole // DAY} d {whole % DAY // HOUR} h"
