"""musterctl's command about memory."""

from musterd.supervisor.api import rpc
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.core.model.sizes import shown
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, Settings, ask, command
from musterd.supervisor.ctl.output import emit

_BAR = 40  # characters
_STAGES = {
    "half": "each pool is halved",
    "one": "each pool keeps one worker",
    "sacrifice": "each pool keeps one worker, pools marked as sacrifice none",
    "kill": "as sacrifice, and workers that did not give way were killed",
}


@command("memory")
def memory(settings: Settings) -> int:
    """Show how much memory is in use, what is done about it, and who takes it."""
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
            f"{each.share:4.0%} {_bar(each.share, status)} {shown(each.used_bytes)} of "
            f"{shown(each.total_bytes)}: {each.name}"
        )
    level = f"level {status.level}"
    if status.stage in _STAGES:
        level += f": {_STAGES[status.stage]}"
    if not status.watched:
        return ["memory is not looked at: [monitor] enabled = false"]
    if not status.enabled:
        level = "level not judged: [memory] enabled = false"
    lines.append(
        f"{level} (warning {status.warning:.0%}, critical {status.critical:.0%}; "
        f"looked {show.duration(status.age_seconds)} ago)"
    )
    lines.append(
        f"waiting for memory: some {status.stalled_some:.0%}, all {status.stalled_full:.0%} "
        f"of the time; told by systemd {status.notifications} times"
    )
    machine = status.machine
    lines.append(
        f"cpu {machine.cpu_share:.0%} of {machine.cpus}, load {machine.load:.2f}; "
        f"disk {shown(machine.disk_used_bytes)} of {shown(machine.disk_total_bytes)}, "
        f"read {shown(machine.disk_read_rate)}/s, written {shown(machine.disk_write_rate)}/s; "
        f"network in {shown(machine.network_received_rate)}/s, "
        f"out {shown(machine.network_sent_rate)}/s"
    )
    lines.append(
        f"supervisor {shown(machine.supervisor_rss_bytes)}, "
        f"{machine.supervisor_cpu_share:.1%} of a processor"
    )
    return lines


def _bar(share: float, status: MemoryStatus) -> str:
    """What is used, with the two lines in it."""
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
            shown(pool.memory_bytes),
            shown(pool.footprint_bytes),
            "yes" if pool.sacrifice else "no",
        ]
        for pool in status.pools
    ]
    heads = ["POOL", "SIZE", "LIMIT", "HELD", "FIT", "MEMORY", "EACH", "SACRIFICE"]
    return show.table(heads, rows, 0, colour=show.coloured())


def _workers(status: MemoryStatus) -> str:
    workers = sorted(status.workers, key=lambda each: -each.memory_bytes)
    rows = [
        [each.name, str(each.pid), shown(each.memory_bytes) if each.memory_bytes else "-"]
        for each in workers
    ]
    return show.table(["WORKER", "PID", "MEMORY"], rows, 0, colour=show.coloured())
