"""The text of a message: title and lines for people, data for programs."""

import time
from typing import Any

import msgspec

from musterd.supervisor.alerts.rules import Line, Message

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
    "sockets.lost": "a socket file is gone: restart the daemon to recreate it",
}
MINUTE, HOUR, DAY = 60, 3600, 86400


def title(message: Message, host: str) -> str:
    lines = [*message.began, *message.ended]
    if message.test:
        return f"musterd on {host}: test of alert {message.rule}"
    if len(lines) == 1 and not message.more:
        (line,) = lines
        word = "resolved: " if message.ended else ""
        return f"musterd on {host}: {word}{_named(line)}"
    parts = [f"{len(message.began)} alerts"] if message.began else []
    parts += [f"{len(message.ended)} resolved"] if message.ended else []
    parts += [f"{message.more} more"] if message.more else []
    return f"musterd on {host}: {', '.join(parts)}"


def body(message: Message) -> str:
    if message.test:
        return "This is a test message. If you can read it, the alert works."
    lines = [_began(line) for line in message.began]
    lines += [_ended(line) for line in message.ended]
    if message.more:
        lines.append(f"... and {message.more} more: see musterctl alerts")
    return "\n".join(lines)


def as_data(message: Message, host: str) -> dict[str, Any]:
    """Return the message as data, for a command's standard input."""
    told: dict[str, Any] = msgspec.to_builtins(message)
    del told["made_ns"]
    told["alert"] = told.pop("rule")
    return {**told, "host": host, "title": title(message, host), "body": body(message)}


def severity(message: Message) -> str:
    """Return the severity as a notification type of apprise."""
    if message.test:
        return "info"
    return "failure" if message.began or message.more else "success"


def _named(line: Line) -> str:
    return f"{line.kind} {line.subject}".rstrip()


def _began(line: Line) -> str:
    parts = [MEANINGS.get(line.kind, ""), line.text]
    text = f"{_named(line)}: {'; '.join(part for part in parts if part)}".rstrip(": ")
    if line.times > 1:
        text += f" ({line.times} times)"
    text += f" [{_clock(line.since)}"
    if line.over_at:
        text += f", over after {duration(line.over_at - line.since)}"
    return text + "]"


def _ended(line: Line) -> str:
    lasted = duration(line.over_at - line.since)
    again = f", {line.times} more times" if line.times > 1 else ""
    return f"resolved: {_named(line)} after {lasted}{again} [{_clock(line.over_at)}]"


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
