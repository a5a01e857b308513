"""musterctl memory: what is used, by whom, and what is done about it."""

from musterd.supervisor.api import rpc
from musterd.supervisor.api.memory import MemoryStatus, SourceStatus
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, Settings, ask, command
from musterd.supervisor.ctl.output import emit
from musterd.supervisor.ctl.show import size
from musterd.supervisor.ctl.table import BELOW, Column, Paper, paper, table
from musterd.supervisor.text.fitting import cells, wrapped
from musterd.supervisor.text.printable import printable

_BAR, _BAR_MIN = 40, 12  # characters
_POOLS = (
    Column("POOL", name=True),
    Column("SIZE"),
    Column("LIMIT"),
    Column("HELD"),
    Column("FIT"),
    Column("MEMORY"),
    Column("EACH"),
    Column("SACRIFICE", rank=1, below=lambda cell: "sacrifice" if cell == "yes" else ""),
)
_WORKERS = (Column("WORKER", name=True), Column("PID"), Column("MEMORY"))
_STAGES = {
    "half": "each pool is halved",
    "one": "each pool keeps one worker",
    "sacrifice": "each pool keeps one worker, pools marked as sacrifice none",
    "kill": "as sacrifice, and workers that did not stop were killed",
}


@command("memory")
def memory(settings: Settings) -> int:
    """Show memory use by source, pool and worker, and limits."""
    status = ask(settings, rpc.ShowMemory(), MemoryStatus)
    if not settings.json:
        emit("\n\n".join(_parts(status)))
    return DONE


def _parts(status: MemoryStatus) -> list[str]:
    on = paper()
    lines = [_source(each, status, on) for each in status.sources]
    parts = ["\n".join([*lines, *(show.prose(line, on) for line in _overview(status))])]
    if status.pools:
        parts.append(_pools(status, on))
    if status.workers:
        parts.append(_workers(status, on))
    return parts


def _overview(status: MemoryStatus) -> list[str]:
    lines = []
    level = f"level {status.level}"
    if status.stage in _STAGES:
        level += f": {_STAGES[status.stage]}"
    if not status.watched:
        return ["memory is not monitored: [monitor] enabled = false"]
    if not status.enabled:
        level = "no limits: [memory] enabled = false"
    lines.append(
        f"{level} (warning {status.warning:.0%}, critical {status.critical:.0%}; "
        f"{_sampled(status.age_seconds)})"
    )
    lines.append(
        f"memory stalls: some {status.stalled_some:.0%}, full {status.stalled_full:.0%} "
        f"of the time; systemd warned {status.notifications} times"
    )
    machine = status.machine
    lines.append(
        f"cpu {machine.cpu_share:.0%} of {machine.cpus}, load {machine.load:.2f}; "
        f"disk {size(machine.disk_used_bytes)} of {size(machine.disk_total_bytes)}, "
        f"read {size(machine.disk_read_rate)}/s, written {size(machine.disk_write_rate)}/s; "
        f"network in {size(machine.network_received_rate)}/s, "
        f"out {size(machine.network_sent_rate)}/s"
    )
    lines.append(
        f"supervisor {size(machine.supervisor_rss_bytes)}, "
        f"{machine.supervisor_cpu_share:.1%} of one cpu"
    )
    return lines


def _sampled(age: float | None) -> str:
    return "not sampled yet" if age is None else f"sampled {show.duration(age)} ago"


def _source(each: SourceStatus, status: MemoryStatus, on: Paper) -> str:
    """Return a line about one source of memory, with a bar that leaves room for the words."""
    words = f"{size(each.used_bytes)} of {size(each.total_bytes)}: {each.name}"
    long = max(_BAR_MIN, min(_BAR, on.columns - len("100% [] ") - cells(words) or _BAR))
    bar = _bar(each.share, status, long if on.columns else _BAR)
    return "\n".join(
        wrapped(printable(words), on.columns, first=f"{each.share:4.0%} {bar} ", indent=BELOW)
    )


def _bar(share: float, status: MemoryStatus, long: int) -> str:
    """Draw what is used, with the thresholds marked."""
    cells = ["#" if cell < share * long else "." for cell in range(long)]
    for line in (status.warning, status.critical):
        cells[min(long - 1, int(line * long))] = "|"
    return "[" + "".join(cells) + "]"


def _pools(status: MemoryStatus, on: Paper) -> str:
    """Return the table of pools, those first that memory holds back."""
    rows = [
        [
            pool.name,
            str(pool.size),
            "-" if pool.limit is None else str(pool.limit),
            str(pool.held),
            str(pool.recommended_workers),
            size(pool.memory_bytes),
            size(pool.footprint_bytes),
            "yes" if pool.sacrifice else "no",
        ]
        for pool in sorted(status.pools, key=lambda each: not each.held)
    ]
    return table(_POOLS, rows, on)


def _workers(status: MemoryStatus, on: Paper) -> str:
    workers = sorted(status.workers, key=lambda each: -each.memory_bytes)
    rows = [
        [each.name, str(each.pid), size(each.memory_bytes) if each.memory_bytes else "-"]
        for each in workers
    ]
    return table(_WORKERS, rows, on)
