"""Format the daemon's answers for people: aligned columns, colours only on a terminal.

Texts come from tasks and workers: control characters are escaped before they reach a terminal,
where they could move the cursor or worse.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from musterd.supervisor.api.cluster import DOWN, FENCED, MEMBER, ClusterStatus, headline
from musterd.supervisor.api.status import (
    BACKOFF,
    BUSY,
    DRAINING,
    FATAL,
    RUNNING,
    STARTING,
    STOPPED,
    AttemptStatus,
    CommandResult,
    FleetStatus,
    PoolStatus,
    TaskFailure,
    TaskList,
    TaskStatus,
    WebStatus,
    WorkerStatus,
)
from musterd.supervisor.ctl.table import (
    BELOW,
    Column,
    Paper,
    paint,
    short_moment,
    table,
    told,
    untold,
)
from musterd.supervisor.text.fitting import wrapped
from musterd.supervisor.text.printable import printable, printable_json

FAILURES_SHOWN = 3  # most frequent error types of a pool; --json has them all
ARGUMENTS_SHOWN_MAX = 2000  # characters; --json has all of them
SAID = "    | "  # before what a lost worker said last

GREEN, YELLOW, RED, GREY = "32", "33", "31", "90"
_COLOUR_OF = {
    RUNNING: GREEN,
    BUSY: GREEN,
    STARTING: YELLOW,
    DRAINING: YELLOW,
    BACKOFF: YELLOW,
    FATAL: RED,
    STOPPED: GREY,
    "succeeded": GREEN,
    "running": GREEN,
    "failed": RED,
    "expired": RED,
    "cancelled": GREY,
    "alive": GREEN,
    "draining": YELLOW,
    "silent": YELLOW,
    "lost": RED,
    "left": GREY,
}
PLAIN = Paper()


def duration(seconds: float) -> str:
    """Format a length of time: 0.4s, 12s, 3m 10s, 2h 05m, 3d 4h."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def size(count: float) -> str:
    """Format a number of bytes in the units of the configuration: 312B, 512K, 82M, 3.9G."""
    if 0 < count < 1000:
        return f"{count:.0f}B"
    value = count / 1024
    for unit in "KMGT":
        if value < 1000 or unit == "T":
            return f"{value:.1f}{unit}" if value < 10 and unit in "GT" else f"{value:.0f}{unit}"
        value /= 1024
    raise AssertionError("never")


