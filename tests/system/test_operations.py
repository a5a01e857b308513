"""The commands of docs/operations.md, run on a machine with a real systemd."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import bed
from bed.host import Host
from support.waiting import Waiting

SOURCE = "/usr/src/musterd"
PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
STORE = "/var/lib/musterd/store.db"
EXIT_CONFIGURATION = "78"

needs_sqlite = pytest.mark.usefixtures("sqlite")


def blocks(heading: str) -> list[str]:
    """Return the shell commands below a heading, block by block."""
    section = re.split(rf"^## {re.escape(heading)}$", PAGE, flags=re.MULTILINE)[1]
    found = BLOCK.findall(re.split(r"^## ", section, flags=re.MULTILINE)[0])
    assert found, heading
    return found


def type_in(host: Host, block: str) -> str:
    """Run commands as root in the source directory; each has to succeed."""
    return str(host.run("sh", "-euc", f"cd {SOURCE}\n{block}").stdout)


def states(host: Host, ids: list[str]) -> list[str]:
    return [host.task(id_)["state"] for id_ in ids]


def known(host: Host, id_: str) -> bool:
    return host.ctl("task", id_, check=False).returncode == 0


@pytest.fixture
def sqlite(host: Host) -> None:
    """Skip where the machine has no sqlite3."""
    if not host.file("/usr/bin/sqlite3").exists():
        pytest.skip("the package sqlite3 is not installed")


@pytest.fixture
def another(image: bed.Image, host: Host) -> Iterator[Any]:
    """Boot a second machine."""
    made = type(host)(image)
    try:
        made.furnish()
        yield made
    finally:
        made.down()


def test_installing_and_upgrading(host: Host) -> None:
    (install,) = blocks("Install")
    assert "RUNNING" in type_in(host, install)
    host.ctl("pause", "jobs")
    queued = host.submit("jobs.add", "a=1", "b=2")
    (upgrade,) = blocks("Upgrade")
    for version in ("0.1.1", "0.0.9"):  # a newer version, and back to an older one
        for name in ("pyproject.toml", "src/musterd/__init__.py"):
            host.run("sed", "-i", f"s/0\\.[01]\\.[0-9]\\b/{version}/", f"{SOURCE}/{name}")
        assert f"musterd {version} (pid" in type_in(host, upgrade)
        assert states(host, [queued]) == ["queued"]


def test_looking_and_changing_and_stopping(host: Host, waiting: Waiting) -> None:
    host.start()
    (look,) = blocks("First look")
    assert "jobs/0" in type_in(host, look)
    host.run("sed", "-i", "s/size = 2/size = 3/", "/etc/musterd/musterd.toml")
    (change,) = blocks("Change the configuration")
    assert "pools.jobs.size: 2 -> 3" in type_in(host, f"export PYTHONPATH=/srv/bed\n{change}")
    waiting("it has three", lambda: host.status()["pools"][0]["running"] == 3)
    pid = host.main_pid()
    (stop,) = blocks("Stop for a while")
    type_in(host, stop)
    assert host.main_pid() not in (0, pid)
    assert host.ctl("submit", "jobs.add", "a=1", "b=2", "--wait").stdout.strip().endswith("3")


@needs_sqlite
def test_a_backup_is_restored_after_a_crash(host: Host, waiting: Waiting) -> None:
    host.start()
    done = host.submit("jobs.add", "a=1", "b=2", "--wait", "--id", "done")
    assert done.endswith("3")
    host.ctl("pause", "jobs")
    queued = [host.submit("jobs.add", f"a={number}", "b=1") for number in range(5)]
    (backup,) = blocks("Backup")
    assert "ok" in type_in(host, backup)
    late = host.submit("jobs.add", "a=9", "b=9")
    host.run("systemctl", "kill", "-s", "KILL", "musterd")
    (restore,) = blocks("Restore")
    type_in(host, restore)
    assert host.run("stat", "-c", "%U %a", STORE).stdout == "musterd 600\n"
    assert states(host, ["done", *queued]) == ["succeeded"] + ["queued"] * 5
    assert not known(host, late)
    host.ctl("resume", "jobs")
    waiting("they end", lambda: set(states(host, queued)) == {"succeeded"})


def test_a_fleet_moves_to_another_machine(host: Host, another: Host, waiting: Waiting) -> None:
    host.start()
    host.ctl("pause", "jobs")
    queued = [host.submit("jobs.add", f"a={number}", "b=1") for number in range(5)]
    here, there = blocks("Move to another machine")
    type_in(host, here)
    assert not host.daemon_processes()
    packed = "/root/musterd-move.tar.gz"
    another.file(packed).write_bytes(host.file(packed).read_bytes())
    type_in(another, there)
    assert states(another, queued) == ["queued"] * 5, "the pause came along, too"
    another.ctl("resume", "jobs")
    waiting("they end", lambda: set(states(another, queued)) == {"succeeded"})


@needs_sqlite
def test_what_to_type_when_the_disk_is_full(host: Host) -> None:
    host.start()
    host.submit("jobs.add", "a=1", "b=2", "--wait", "--id", "kept")
    look, shrink = blocks("The disk is full")
    assert "/var/lib/musterd" in type_in(host, look)
    type_in(host, shrink)
    assert states(host, ["kept"]) == ["succeeded"]
    assert host.run("stat", "-c", "%U %a", STORE).stdout == "musterd 600\n"


@needs_sqlite
def test_a_corrupt_store_is_recovered_or_given_up(host: Host) -> None:
    recover, give_up = blocks("The store is corrupt")
    host.start()
    host.ctl("pause", "jobs")
    queued = [host.submit("jobs.add", f"a={number}", "b=1") for number in range(50)]

    def corrupt() -> None:
        host.run("systemctl", "stop", "musterd")
        # Overwrite an index page, so that every task can still be read.
        page = host.run("sqlite3", STORE, "SELECT rootpage FROM sqlite_schema WHERE type='index'")
        number = int(page.stdout.split()[0])
        host.run(
            *["dd", "if=/dev/urandom", f"of={STORE}", "bs=4096", f"seek={number - 1}"],
            *["count=1", "conv=notrunc"],
        )
        assert host.run("systemctl", "start", "musterd", check=False).returncode != 0
        assert host.show("musterd", "ExecMainStatus") == EXIT_CONFIGURATION
        assert "set aside" in host.journal("-u", "musterd", "-n", "20")

    corrupt()
    type_in(host, recover)
    assert states(host, queued) == ["queued"] * 50
    assert host.run("stat", "-c", "%U %a", STORE).stdout == "musterd 600\n"
    corrupt()
    type_in(host, give_up)
    assert host.ctl("status").returncode == 0
    assert not known(host, queued[0])
    host.run("systemctl", "restart", "musterd")


def test_the_machine_is_tuned(host: Host, waiting: Waiting) -> None:
    host.configure({"jobs": {"worker": "bed_jobs:Jobs", "size": 1}})
    if not host.file("/usr/lib/chromium/chromium").exists():
        pytest.skip("there is no Chromium here")
    host.start()
    pools, unit = blocks("Tuning: 1, 2, 4 and 8 GB")
    assert "browser" in type_in(host, f"export PYTHONPATH=/srv/bed\n{pools}")
    sizes = {"jobs": 1, "parser": 2, "browser": 2}

    def running() -> dict[str, int]:
        said = host.ctl("status", "--json", check=False).stdout  # exit code 3 until all are up
        return {pool["name"]: pool["running"] for pool in msgspec.json.decode(said)["pools"]}

    waiting("all pools are there", lambda: running() == sizes)
    type_in(host, unit)
    total = int(host.file("/proc/meminfo").read_text().split()[1]) * 1024
    high, highest = (int(value) for value in host.properties("musterd", "MemoryHigh", "MemoryMax"))
    assert (round(high / total, 2), round(highest / total, 2)) == (0.85, 0.9)


def test_a_socket_that_was_removed_is_made_again(host: Host, waiting: Waiting) -> None:
    host.start()
    host.run("rm", "/run/musterd/tasks.sock")
    waiting("it is told", lambda: "sockets.lost" in host.ctl("events").stdout)
    row = next(line for line in PAGE.splitlines() if line.startswith("| `sockets.lost`"))
    type_in(host, "\n".join(re.findall(r"`(systemctl [^`]+)`", row)))
    assert host.file("/run/musterd/tasks.sock").exists()
    assert host.ctl("status").returncode == 0
    assert "sockets.lost" not in host.ctl("events").stdout
