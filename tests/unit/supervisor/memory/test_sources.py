"""Readings of the machine's memory, its control groups and its processes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from musterd.supervisor.memory.pss import tree_sizes
from musterd.supervisor.memory.sources import MACHINE, MemorySources, Stalls

MIB = 1024 * 1024
V2 = "26 25 0:23 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
V1 = (
    "30 25 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
    "31 25 0:27 / /sys/fs/cgroup/cpu rw shared:10 - cgroup cgroup rw,cpu\n"
)


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Return a function that writes files below a root, which stands for / of another machine."""

    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def groups(root: Path) -> list[tuple[str, int, int]]:
    machine, *others = MemorySources(root).read()
    assert machine.name == MACHINE
    return [(each.name, each.total_bytes, each.used_bytes) for each in others]


def v2(path: str, limit: str, current: int, cache: int = 0) -> dict[str, str]:
    here = f"sys/fs/cgroup/{path}"
    return {
        f"{here}/memory.max": f"{limit}\n",
        f"{here}/memory.current": f"{current}\n",
        f"{here}/memory.stat": f"anon 1\ninactive_file {cache // 2}\nactive_file {cache // 2}\n",
    }


def test_a_machine_without_control_groups_has_its_memory(machine) -> None:
    (source,) = MemorySources(machine({})).read()
    assert source.name == MACHINE
    assert source.total_bytes == psutil.virtual_memory().total
    assert 0 < source.share < 1


def test_the_limit_of_our_group_and_of_those_above_it_count(machine) -> None:
    root = machine(
        {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/system.slice/musterd.service\n"}
        | v2("system.slice/musterd.service", str(500 * MIB), 300 * MIB, cache=100 * MIB)
        | v2("system.slice", str(900 * MIB), 400 * MIB)
        | v2("elsewhere", str(1 * MIB), 1 * MIB)
    )
    assert groups(root) == [
        ("the control group /system.slice/musterd.service", 500 * MIB, 200 * MIB),
        ("the control group /system.slice", 900 * MIB, 400 * MIB),
    ]


def test_a_group_without_a_limit_is_the_machine(machine) -> None:
    total = psutil.virtual_memory().total
    root = machine(
        {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/a/b\n"}
        | v2("a/b", "max", 300 * MIB)
        | v2("a", str(2 * total), 300 * MIB)
    )
    assert groups(root) == []


def test_a_limit_that_is_set_later_counts_from_then_on(machine) -> None:
    root = machine(
        {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/a\n"} | v2("a", "max", 30 * MIB)
    )
    sources = MemorySources(root)
    assert len(sources.read()) == 1
    machine(v2("a", str(100 * MIB), 30 * MIB))
    assert sources.read()[1].share == pytest.approx(0.3)


def test_cgroup_v1_is_understood(machine) -> None:
    here = "sys/fs/cgroup/memory/box"
    root = machine(
        {
            "proc/self/mountinfo": V1,
            "proc/self/cgroup": "4:memory:/box\n1:cpu:/other\n0::/\n",
            f"{here}/memory.limit_in_bytes": str(200 * MIB),
            f"{here}/memory.usage_in_bytes": str(150 * MIB),
            f"{here}/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        }
    )
    assert groups(root) == [("the control group /box", 200 * MIB, 100 * MIB)]


def test_in_a_container_that_sees_the_hosts_path_the_top_is_ours(machine) -> None:
    root = machine(
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/docker/0123abc\n",
            "proc/pressure/memory": "some avg10=1.00\n",
            "sys/fs/cgroup/memory.pressure": "some avg10=20.00\n",
        }
        | v2("", str(100 * MIB), 60 * MIB)
    )
    assert groups(root) == [("the control group /", 100 * MIB, 60 * MIB)]
    assert MemorySources(root).stalls() == Stalls(0.2, 0.0)


def test_a_path_that_leads_out_is_not_followed(machine) -> None:
    root = machine(
        {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/../../..\n"}
        | v2("", str(100 * MIB), 60 * MIB)
    )
    assert groups(root) == [("the control group /", 100 * MIB, 60 * MIB)]


def test_stalls_are_those_of_our_group_else_of_the_machine(machine) -> None:
    some = "some avg10={} avg60=0.00 avg300=0.00 total=1\n"
    full = "full avg10={} avg60=0.00 avg300=0.00 total=1\n"
    root = machine({"proc/pressure/memory": some.format("12.50") + full.format("1.00")})
    assert MemorySources(root).stalls() == Stalls(0.125, 0.01)
    machine(
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.pressure": some.format("50.00") + full.format("40.00"),
        }
    )
    assert MemorySources(root).stalls() == Stalls(0.5, 0.4)


def test_a_kernel_without_stalls_has_none(machine) -> None:
    assert MemorySources(machine({})).stalls() == Stalls(0.0, 0.0)


# -- trees ------------------------------------------------------------------------------------

EATER = """
import subprocess, sys
held = b"x" * (1 << 20) * int(sys.argv[1])
child = None
if len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[2]],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
print("up", flush=True)
sys.stdin.read()
if child is not None:
    child.communicate()
"""


def test_a_tree_is_measured_with_everything_below_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", EATER, "30", "50", EATER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        sizes = tree_sizes({7: process.pid, 8: 2**22 + 1})
        process.communicate()
    assert list(sizes) == [7], "who is gone is left out"
    assert 80 * MIB < sizes[7] < 140 * MIB


SHARING = """
import os, sys
held = b"x" * 60 * 2**20
pid = os.fork()
if pid:
    print(pid, flush=True)
sys.stdin.read()
if pid:
    os.waitpid(pid, 0)
"""


def test_what_two_processes_share_is_counted_once() -> None:
    # Not this process, which may have children of other tests.
    command = [sys.executable, "-c", SHARING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        both, one = tree_sizes({1: parent.pid})[1], tree_sizes({1: child})[1]
        rss = psutil.Process(parent.pid).memory_info().rss
        parent.communicate()
    assert 60 * MIB < both < rss + 30 * MIB, "not twice the 60 MiB"
    assert one < rss * 0.75, "its half of what is shared"


def test_nobody_to_measure_costs_nothing() -> None:
    assert tree_sizes({}) == {}