def moment(at: float | None) -> str:
    """Format wall-clock time as local time; "-" for never."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "-"


def states(column: int) -> Callable[[int, str], str | None]:
    """Return the colours of a table whose states are in this column."""
    return lambda at, cell: _COLOUR_OF.get(cell) if at == column else None


def prose(text: str, on: Paper, colour: str | None = None) -> str:
    """Return a line of text, which may come from others, in whole words."""
    lines = wrapped(printable(text), on.columns, indent=BELOW)
    return "\n".join(paint(line, colour if on.colour else None) for line in lines)


# -- status -----------------------------------------------------------------------------------

_NOTE = Column("NOTE", rank=9)
_POOLS = (
    Column("POOL", name=True),
    Column("STATE"),
    Column("WORKERS"),
    Column("BUSY", rank=5, below=told("{} busy")),
    Column("QUEUED"),
    Column("WAITING", rank=2, below=told("{} waiting")),
    Column("DONE", rank=3, below=untold),
    Column("FAILED", rank=4, below=told("{} failed")),
    Column("RESTARTS", rank=1, below=untold),  # of those that were lost, the note tells
    _NOTE,
)
_WORKERS = (
    Column("WORKER", name=True),
    Column("STATE"),
    Column("PID"),
    Column("UPTIME", rank=5, below=untold),
    Column("TASKS", rank=4, below=untold),
    Column("RESTARTS", rank=2, below=untold),
    Column("LOST", rank=3, below=told("lost: {}")),
    Column("TASK", rank=1, below=untold),
    Column("DOING", rank=9),
)
_WORST_FIRST = (FATAL, BACKOFF, STARTING)  # of workers and pools; the others are as they should be


def fleet(status: FleetStatus, on: Paper = PLAIN) -> str:
    """Format the answer of `musterctl status`."""
    head = (
        f"musterd {status.version}  {status.state}  pid {status.pid}  "
        f"up {duration(status.uptime_seconds)}"
    )
    if status.containment:
        head += f"  containment {status.containment}"
        if status.containment_reason:
            head += f" ({status.containment_reason})"
    halted = {pool.halt for pool in status.pools}
    if len(halted) == 1 and "" not in halted:
        head += f"  {halted.pop()}: musterctl resume"
    if status.web is not None:
        head += f"  web {_web(status.web)}"
    if status.events is not None:
        head += f"  events {_web(status.events)}"
    parts = [prose(head, on)]
    if status.cluster is not None:
        text = f"cluster: {headline(status.cluster)}"
        parts.append(prose(text, on, _cluster_colour(status.cluster)))
    if status.problem:
        parts.append(prose(f"PROBLEM: {status.problem}", on, RED))
    if not status.pools:
        return parts[0] + "\n\nno pools configured"
    pools = [_pool_row(pool) for pool in sorted(status.pools, key=pool_rank)]
    parts.append(table(_POOLS, pools, on, colour_of=states(1)))
    workers = [worker for pool in status.pools for worker in (*pool.workers, *pool.leaving)]
    if workers:
        rows = [_worker_row(worker) for worker in sorted(workers, key=worker_rank)]
        parts.append(table(_WORKERS, rows, on, colour_of=states(1)))
    return "\n\n".join(parts)


def _rank(state: str) -> int:
    return _WORST_FIRST.index(state) if state in _WORST_FIRST else len(_WORST_FIRST)


def pool_rank(pool: PoolStatus) -> tuple[bool, int]:
    """Sort pools with problems first: those that are not at their size, then the held back."""
    fine = pool.running >= pool.size and pool.state not in _WORST_FIRST
    return fine and not pool.halt and not pool.reason, _rank(pool.state)


def worker_rank(worker: WorkerStatus) -> tuple[int, bool]:
    """Sort workers with problems first: those that are down, then those that wait for people."""
    return _rank(worker.state), not (worker.halt or worker.debug)


def _cluster_colour(cluster: ClusterStatus) -> str | None:
    if cluster.state in (FENCED, DOWN) or cluster.unreachable or cluster.stalled:
        return RED
    return None if cluster.state == MEMBER else YELLOW


def _web(web: WebStatus) -> str:
    if web.state == "up":
        return web.address
    return f"{web.state} ({web.reason})" if web.reason else web.state


def _pool_row(pool: PoolStatus) -> list[str]:
    other = pool.cancelled + pool.expired
    note = [f"{pool.halt}: musterctl resume {pool.name}"] if pool.halt else []
    note += [pool.reason] if pool.reason else []
    if pool.lost:
        note.append(f"lost: {causes(pool.lost)}")
    if pool.failures:
        note.append(f"attempts failed: {_most(pool.failures)}")
    if pool.scaling != "fixed":
        auto = pool.scaling == "auto"
        scaling = f"scales {pool.min}-{pool.max}" if auto else "scaled manually"
        note += [part for part in (scaling, pool.scaled, pool.held) if part]
    if pool.recycled:
        note.append(f"{pool.recycled} recycled")
    if other:
        note.append(f"{pool.cancelled} cancelled, {pool.expired} expired")
    if pool.orphans:
        note.append(f"{pool.orphans} orphans killed")
    waiting_ahead = [
        f"{count} {priority}"
        for priority, count in pool.queued.items()
        if count and priority in ("critical", "high")
    ]
    if waiting_ahead:
        note.append("queued: " + ", ".join(waiting_ahead))
    figures = [pool.busy, sum(pool.queued.values()), pool.waiting, pool.succeeded, pool.failed]
    return [
        pool.name,
        pool.state,
        f"{pool.running}/{pool.size}",
        *(str(figure) for figure in figures),
        str(pool.restarts),
        "; ".join(note),
    ]


def _most(failures: dict[str, int]) -> str:
    """List the most frequent errors: `7 SiteTimeout, 1 PageCrashed`."""
    ranked = sorted(failures.items(), key=lambda each: -each[1])
    told = [f"{count} {kind}" for kind, count in ranked[:FAILURES_SHOWN]]
    return ", ".join([*told, *(["..."] if len(ranked) > FAILURES_SHOWN else [])])


def causes(lost: dict[str, int]) -> str:
    """List how many workers were lost by cause: `2 signal, 1 oom`."""
    return ", ".join(f"{count} {cause}" for cause, count in lost.items())


def _worker_row(worker: WorkerStatus) -> list[str]:
    doing = worker.reason or worker.halt
    if worker.task_id or worker.method:
        doing = f"{worker.method} {duration(worker.task_seconds)}".strip()
        doing = ": ".join(part for part in (worker.halt, worker.debug, doing) if part)
    return [
        worker.name,
        worker.state,
        str(worker.pid) if worker.pid else "-",
        duration(worker.uptime_seconds) if worker.pid else "-",
        str(worker.tasks_done),
        str(worker.restarts),
        causes(worker.lost) or "-",
        worker.task_id or "-",
        doing,
    ]


def command(result: CommandResult) -> str:
    """Format one line per slot, and a note where the outcome was not waited for."""
    lines = []
    for slot in result.slots:
        pid = f" pid {slot.pid}" if slot.pid else ""
        reason = f": {slot.reason}" if slot.reason else ""
        lines.append(printable(f"{slot.name}: {slot.state}{pid}{reason}"))
    if not result.done:
        lines.append("accepted; not waiting for the outcome")
    return "\n".join(lines)


# -- tasks ------------------------------------------------------------------------------------

_TASKS = (
    Column("ID", alone=True),
    Column("STATE"),
    Column("TASK", name=True),
    Column("PRIORITY", rank=2, below=lambda cell: "" if cell == "normal" else f"{cell} priority"),
    Column("ATTEMPT", rank=1, below=lambda cell: "" if cell == "1" else f"attempt {cell}"),
    Column("SUBMITTED", short=short_moment),
    Column("RUN", rank=3, below=untold),
    _NOTE,
)
_FAILED_FIRST = ("failed", "expired")
MORE = "... and more: see --limit"


def tasks(found: TaskList, on: Paper = PLAIN) -> str:
    """Format the answer of `musterctl tasks`: those that failed first, each the newest first."""
    if not found.tasks:
        return "no tasks"
    ranked = sorted(found.tasks, key=lambda each: each.state not in _FAILED_FIRST)
    text = table(_TASKS, [_task_row(task) for task in ranked], on, colour_of=states(1))
    return f"{text}\n{MORE}" if found.more else text


def _task_row(task: TaskStatus) -> list[str]:
    note = task.waits_for or task.worker or task.node
    if task.failure is not None:
        note = failure_line(task.failure)
    return [
        task.id,
        task.state,
        task.name,
        task.priority,
        str(task.attempt),
        moment(task.submitted_at),
        duration(task.run_seconds) if task.run_seconds else "-",
        note,
    ]


_DEAD = (
    Column("ID", alone=True),
    Column("TASK", name=True),
    Column("SITE", rank=3, name=True),
    Column("ATTEMPTS", rank=2, below=lambda cell: "" if cell == "1" else f"{cell} attempts"),
    Column("CRASHES", rank=1, below=told("{} crash", "es")),
    Column("FAILED", short=short_moment),
    Column("ERROR", rank=9),
)


def dead(found: TaskList, on: Paper = PLAIN) -> str:
    """Format the answer of `musterctl dead`."""
    if not found.tasks:
        return "no failed tasks"
    text = table(_DEAD, [_dead_row(task) for task in found.tasks], on)
    return f"{text}\n{MORE}" if found.more else text


def _dead_row(task: TaskStatus) -> list[str]:
    return [
        task.id,
        task.name,
        task.target or "-",
        str(task.attempt),
        str(task.crashes),
        moment(task.finished_at),
        failure_line(task.failure) if task.failure is not None else "",
    ]


def failure_line(failure: TaskFailure) -> str:
    """Format an error as one line."""
    what = failure.type or failure.kind
    status = f" (HTTP {failure.status})" if failure.status else ""
    return f"{what}{status}: {failure.message}" if failure.message else f"{what}{status}"


def _arguments(args: Any) -> str:
    """Format arguments on one line, to keep what follows in view."""
    if not args:
        return ""
    text = msgspec.json.encode(args).decode() if not isinstance(args, str) else args
    return text if len(text) <= ARGUMENTS_SHOWN_MAX else f"{text[:ARGUMENTS_SHOWN_MAX]}..."


_SOURCES = {
    "cached": "another task with the same key",
    "stale": "the last good result of an earlier task",
    "fallback": "the value given as fallback",
}


def _source(status: TaskStatus) -> str:
    """Say where a result comes from that is not the task's own, and why."""
    text = _SOURCES.get(status.source, status.source)
    if status.source not in ("stale", "fallback"):
        return text
    return f"{text}, {'because it failed' if status.failure else 'while the breaker is open'}"


