"""The screen of `musterctl top`: problems first, then memory, tasks, pools and workers."""

import time

from rich.console import Group, RenderableType
from rich.table import Table
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
from musterd.supervisor.ctl.show import causes, duration, size
from musterd.supervisor.ctl.top_feed import Memory, Snapshot, Use
from musterd.supervisor.ctl.top_view import View, listed
from musterd.supervisor.text.printable import printable

PROBLEMS_SHOWN_MAX = 4
POOLS_SHOWN_MAX = 12
BREAKERS_SHOWN_MAX = 4
DEAD_SHOWN_MAX = 3
SCHEDULES_SHOWN_MAX = 3
EVENTS_SHOWN_MAX = 3
BAR_CELLS = 24
LOW_TERMINAL = 20  # lines: terminals with fewer get no empty lines
ROOM_FOR_ALL = 10**9  # lines, where the screen is printed once
WORKERS_MIN = 3  # lines kept for workers, however low the terminal
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
    gap = [] if 0 < height < LOW_TERMINAL else [_line("")]
    wrong = (unreachable(silent) if silent else now.health).problems
    parts: list[RenderableType] = [_headline(now, wrong, width)]
    parts += [_line(f"  {each.text}", _STYLE_OF[each.level]) for each in wrong[:PROBLEMS_SHOWN_MAX]]
    if len(wrong) > PROBLEMS_SHOWN_MAX:
        parts.append(_line(f"  ... and {len(wrong) - PROBLEMS_SHOWN_MAX} more", WARN))
    parts += [_memory_bar(now.memory, now.cpu_share), _flow(now)]
    if now.fleet.cluster is not None:
        parts.append(_line(f"cluster {headline(now.fleet.cluster)}"))
    parts += gap
    pools = now.fleet.pools if not height else now.fleet.pools[:POOLS_SHOWN_MAX]
    parts += [_pool_table(now, pools, width), *gap]
    used = len(parts) + len(pools)  # the table of pools is one part, but has a head
    workers = listed(now, view)
    free = height - used - 3 if height else ROOM_FOR_ALL  # the heads of workers, footer, "more"
    below = _below(now, max(free // BELOW_SHARE, free - max(WORKERS_MIN, len(workers))))
    room = max(WORKERS_MIN, free - len(below))
    first = _first(workers, view.chosen, room)
    parts.append(_worker_table(now, workers[first : first + room], width, view.chosen))
    shown = min(len(workers), room)
    parts += [_line(_of_workers(now, view, len(workers), shown), DIM), *below]
    if not height:
        return Group(*parts)
    filler = [_line("")] * (height - used - 1 - shown - 1 - len(below) - 1)
    return Group(*parts, *filler, _footer(view, refusal))


def _cluster_screen(now: Snapshot, area: tuple[int, int], silent: str) -> Group:
    """Render a cluster: nodes in the place of workers."""
    width, height = area
    gap = [] if 0 < height < LOW_TERMINAL else [_line("")]
    wrong = [Reason(CRITICAL, silent)] if silent else now.health.problems
    parts: list[RenderableType] = [_headline(now, wrong, width)]
    parts += [_line(f"  {each.text}", _STYLE_OF[each.level]) for each in wrong[:PROBLEMS_SHOWN_MAX]]
    pools = now.fleet.pools if not height else now.fleet.pools[:POOLS_SHOWN_MAX]
    parts += [_flow(now), *gap, _pool_table(now, pools, width), *gap]
    used = len(parts) + len(pools) + 1  # the table of pools is one part, but has a head; of nodes
    nodes = sorted(now.fleet.nodes, key=lambda each: each.state not in ("silent", "lost"))
    free = height - used - 2 if height else ROOM_FOR_ALL  # "more", footer
    below = _below(now, max(free // BELOW_SHARE, free - max(WORKERS_MIN, len(nodes))))
    room = max(WORKERS_MIN, free - len(below))
    shown = nodes[:room]
    hidden = len(nodes) - len(shown)
    more = f"  {hidden} more nodes: musterctl cluster nodes" if hidden else ""
    parts += [_node_table(shown), _line(more, DIM), *below]
    if not height:
        return Group(*parts)
    filler = [_line("")] * (height - used - len(shown) - 1 - len(below) - 1)
    return Group(*parts, *filler, _line(" q  quit", DIM))


def _node_table(nodes: list[NodeStatus]) -> Table:
    columns = [("NODE", "left"), ("STATE", "left"), ("RUNNING", "right"), ("SEEN", "right")]
    table = _plain_table(columns=[*columns, ("VERSION", "left"), ("POOLS", "left")])
    for node in nodes:
        table.add_row(
            _cell(node.name, "bold"),
            _cell(node.state, NODE_STYLES.get(node.state, "")),
            _cell(f"{node.running}/{node.places}"),
            _cell(short_duration(node.seen_seconds)),
            _cell(node.version, DIM),
            _cell(", ".join(f"{name} {places}" for name, places in node.pools.items())),
        )
    return table


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


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _headline(now: Snapshot, wrong: list[Reason], width: int) -> Table:
    fleet = now.fleet
    worst = _STYLE_OF[wrong[0].level] if wrong else GOOD
    word = "ALL OK" if not wrong else f"{len(wrong)} PROBLEM{'S' if len(wrong) > 1 else ''}"
    what = f"musterd {fleet.version} {fleet.state}"
    if fleet.database:
        what = printable(f"cluster {fleet.state}  PostgreSQL {fleet.database}")
    left = Text.assemble(
        (f" {word} ", f"reverse bold {'red' if worst == BAD else worst}"),
        f"  {what}",
        no_wrap=True,
        overflow="ellipsis",
    )
    right = f"pid {fleet.pid}  up {duration(fleet.uptime_seconds)}  " if fleet.pid else "  "
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
    """Render task rates, and the queue by priority."""
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
    """Make a table whose columns fit their content; the last takes the rest."""
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
    restarts = wide and not now.fleet.database  # a cluster counts none
    columns += [("RESTARTS", "right")] if restarts else []
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
        row += [_cell(str(pool.restarts))] if restarts else []
        table.add_row(*row, _cell("; ".join(note), DIM))
    return table


def _worker_table(now: Snapshot, workers: list[WorkerStatus], width: int, chosen: str) -> Table:
    columns = [("WORKER", "left"), ("STATE", "left"), ("PID", "right"), ("AGE", "right")]
    columns += [("MEM", "right"), ("CPU", "right"), ("TASKS", "right"), ("RST", "right")]
    table = _plain_table(columns=[*columns, ("DOING", "left")])
    for worker in workers:
        use = now.uses.get(worker.name, Use())
        state = worker.halt or worker.state if worker.state == RUNNING else worker.state
        table.add_row(
            _cell(worker.name, "bold reverse" if worker.name == chosen else "bold"),
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


def _below(now: Snapshot, limit: int) -> list[Text]:
    """Return lines of breakers, failed tasks, schedules and events, evenly up to the limit."""
    kinds = [_breakers(now), _dead(now), _schedules(now), _events(now)]
    taken = [0] * len(kinds)
    for _ in range(max(map(len, kinds))):
        for number, lines in enumerate(kinds):
            if taken[number] < len(lines) and sum(taken) < limit:
                taken[number] += 1
    return [line for lines, count in zip(kinds, taken, strict=True) for line in lines[:count]]


def _breakers(now: Snapshot) -> list[Text]:
    known = [each for each in now.breakers if each.state in SHUT]
    lines = [_line(f"breaker  {_breaker_text(b)}", WARN) for b in known[:BREAKERS_SHOWN_MAX]]
    if len(known) > BREAKERS_SHOWN_MAX:
        lines.append(_line(f"breaker  ... and {len(known) - BREAKERS_SHOWN_MAX} more", WARN))
    return lines


def _dead(now: Snapshot) -> list[Text]:
    """Return failed tasks, the newest first, with the id that `retry` takes."""
    lines = []
    for task in now.dead[:DEAD_SHOWN_MAX]:
        failure = task.failure
        why = f"{failure.type or failure.kind}: {failure.message}" if failure else ""
        ago = duration(max(0.0, now.at - task.finished_at))
        lines.append(_line(f"dead     {task.name} {ago} ago {task.id} {why}", WARN))
    return lines


def _schedules(now: Snapshot) -> list[Text]:
    """Return the schedules that are due next."""
    due = sorted((each for each in now.schedules if each.next_at), key=lambda each: each.next_at)
    lines = []
    for each in due[:SCHEDULES_SHOWN_MAX]:
        left = duration(max(0.0, each.next_at - now.at))
        last = f", last {each.last_state}" if each.last_state else ""
        lines.append(_line(f"schedule {each.name} in {left}: {each.task}{last}", DIM))
    return lines


def _events(now: Snapshot) -> list[Text]:
    """Return the latest warnings and errors."""
    lines = []
    for fields in now.events[-EVENTS_SHOWN_MAX:]:
        at = float(str(fields.get("at", 0)))
        ago = duration(max(0.0, now.at - at))
        named = ("worker", "node", "target", "pool")
        who = next((fields[name] for name in named if fields.get(name)), "")
        what = " ".join(
            str(part) for part in (fields.get("event"), who, fields.get("reason")) if part
        )
        lines.append(_line(f"{ago:>7} ago  {what}", DIM))
    return lines


def _footer(view: View, refusal: str) -> Text:
    """Render the keys, a question, the filter being typed, or a refusal."""
    if view.asked:
        return _line(f" restart {view.asked} after its task?   y  yes   any other key  no")
    if view.typing:
        return _line(f" / {view.words}_   Enter  keep   Esc  show all")
    if refusal:
        return _line(f" {refusal}", WARN)
    keys = {"q": "quit", "s": f"sort: {view.order}", "/": "filter", "j k": "select"}
    keys |= {"r": f"restart {view.chosen}"} if view.chosen else {}
    text = Text(style=DIM, no_wrap=True, overflow="ellipsis")
    for key, does in keys.items():
        text.append(f" {key} ", "reverse").append(f" {printable(does)}  ")
    return text


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
