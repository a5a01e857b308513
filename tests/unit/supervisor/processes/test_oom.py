"""OOM kills by the kernel, read from counters in a made-up /proc and /sys."""

from pathlib import Path

import pytest

from musterd.supervisor.processes.oom import CLAIM_NS, LIKELY, SURE, OomWatch

SECOND = 1_000_000_000
V1 = "4:memory:/some/group\n0::/\n"
V2 = "0::/system.slice/musterd.service\n"


class Machine:
    def __init__(self, root: Path, cgroup: str, events: str = "") -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(cgroup)
        self.events = root / "sys/fs/cgroup" / events if events else None
        if self.events is not None:
            self.events.parent.mkdir(parents=True)
        self.kill(0, 0)

    def kill(self, on_machine: int, in_group: int) -> None:
        (self.root / "proc/vmstat").write_text(f"nr_free_pages 5\noom_kill {on_machine}\nswap 3\n")
        if self.events is not None:
            self.events.write_text(f"oom 9\noom_kill {in_group}\noom_group_kill 0\n")


@pytest.mark.parametrize(
    ("cgroup", "events"),
    [
        (V2, "system.slice/musterd.service/memory.events"),
        (V2, "memory.events"),
        (V2, "unified/system.slice/musterd.service/memory.events"),
        (V1, "memory/some/group/memory.oom_control"),
        (V1, "memory/memory.oom_control"),
    ],
)
def test_a_kill_that_our_control_group_counted_is_sure(
    tmp_path: Path, cgroup: str, events: str
) -> None:
    machine = Machine(tmp_path, cgroup, events)
    watch = OomWatch(tmp_path)
    assert watch.verdict(1 * SECOND) == ""
    machine.kill(1, 1)
    assert watch.verdict(2 * SECOND) == SURE
    assert watch.verdict(3 * SECOND) == "", "one kill explains one end"


def test_a_kill_that_only_the_machine_counted_is_likely(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2, "memory.events")
    watch = OomWatch(tmp_path)
    machine.kill(1, 0)
    assert watch.verdict(1 * SECOND) == LIKELY
    assert watch.verdict(1 * SECOND) == ""


def test_kills_before_the_start_and_long_ago_explain_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2, "memory.events")
    machine.kill(3, 3)
    watch = OomWatch(tmp_path)
    assert watch.verdict(1 * SECOND) == ""
    machine.kill(4, 4)
    watch.sample(2 * SECOND)
    assert watch.verdict(2 * SECOND + CLAIM_NS + 1) == ""


def test_an_increase_that_was_seen_before_the_end_still_explains_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2, "memory.events")
    watch = OomWatch(tmp_path)
    machine.kill(2, 2)
    for second in range(1, 5):
        watch.sample(second * SECOND)
    assert [watch.verdict(5 * SECOND) for _ in range(3)] == [SURE, SURE, ""]


def test_where_nothing_is_counted_nothing_is_said(tmp_path: Path) -> None:
    assert OomWatch(tmp_path).verdict(1) == ""


def test_the_counter_of_this_machine_is_found() -> None:
    watch = OomWatch()
    watch.sample(1)
    assert watch.verdict(2) in ("", SURE, LIKELY)
