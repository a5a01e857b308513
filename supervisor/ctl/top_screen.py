"""The screen of `musterctl top`: problems first, then memory, tasks, pools and workers."""

import time
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from musterd.ipc.wire.messages import PRIORITY_NAMES
from musterd.supervisor.api.cluster import headline
from musterd.supervisor.api.status import (
    BACKOFF,
    BUSY,
    DRAINING,
    FATAL,
    RUNNING,
    STARTING,
    STOPPED,
    BreakerStatus,
    NodeStatus,
    PoolStatus,
    WorkerStatus,
)
from musterd.supervisor.api.verdict import BAD as CRITICAL
from musterd.supervisor.api.verdict import SHUT, WARNING, Reason, unreachable
from musterd.supervisor.ctl.show import causes, duration, pool_rank, size
from musterd.supervisor.ctl.table import GAP, Column, layout
from musterd.supervisor.ctl.top_feed import Memory, Snapshot, Use
from musterd.supervisor.ctl.top_view import View, listed
from musterd.supervisor.text.fitting import ELLIPSIS, cells, clip, padded, wrapped
from musterd.supervisor.text.printable import printable

PROBLEMS_SHOWN_MAX = 4  # each on a line; fewer may take as many lines
IDS_FROM = 110  # columns: narrower terminals have no room for ids of tasks
POOLS_SHOWN_MAX = 12
BREAKERS_SHOWN_MAX = 4
DEAD_SHOWN_MAX = 3
SCHEDULES_SHOWN_MAX = 3
EVENTS_SHOWN_MAX = 3
BAR_CELLS, BAR_CELLS_NARROW = 24, 18
LOW_TERMINAL = 20  # lines: terminals with fewer get no empty lines
ROOM_FOR_ALL = 10**9  # lines, where the screen is printed once
WORKERS_MIN = 3  # lines kept for workers, however low the terminal
POOLS_MIN = 2
LINES_BELOW_POOLS = WORKERS_MIN + 6  # two heads, two about what has no room, a gap, the keys
BELOW_SHARE = 3  # the part below the workers gets one line in this many, and unused ones

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
NODE_STYLES = {"alive": GOOD, "draining": WARN, "silent": WARN, "lost": BAD, "left": DIM}
_STYLE_OF = {WARNING: WARN, CRITICAL: BAD}  # of a reason


