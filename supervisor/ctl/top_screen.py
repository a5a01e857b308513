"""What `musterctl top` looks like: whether all is well, then what is not, then the details."""

import time
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from musterd.ipc.messages import PRIORITY_NAMES
from musterd.supervisor.ctl.show import causes, duration
from musterd.supervisor.ctl.top_feed import Memory, Snapshot, Use
from musterd.supervisor.printable import printable
from musterd.supervisor.status import (
    BACKOFF,
    BUSY,
    DRAINING,
    FATAL,
    RUNNING,
    STARTING,
    STOPPED,
    BreakerStatus,
    PoolStatus,
    WorkerStatus,
)

TROUBLES_SHOWN_MAX = 4
POOLS_SHOWN_MAX = 12
BREAKERS_SHOWN_MAX = 4
EVENTS_SHOWN_MAX = 3
BAR_CELLS = 24
LOW_TERMINAL = 20  # lines: with fewer, there are no empty ones
WORKERS_MIN = 3  # lines that stay for workers, however low the terminal

GOOD, WARN, BAD, DIM = "green", "yellow", "bold red", "bright_black"
STYLES = {
    RUNNING: GOOD,
    BUSY: "bold green",
    STARTING: WARN,
    DRAINING: WARN,
    BACKOFF: WARN,
    FATAL: BAD,
    STOPPED: DIM,
    "paused": WARN,
    "drained": WARN,
}
_OPEN = ("open", "forced-open", "half-open")


class Trouble(NamedTuple):
    style: str
    text: str


class View(NamedTuple):
    """What the person who looks has chosen."""

    first: int = 0  # worker that is shown first
    order: str = "name"


ORDERS = ("name", "cpu", "memory", "age")


# -- what is wrong ----------------------------------------------------------------------------


def troubles(now: Snapshot) -> list[Trouble]:
    """The worst first; empty if all is well."""
    fleet = now.fleet
    found = []
    if fleet.problem:
        found.append(Trouble(BAD, fleet.problem))
    if fleet.state in ("draining", "stopping", "starting"):
        found.append(Trouble(WARN, f"the daemon is {fleet.state}"))
    for pool in fleet.pools:
        found += _troubles_of(pool)
    shut = [each.target for each in now.breakers if each.state in _OPEN]
    if shut:
        sites = "1 site is" if len(shut) == 1 else f"{len(shut)} sites are"
        found.append(Trouble(WARN, f"{sites} left alone: {', '.join(shut[:5])}"))
    style = _memory_style(now.memory)
    if style != GOOD:
        found.append(Trouble(style, f"{now.memory.share:.0%} of the memory are in use"))
    return sorted(found, key=lambda each: each.style != BAD)


def _troubles_of(pool: PoolStatus) -> list[Trouble]:
    if pool.state == FATAL and pool.reason:
        return [Trouble(BAD, f"{pool.name} cannot start: {pool.reason}")]
    found = []
    for worker in pool.workers:
        if worker.state in (FATAL, BACKOFF):
            style = BAD if worker.state == FATAL else WARN
            found.append(Trouble(style, f"{worker.name} {worker.state}: {worker.reason}"))
    if pool.running < pool.size and not found:
        found.append(Trouble(WARN, f"{pool.name} has {pool.running} of {pool.size} workers"))
    if pool.halt:
        found.append(Trouble(WARN, f"{pool.name} is {pool.halt}: musterctl resume {pool.name}"))
    halted = [worker.name for worker in pool.workers if worker.halt and not pool.halt]
    if halted:
        found.append(Trouble(WARN, f"held back: {', '.join(halted)}"))
    return found


def _breaker_text(breaker: BreakerStatus) -> str:
    for_long = f" for {duration(breaker.open_seconds)}" if breaker.open_seconds else ""
    waiting = f", {breaker.waiting} wait" if breaker.waiting else ""
    return f"{breaker.target} is {breaker.state}{for_long}{waiting}"


# -- the screen -------------------------------------------------------------------------------