_AS_IT_IS = frozenset({"arguments", "result"})  # fields that people copy


def task(status: TaskStatus, on: Paper = PLAIN) -> str:
    """Format the answer of `musterctl task ID`. Values and code are not wrapped."""

    def told(text: str, first: str, indent: str) -> list[str]:
        return wrapped(printable(text), on.columns, first=first, indent=indent)

    fields = [
        ("id", status.id),
        ("task", status.name),
        ("arguments", _arguments(status.args)),
        ("state", status.state),
        ("priority", status.priority),
        ("site", status.target),
        ("attempts", str(status.attempt)),
        ("crashes", str(status.crashes) if status.crashes else ""),
        ("worker", status.worker),
        ("node", status.node),
        ("submitted", moment(status.submitted_at) if status.submitted_at else ""),
        ("finished", moment(status.finished_at) if status.finished_at else ""),
        ("run time", duration(status.run_seconds) if status.run_seconds else ""),
        ("policy", status.policy),
        ("waiting for", status.waits_for),
        ("progress", progress(status.progress, status.progress_text)),
        ("error", failure_line(status.failure) if status.failure else ""),
        ("source", _source(status)),
        ("result", value(status.value) if status.state == "succeeded" else ""),
    ]
    lines = []
    for name, text in fields:
        head = f"{name + ':':<13}"
        if name in _AS_IT_IS or "\n" in text:
            lines += [f"{head}{printable(text, keep=chr(10))}"] if text else []
        elif text:
            lines += told(text, head, " " * len(head))
    if status.failure is not None and status.failure.traceback:
        lines.append(printable(status.failure.traceback.rstrip(), keep="\n\t"))
    if status.attempts:
        lines.append("failed attempts:")
        for each in status.attempts:
            lines += told(_attempt(each), "", BELOW)
    if status.artefacts:
        lines.append("artefacts (write them with --save DIR):")
        lines += [printable(f"  {each.name}  {size(each.bytes)}") for each in status.artefacts]
    return "\n".join(lines)