class Line(NamedTuple):
    """A line of text: as many whole words as the terminal has room for."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(clip(printable(self.text), options.max_width), style=self.style, no_wrap=True)


class Parts(NamedTuple):
    """A line of several parts, each with its style: as many as there is room for."""

    parts: list[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room, text = options.max_width, Text(no_wrap=True)
        parts = [each for each in self.parts if each[0]]
        for number, (part, style) in enumerate(parts):
            more = 2 if number < len(parts) - 1 else 0  # for the mark of what is left out
            if text.cell_len + cells(part.rstrip()) + more > room:
                text.append(f" {ELLIPSIS}" if text.cell_len else part)
                break
            text.append(part, style)
        yield text


class Cell(NamedTuple):
    text: str
    style: str = ""


def _table(columns: list[Column], rows: list[list[Cell]], width: int) -> Text:
    """Render a table that is as wide as the terminal; what has no room is left out."""
    laid = layout(columns, [[cell.text for cell in row] for row in rows], width, below=False)
    text = Text(GAP.join(laid.heads).rstrip(), style="", no_wrap=True)
    text.stylize("bold")
    for row, fitted in zip(rows, laid.rows, strict=True):
        text.append("\n")
        for at, shown in zip(laid.kept, fitted, strict=True):
            text.append(shown, row[at].style).append(GAP if at != laid.kept[-1] else "")
    return text


def _breaker_text(breaker: BreakerStatus) -> str:
    for_long = f" for {duration(breaker.open_seconds)}" if breaker.open_seconds else ""
    waiting = f", {breaker.waiting} waiting" if breaker.waiting else ""
    return f"{breaker.target} is {breaker.state}{for_long}{waiting}"


# -- the screen -------------------------------------------------------------------------------


def screen(
    now: Snapshot, view: View, area: tuple[int, int], silent: str = "", refusal: str = ""
) -> Group:
    """Render everything for a terminal of this width and height; height 0 has room for all.

    `silent` says why the daemon does not answer: the snapshot is old then."""
    if now.fleet.database:
        return _cluster_screen(now, area, silent)
    width, height = area
    gap = [] if 0 < height < LOW_TERMINAL else [Line("")]
    wrong = (unreachable(silent) if silent else now.health).problems
    parts: list[RenderableType] = [_headline(now, wrong, width)]
    parts += _problems(wrong, area)
    if len(wrong) > PROBLEMS_SHOWN_MAX:
        parts.append(Line(f"  ... and {len(wrong) - PROBLEMS_SHOWN_MAX} more", WARN))
    parts += [_memory_bar(now.memory, now.cpu_share, width), _flow(now)]
    if now.fleet.cluster is not None:
        parts.append(Line(f"cluster {headline(now.fleet.cluster)}"))
    parts += gap
    pools, more_pools = _pools_shown(now, height, len(parts))
    parts += [_pool_table(now, pools, width), *more_pools, *gap]
    used = len(parts) + len(pools)  # the table of pools is one part, but has a head
    workers = listed(now, view)
    free = height - used - 3 if height else ROOM_FOR_ALL  # the heads of workers, footer, "more"
    below = _below(now, width, max(free // BELOW_SHARE, free - max(WORKERS_MIN, len(workers))))
    room = max(WORKERS_MIN, free - len(below))
    first = _first(workers, view.chosen, room)
    parts.append(_worker_table(now, workers[first : first + room], width, view.chosen))
    shown = min(len(workers), room)
    parts += [Line(_of_workers(now, view, len(workers), shown), DIM), *below]
    if not height:
        return Group(*parts)
    filler = [Line("")] * (height - used - 1 - shown - 1 - len(below) - 1)
    return Group(*parts, *filler, _footer(view, refusal))


def _problems(wrong: list[Reason], area: tuple[int, int]) -> list[Line]:
    """Return what is wrong, as far as there is room."""
    width, height = area
    shown = wrong[:PROBLEMS_SHOWN_MAX]
    most = PROBLEMS_SHOWN_MAX // max(1, len(shown)) if height >= LOW_TERMINAL else 1
    return [
        Line(text, _STYLE_OF[each.level])
        for each in shown
        for text in wrapped(printable(each.text), width, first="  ", lines_max=most)
    ]


def _pools_shown(now: Snapshot, height: int, above: int) -> tuple[list[PoolStatus], list[Line]]:
    """Return the pools that there is room for, problems first, and a line about the others."""
    pools = sorted(now.fleet.pools, key=pool_rank)
    room = max(POOLS_MIN, min(POOLS_SHOWN_MAX, height - above - LINES_BELOW_POOLS))
    if not height or len(pools) <= room:
        return pools, []
    hidden = len(pools) - (room - 1)
    return pools[: room - 1], [Line(f"  {hidden} more pools: musterctl status", DIM)]


def _cluster_screen(now: Snapshot, area: tuple[int, int], silent: str) -> Group:
    """Render a cluster: nodes in the place of workers."""
    width, height = area
    gap = [] if 0 < height < LOW_TERMINAL else [Line("")]
    wrong = [Reason(CRITICAL, silent)] if silent else now.health.problems
    parts: list[RenderableType] = [_headline(now, wrong, width)]
    parts += _problems(wrong, area)
    parts += [_flow(now), *gap]
    pools, more_pools = _pools_shown(now, height, len(parts))
    parts += [_pool_table(now, pools, width), *more_pools, *gap]
    used = len(parts) + len(pools) + 1  # the table of pools is one part, but has a head; of nodes
    nodes = sorted(now.fleet.nodes, key=lambda each: each.state not in ("silent", "lost"))
    free = height - used - 2 if height else ROOM_FOR_ALL  # "more", footer
    below = _below(now, width, max(free // BELOW_SHARE, free - max(WORKERS_MIN, len(nodes))))
    room = max(WORKERS_MIN, free - len(below))
    shown = nodes[:room]
    hidden = len(nodes) - len(shown)
    more = f"  {hidden} more nodes: musterctl cluster nodes" if hidden else ""
    parts += [_node_table(shown, width), Line(more, DIM), *below]
    if not height:
        return Group(*parts)
    filler = [Line("")] * (height - used - len(shown) - 1 - len(below) - 1)
    return Group(*parts, *filler, Line(" q  quit", DIM))


_NODES = [
    Column("NODE", name=True),
    Column("STATE"),
    Column("RUNNING", right=True),
    Column("SEEN", right=True),
    Column("VERSION", rank=1),
    Column("POOLS", rank=9),
]


def _node_table(nodes: list[NodeStatus], width: int) -> Text:
    rows = [
        [
            Cell(node.name, "bold"),
            Cell(node.state, NODE_STYLES.get(node.state, "")),
            Cell(f"{node.running}/{node.places}"),
            Cell(short_duration(node.seen_seconds)),
            Cell(node.version, DIM),
            Cell(", ".join(f"{name} {places}" for name, places in node.pools.items())),
        ]
        for node in nodes
    ]
    return _table(_NODES, rows, width)


def _first(workers: list[WorkerStatus], chosen: str, room: int) -> int:
    """Return the first worker to show, such that the selected one is in view."""
    names = [worker.name for worker in workers]
    at = names.index(chosen) if chosen in names else 0
    return max(0, min(at - room // 2, len(workers) - room))


def _of_workers(now: Snapshot, view: View, found: int, shown: int) -> str:
    """Say how many workers are out of view."""
    if view.words and not found:
        return "  no matching workers: Esc shows all"
    told = [f"{found - shown} more workers: j k or arrows"] if shown < found else []
    hidden = sum(len(pool.workers) for pool in now.fleet.pools) - found
    told += [f"{hidden} filtered out: Esc shows all"] if view.words and hidden else []
    return f"  {'; '.join(told)}" if told else ""


def _headline(now: Snapshot, wrong: list[Reason], width: int) -> Text:
    fleet = now.fleet
    worst = _STYLE_OF[wrong[0].level] if wrong else GOOD
    word = "ALL OK" if not wrong else f"{len(wrong)} PROBLEM{'S' if len(wrong) > 1 else ''}"
    what = f"musterd {fleet.version} {fleet.state}"
    if fleet.database:
        what = f"cluster {fleet.state}  PostgreSQL {fleet.database}"
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    right = f"pid {fleet.pid}  up {duration(fleet.uptime_seconds)}  " if fleet.pid else "  "
    right = (right if width >= 72 else "") + clock
    room = max(1, width - cells(f" {word}   {right} "))
    return Text.assemble(
        (f" {word} ", f"reverse bold {'red' if worst == BAD else worst}"),
        f"  {padded(clip(printable(what), room), room)}",
        (right, DIM),
        no_wrap=True,
    )


def _memory_style(memory: Memory) -> str:
    if memory.share < memory.warning:
        return GOOD
    return WARN if memory.share < memory.critical else BAD


def _memory_bar(memory: Memory, cpu_share: float, width: int) -> Parts:
    share, style = memory.share, _memory_style(memory)
    of = f" of {memory.source}" if memory.source else ""
    bar = BAR_CELLS if width >= 90 else BAR_CELLS_NARROW
    full = round(min(1.0, share) * bar)
    return Parts(
        [
            ("memory ", ""),
            ("█" * full, style),
            ("░" * (bar - full), DIM),
            (f" {share:4.0%}", style),
            (f"  {size(memory.used_bytes)} of {size(memory.total_bytes)}", ""),
            (f"  cpu {cpu_share:.0%}", ""),
            (f"  warning {memory.warning:.0%}", DIM),
            (f" critical {memory.critical:.0%}", DIM),
            (printable(of), ""),
        ]
    )


def _flow(now: Snapshot) -> Parts:
    """Render task rates, and the queue by priority."""
    pools = now.fleet.pools
    done = sum(now.done_rates.values())
    failed = sum(now.failed_rates.values())
    parts = [("tasks  ", ""), (f"{done:.1f}/s done", "bold")]
    if failed:
        parts.append((f"  {failed:.1f}/s failed", BAD))
    for number, name in enumerate(PRIORITY_NAMES):
        count = sum(pool.queued.get(name, 0) for pool in pools)
        parts.append(("" if number else "  queued", ""))
        parts.append((f" {name} {count} ", _queue_style(name, count)))
    waiting = sum(pool.waiting for pool in pools)
    return Parts([*parts, (f" waiting {waiting}", "" if waiting else DIM)])


def _queue_style(priority: str, count: int) -> str:
    if not count:
        return DIM
    return {"critical": BAD, "high": WARN}.get(priority, "")


def _queue_cell(priority: str, count: int) -> Cell:
    return Cell(str(count), _queue_style(priority, count))


def _pool_table(now: Snapshot, pools: list[PoolStatus], width: int) -> Text:
    wide = width >= 100
    columns = [Column("POOL", name=True), Column("STATE"), Column("WORKERS")]
    columns += [Column("BUSY", rank=2)]
    levels = PRIORITY_NAMES if wide else ()
    columns += [Column(name.upper()) for name in levels] or [Column("QUEUED")]
    columns += [Column("DONE/S", rank=1, right=True), Column("FAILED", rank=3)]
    restarts = wide and not now.fleet.database  # a cluster counts none
    columns += [Column("RESTARTS", rank=1)] if restarts else []
    rows = []
    for pool in pools:
        state = pool.halt or pool.state
        missing = pool.running < pool.size
        queued = [(name, count) for name, count in pool.queued.items() if count]
        urgent = [] if wide else [each for each in queued if each[0] in ("critical", "high")]
        note = [pool.reason] if pool.reason else []
        note += [f"{count} {name}" for name, count in urgent]
        note += [f"lost: {causes(pool.lost)}"] if pool.lost else []
        row = [
            Cell(pool.name, "bold"),
            Cell(state, STYLES.get(state, "")),
            Cell(f"{pool.running}/{pool.size}", WARN if missing else ""),
            Cell(str(pool.busy), "" if pool.busy else DIM),
            *(_queue_cell(name, pool.queued.get(name, 0)) for name in levels),
            *([] if wide else [_queue_cell("", sum(pool.queued.values()))]),
            Cell(f"{now.done_rates.get(pool.name, 0.0):.1f}"),
            Cell(str(pool.failed), WARN if now.failed_rates.get(pool.name) else ""),
        ]
        row += [Cell(str(pool.restarts))] if restarts else []
        rows.append([*row, Cell("; ".join(note), DIM)])
    return _table([*columns, Column("NOTE", rank=9)], rows, width)


_WORKERS = [
    Column("WORKER", name=True),
    Column("STATE"),
    Column("PID", rank=2),
    Column("AGE", rank=3, right=True),
    Column("MEM", right=True),
    Column("CPU", right=True),
    Column("TASKS", rank=1),
    Column("RST", rank=4),
    Column("DOING", rank=9),
]


def _worker_table(now: Snapshot, workers: list[WorkerStatus], width: int, chosen: str) -> Text:
    rows = []
    for worker in workers:
        use = now.uses.get(worker.name, Use())
        state = worker.halt or worker.state if worker.state == RUNNING else worker.state
        rows.append(
            [
                Cell(worker.name, "bold reverse" if worker.name == chosen else "bold"),
                Cell(state, STYLES.get(state, "")),
                Cell(str(worker.pid) if worker.pid else "-", DIM),
                Cell(short_duration(worker.uptime_seconds) if worker.pid else "-"),
                Cell(_memory_of(worker, use)),
                Cell(f"{use.cpu_share:.0%}" if worker.pid else "-", _cpu_style(use)),
                Cell(str(worker.tasks_done)),
                Cell(str(worker.restarts), WARN if worker.restarts else DIM),
                _doing(worker, width),
            ]
        )
    return _table(_WORKERS, rows, width)


def _memory_of(worker: WorkerStatus, use: Use) -> str:
    if worker.memory_bytes:
        return size(worker.memory_bytes)
    return f"~{size(use.rss_bytes)}" if use.rss_bytes else "-"


def _cpu_style(use: Use) -> str:
    return WARN if use.cpu_share > 0.9 else "" if use.cpu_share >= 0.005 else DIM


def _doing(worker: WorkerStatus, width: int) -> Cell:
    if not (worker.method or worker.task_id):
        return Cell(worker.reason, WARN if worker.state == BACKOFF else BAD)
    what = f"{worker.method} {duration(worker.task_seconds)}"
    return Cell(f"{what}  {worker.task_id}" if width >= IDS_FROM else what)


def _below(now: Snapshot, width: int, limit: int) -> list[Line]:
    """Return lines of breakers, failed tasks, schedules and events, evenly up to the limit."""
    kinds = [_breakers(now), _dead(now, width), _schedules(now), _events(now)]
    taken = [0] * len(kinds)
    for _ in range(max(map(len, kinds))):
        for number, lines in enumerate(kinds):
            if taken[number] < len(lines) and sum(taken) < limit:
                taken[number] += 1
    return [line for lines, count in zip(kinds, taken, strict=True) for line in lines[:count]]


def _breakers(now: Snapshot) -> list[Line]:
    known = [each for each in now.breakers if each.state in SHUT]
    lines = [Line(f"breaker  {_breaker_text(b)}", WARN) for b in known[:BREAKERS_SHOWN_MAX]]
    if len(known) > BREAKERS_SHOWN_MAX:
        lines.append(Line(f"breaker  ... and {len(known) - BREAKERS_SHOWN_MAX} more", WARN))
    return lines


def _dead(now: Snapshot, width: int) -> list[Line]:
    """Return failed tasks, the newest first, with the id that `retry` takes if there is room."""
    lines = []
    for task in now.dead[:DEAD_SHOWN_MAX]:
        failure = task.failure
        why = f"{failure.type or failure.kind}: {failure.message}" if failure else ""
        ago = duration(max(0.0, now.at - (task.finished_at or now.at)))
        id_ = f"{task.id} " if width >= IDS_FROM else ""
        lines.append(Line(f"dead     {task.name} {ago} ago {id_}{why}", WARN))
    return lines


def _schedules(now: Snapshot) -> list[Line]:
    """Return the schedules that are due next."""
    due = [(each.next_at, each) for each in now.schedules if each.next_at is not None]
    due.sort(key=lambda pair: pair[0])
    lines = []
    for at, each in due[:SCHEDULES_SHOWN_MAX]:
        left = duration(max(0.0, at - now.at))
        last = f", last {each.last_state}" if each.last_state else ""
        lines.append(Line(f"schedule {each.name} in {left}: {each.task}{last}", DIM))
    return lines


def _events(now: Snapshot) -> list[Line]:
    """Return the latest warnings and errors."""
    lines = []
    for event in now.events[-EVENTS_SHOWN_MAX:]:
        ago = duration(max(0.0, now.at - event.at))
        who = event.worker or event.node or event.target or event.pool
        what = " ".join(part for part in (event.event, who, event.reason) if part)
        lines.append(Line(f"{ago:>7} ago  {what}", DIM))
    return lines


def _footer(view: View, refusal: str) -> Line | Parts:
    """Render the keys, a question, the filter being typed, or a refusal."""
    if view.asked:
        return Line(f" restart {view.asked} after its task?   y  yes   any other key  no")
    if view.typing:
        return Line(f" / {view.words}_   Enter  keep   Esc  show all")
    if refusal:
        return Line(f" {refusal}", WARN)
    keys = {"q": "quit", "s": f"sort: {view.order}", "/": "filter", "j k": "select"}
    keys |= {"r": f"restart {view.chosen}"} if view.chosen else {}
    parts = [
        part
        for key, does in keys.items()
        for part in ((f" {key} ", "reverse"), (f" {printable(does)}  ", DIM))
    ]
    return Parts(parts)


def short_duration(seconds: float) -> str:
    """Format an age in five characters: 7s, 12m, 2h05m, 3d."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d"