def screen(now: Snapshot, view: View, size: tuple[int, int], unreachable: str = "") -> Group:
    """Everything, for a terminal of this width and height; a height of 0 has room for all."""
    width, height = size
    gap = [] if 0 < height < LOW_TERMINAL else [_line("")]
    wrong = [Trouble(BAD, unreachable)] if unreachable else troubles(now)
    parts: list[RenderableType] = [_headline(now, wrong, width)]
    parts += [_line(f"  {each.text}", each.style) for each in wrong[:TROUBLES_SHOWN_MAX]]
    if len(wrong) > TROUBLES_SHOWN_MAX:
        parts.append(_line(f"  ... and {len(wrong) - TROUBLES_SHOWN_MAX} more", WARN))
    parts += [_memory_bar(now.memory, now.cpu_share), _flow(now), *gap]
    pools = now.fleet.pools if not height else now.fleet.pools[:POOLS_SHOWN_MAX]
    parts += [_pool_table(now, pools, width), *gap]
    below = _below(now)
    used = len(parts) - 1 + 1 + len(pools)  # the table of pools is one part, but has a head
    room = height - used - len(below) - 3 if height else 10**9  # heads, footer, "more"
    workers = ordered(now, view.order)
    if room < min(WORKERS_MIN, len(workers)):  # too low for everything: workers before history
        room, below = room + len(below), []
    room = max(WORKERS_MIN, room)
    first = max(0, min(view.first, len(workers) - room))
    parts.append(_worker_table(now, workers[first : first + room], width))
    shown = min(len(workers), room)
    more = f"  {len(workers) - shown} more workers: j k or arrows" if shown < len(workers) else ""
    parts += [_line(more, DIM), *below]
    if not height:
        return Group(*parts)
    filler = [_line("")] * (height - used - 1 - shown - 1 - len(below) - 1)
    return Group(*parts, *filler, _footer(view))


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _headline(now: Snapshot, wrong: list[Trouble], width: int) -> Table:
    fleet = now.fleet
    worst = wrong[0].style if wrong else GOOD
    word = "ALL WELL" if not wrong else f"{len(wrong)} TROUBLE{'S' if len(wrong) > 1 else ''}"
    left = Text.assemble(
        (f" {word} ", f"reverse bold {'red' if worst == BAD else worst}"),
        f"  musterd {fleet.version} {fleet.state}",
        no_wrap=True,
        overflow="ellipsis",
    )
    right = f"pid {fleet.pid}  up {duration(fleet.uptime_seconds)}  "
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    table = Table.grid(expand=True)
    table.add_column(ratio=1, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row(left, Text((right if width >= 72 else "") + clock, style=DIM))
    return table


def _memory_style(memory: Memory) -> str:
    if memory.share < memory.warning:
        return GOOD
    return WARN if memory.share < memory.critical else BAD


def _memory_bar(memory: Memory, cpu_share: float) -> Text:
    share, style = memory.share, _memory_style(memory)
    of = f" of {memory.source}" if memory.source else ""
    lines = f"warning {memory.warning:.0%} critical {memory.critical:.0%}"
    full = round(min(1.0, share) * BAR_CELLS)
    return Text.assemble(
        "memory ",
        ("█" * full, style),
        ("░" * (BAR_CELLS - full), DIM),
        (f" {share:4.0%}", style),
        f"  {size(memory.used_bytes)} of {size(memory.total_bytes)}{of}",
        f"  cpu {cpu_share:.0%}",
        (f"  {lines}", DIM),
        no_wrap=True,
        overflow="ellipsis",
    )


def _flow(now: Snapshot) -> Text:
    """Tasks: how fast they end, and how many of each priority wait."""
    pools = now.fleet.pools
    done = sum(now.done_rates.values())
    failed = sum(now.failed_rates.values())
    text = Text.assemble("tasks  ", (f"{done:.1f}/s done", "bold"), no_wrap=True)
    if failed:
        text.append(f"  {failed:.1f}/s failed", BAD)
    text.append("  queued")
    for name in PRIORITY_NAMES:
        count = sum(pool.queued.get(name, 0) for pool in pools)
        text.append(f" {name} {count} ", _queue_style(name, count))
    waiting = sum(pool.waiting for pool in pools)
    text.append(f" waiting {waiting}", "" if waiting else DIM)
    return text


def _queue_style(priority: str, count: int) -> str:
    if not count:
        return DIM
    return {"critical": BAD, "high": WARN}.get(priority, "")


def _queue_cell(priority: str, count: int) -> Text:
    return _cell(str(count), _queue_style(priority, count))


def _plain_table(*, columns: list[tuple[str, str]]) -> Table:
    """Columns that are as wide as they need; the last takes what is left."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=True, pad_edge=False)
    for number, (head, justify) in enumerate(columns):
        last = number == len(columns) - 1
        table.add_column(
            head,
            justify=justify,  # type: ignore[arg-type]
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if last else None,
        )
    return table


def _cell(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _pool_table(now: Snapshot, pools: list[PoolStatus], width: int) -> Table:
    wide = width >= 100
    columns = [("POOL", "left"), ("STATE", "left"), ("WORKERS", "left"), ("BUSY", "right")]
    levels = PRIORITY_NAMES if wide else ()
    columns += [(name.upper(), "right") for name in levels] or [("QUEUED", "right")]
    columns += [("DONE/S", "right"), ("FAILED", "right")]
    columns += [("RESTARTS", "right")] if wide else []
    table = _plain_table(columns=[*columns, ("NOTE", "left")])
    for pool in pools:
        state = pool.halt or pool.state
        missing = pool.running < pool.size
        queued = [(name, count) for name, count in pool.queued.items() if count]
        urgent = [] if wide else [each for each in queued if each[0] in ("critical", "high")]
        note = [f"{count} {name}" for name, count in urgent]
        note += [pool.reason] if pool.reason else []
        note += [f"lost: {causes(pool.lost)}"] if pool.lost else []
        row = [
            _cell(pool.name, "bold"),
            _cell(state, STYLES.get(state, "")),
            _cell(f"{pool.running}/{pool.size}", WARN if missing else ""),
            _cell(str(pool.busy), "" if pool.busy else DIM),
            *(_queue_cell(name, pool.queued.get(name, 0)) for name in levels),
            *([] if wide else [_queue_cell("", sum(pool.queued.values()))]),
            _cell(f"{now.done_rates.get(pool.name, 0.0):.1f}"),
            _cell(str(pool.failed), WARN if now.failed_rates.get(pool.name) else ""),
        ]
        row += [_cell(str(pool.restarts))] if wide else []
        table.add_row(*row, _cell("; ".join(note), DIM))
    return table


def ordered(now: Snapshot, order: str) -> list[WorkerStatus]:
    """Workers in trouble first; then as the person wants it."""
    workers = [worker for pool in now.fleet.pools for worker in pool.workers]
    none = Use()

    def key(worker: WorkerStatus) -> Any:
        use = now.uses.get(worker.name, none)
        by = {
            "cpu": -use.cpu_share,
            "memory": -(worker.memory_bytes or use.rss_bytes),
            "age": worker.uptime_seconds,
        }
        return (worker.state not in (FATAL, BACKOFF), by.get(order, 0.0))

    return sorted(workers, key=key)


def _worker_table(now: Snapshot, workers: list[WorkerStatus], width: int) -> Table:
    columns = [("WORKER", "left"), ("STATE", "left"), ("PID", "right"), ("AGE", "right")]
    columns += [("MEM", "right"), ("CPU", "right"), ("TASKS", "right"), ("RST", "right")]
    table = _plain_table(columns=[*columns, ("DOING", "left")])
    for worker in workers:
        use = now.uses.get(worker.name, Use())
        state = worker.halt or worker.state if worker.state == RUNNING else worker.state
        table.add_row(
            _cell(worker.name, "bold"),
            _cell(state, STYLES.get(state, "")),
            _cell(str(worker.pid) if worker.pid else "-", DIM),
            _cell(short_duration(worker.uptime_seconds) if worker.pid else "-"),
            _cell(_memory_of(worker, use)),
            _cell(f"{use.cpu_share:.0%}" if worker.pid else "-", _cpu_style(use)),
            _cell(str(worker.tasks_done)),
            _cell(str(worker.restarts), WARN if worker.restarts else DIM),
            _doing(worker, width),
        )
    return table


def _memory_of(worker: WorkerStatus, use: Use) -> str:
    if worker.memory_bytes:
        return size(worker.memory_bytes)
    return f"~{size(use.rss_bytes)}" if use.rss_bytes else "-"


def _cpu_style(use: Use) -> str:
    return WARN if use.cpu_share > 0.9 else "" if use.cpu_share >= 0.005 else DIM


def _doing(worker: WorkerStatus, width: int) -> Text:
    if not (worker.method or worker.task_id):
        return _cell(worker.reason, WARN if worker.state == BACKOFF else BAD)
    what = f"{worker.method} {duration(worker.task_seconds)}"
    return _cell(f"{what}  {worker.task_id}" if width >= 110 else what)


def _below(now: Snapshot) -> list[Text]:
    """Sites that are left alone, and the last that went wrong."""
    lines = []
    known = [each for each in now.breakers if each.state in _OPEN]
    for breaker in known[:BREAKERS_SHOWN_MAX]:
        lines.append(_line(f"breaker  {_breaker_text(breaker)}", WARN))
    if len(known) > BREAKERS_SHOWN_MAX:
        lines.append(_line(f"breaker  ... and {len(known) - BREAKERS_SHOWN_MAX} more", WARN))
    for fields in now.events[-EVENTS_SHOWN_MAX:]:
        at = float(str(fields.get("at", 0)))
        ago = duration(max(0.0, now.at - at))
        who = fields.get("worker") or fields.get("target") or fields.get("pool") or ""
        what = " ".join(
            str(part) for part in (fields.get("event"), who, fields.get("reason")) if part
        )
        lines.append(_line(f"{ago:>7} ago  {what}", DIM))
    return lines


def _footer(view: View) -> Text:
    return Text.assemble(
        (" q ", "reverse"),
        " quit  ",
        (" s ", "reverse"),
        f" sort: {view.order}  ",
        (" j k ", "reverse"),
        " scroll",
        style=DIM,
        no_wrap=True,
    )


# -- figures ----------------------------------------------------------------------------------


def size(count: float) -> str:
    """Bytes at a glance: 512K, 82M, 3.9G."""
    value = count / 1024
    for unit in "KMGT":
        if value < 1000 or unit == "T":
            return f"{value:.1f}{unit}" if value < 10 and unit in "GT" else f"{value:.0f}{unit}"
        value /= 1024
    raise AssertionError("never")


def short_duration(seconds: float) -> str:
    """An age in five characters: 7s, 12m, 2h05m, 3d."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d"