def _attempt(failed: AttemptStatus) -> str:
    where = f"  {failed.worker}" if failed.worker else ""
    return f"  {failed.attempt}  {moment(failed.at)}{where}  {failure_line(failed.failure)}"


def progress(fraction: float, text: str) -> str:
    """Format a task's progress; "" where it reports none."""
    return f"{int(fraction * 100)}% {text}".rstrip() if fraction or text else ""


def value(result: Any) -> str:
    """Format a task's result: text unchanged (escaped on a terminal), anything else as JSON."""
    if isinstance(result, str):
        terminal = sys.stdout is not None and sys.stdout.isatty()
        return printable(result, keep="\n\t") if terminal else result
    return printable_json(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())


# -- events -----------------------------------------------------------------------------------


def event(fields: dict[str, Any], on: Paper = PLAIN) -> list[str]:
    """Format one event as one line, and below it the last output of a lost worker."""
    if "dropped" in fields:
        return [f"... {fields['dropped']} events dropped: this reader was too slow"]
    rest = dict(fields)
    at, name, level = rest.pop("at", 0), rest.pop("event", "?"), rest.pop("level", "info")
    reason, output = rest.pop("reason", ""), str(rest.pop("output", ""))
    parts = [f"{level!s:<8}", str(name), *(f"{key}={item}" for key, item in rest.items())]
    if reason:
        parts.append(str(reason))
    lines = wrapped(printable(" ".join(parts)), on.columns, first=f"{moment(float(at))} ")
    for line in output.split("\n"):
        if line:
            lines += wrapped(_line(line), on.columns, first=SAID, indent=SAID)
    return lines


# -- tail -------------------------------------------------------------------------------------


def chunk(fields: dict[str, Any], *, plain: bool) -> list[str]:
    """Format new output of a worker, line by line."""
    if "dropped" in fields:
        return [f"... {fields['dropped']} chunks dropped: this reader was too slow"]
    name, left_out = str(fields.get("worker", "?")), fields.get("left_out", 0)
    lines = [f"... {left_out} lines dropped: the worker wrote too fast"] if left_out else []
    lines += [str(line) for line in fields.get("lines", ())]
    return [said(name, line, plain=plain) for line in lines]


def said(name: str, text: str, *, plain: bool) -> str:
    """Format one line of a worker's output."""
    return _line(text) if plain else f"{printable(name)}: {_line(text)}"


def _line(text: str) -> str:
    return printable(text, keep="\t")
