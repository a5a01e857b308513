"""musterctl memory: what is used, by whom, and what is done about it."""

from musterd.supervisor.api import rpc
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, Settings, ask, command
from musterd.supervisor.ctl.output import emit
from musterd.supervisor.ctl.show import size

_BAR = 40  # characters
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
    parts = ["\n".join(_overview(status))]
    if status.pools:
        parts.append(_pools(status))
    if status.workers:
        parts.append(_workers(status))
    return parts


def _overview(status: MemoryStatus) -> list[str]:
    lines = []
    for each in status.sources:
        lines.append(
            f"{each.share:4.0%} {_bar(each.share, status)} {size(each.used_bytes)} of "
            f"{size(each.total_bytes)}: {each.name}"
        )
    level = f"level {status.level}"
    if status.stage in _STAGES:
        level += f": {_STAGES[status.stage]}"
    if not status.watched:
        return ["memory is not monitored: [monitor] enabled = false"]
    if not status.enabled:
        level = "no limits: [memory] enabled = false"
    lines.append(
        f"{level} (warning {status.warning:.0%}, critical {status.critical:.0%}; "
        f"sampled {show.duration(status.age_seconds)} ago)"
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


def _bar(share: float, status: MemoryStatus) -> str:
    """Draw what is used, with the thresholds marked."""
    cells = ["#" if cell < share * _BAR else "." for cell in range(_BAR)]
    for line in (status.warning, status.critical):
        cells[min(_BAR - 1, int(line * _BAR))] = "|"
    return "[" + "".join(cells) + "]"


def _pools(status: MemoryStatus) -> str:
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
        for pool in status.pools
    ]
    heads = ["POOL", "SIZE", "LIMIT", "HELD", "FIT", "MEMORY", "EACH", "SACRIFICE"]
    return show.table(heads, rows, 0, colour=show.coloured())


def _workers(status: MemoryStatus) -> str:
    workers = sorted(status.workers, key=lambda each: -each.memory_bytes)
    rows = [
        [each.name, str(each.pid), size(each.memory_bytes) if each.memory_bytes else "-"]
        for each in workers
    ]
    return show.table(["WORKER", "PID", "MEMORY"], rows, 0, colour=show.coloured())
