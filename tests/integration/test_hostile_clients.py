"""A hundred hostile clients of each kind: the supervisor's memory stays bounded, its loop goes on,
and other clients are served."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from musterd.ipc.wire.messages import RESULT_BYTES_MAX
from support.daemon import Jobs, Muster, slowest_turn
from support.surroundings import BrokenDisk
from support.waiting import Waiting

ATTACKER = Path(__file__).with_name("client_attacker.py")
KINDS = ("endless", "half", "mute", "watch", "inspect", "resend", "unknown", "hello", "garbage")
PUT_OUT = ("endless", "half", "mute", "watch", "inspect", "garbage")
PEERS = 100
SECONDS, SECONDS_LONG = 2.0, 8.0
PATIENCE_SECONDS = 120.0
RSS_BYTES_MAX = 300 * 1024 * 1024
TURN_SECONDS_MAX = 0.05
TRIPS = 20
LARGE = 6
CAME_AGAIN_MIN = 1000  # a quarter of a megabyte each

LARGE_JOBS = """
from musterd import Worker, task

class Large(Worker):
    @task
    def make(self, ctx, size: int) -> bytes:
        return bytes(size)
"""


@pytest.fixture
def fleet(jobs: Jobs) -> Muster:
    made = jobs(size=1, start=False, others={"large": {"worker": "large:Large", "size": 1}})
    Path(made.folder, "large.py").write_text(LARGE_JOBS)
    return made.start()


@contextlib.contextmanager
def attacked(
    kind: str, path: str, ids: list[str], told: list[int], seconds: float, *, at_least: int = 0
) -> Iterator[None]:
    """Attack with a hundred clients until the block ends, for `seconds` at least.

    Go on until at least so many connections have ended.
    """
    command = [sys.executable, str(ATTACKER), kind, path, str(PEERS), str(at_least), *ids]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as attacker:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "begun\n"
        end = time.monotonic() + seconds
        yield
        time.sleep(max(0.0, end - time.monotonic()))
        told.append(int(attacker.communicate(timeout=PATIENCE_SECONDS)[0]))


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_clients_that_come_again_while_the_store_is_slow_are_bounded(
    jobs: Jobs, disk: BrokenDisk
) -> None:
    """Each client sends the same submits on every connection; the daemon cannot answer them yet."""
    fleet = jobs(size=1, start=False)
    fleet.popen_options = {"env": disk.environment}
    fleet.start()
    with fleet.client() as honest:
        assert honest.submit("jobs.echo", {"value": 1}).result(PATIENCE_SECONDS) == 1
        disk.turn_on("slow-reads")
        again = attacked("again", fleet.tasks_socket, [], [], SECONDS_LONG, at_least=CAME_AGAIN_MIN)
        with again:
            mine = honest.submit("jobs.echo", {"value": 2})
        assert peak_bytes(fleet.pid) < RSS_BYTES_MAX
        disk.mend()
        assert mine.result(PATIENCE_SECONDS) == 2
        assert honest.submit("jobs.echo", {"value": 3}).result(PATIENCE_SECONDS) == 3
    assert slowest_turn(fleet.log()) <= TURN_SECONDS_MAX
    assert fleet.stop() == 0
    assert "Traceback" not in fleet.log()


@pytest.mark.timeout(300)  # on a busy machine; an attack lasts some seconds
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_hostile_clients_are_bounded_and_others_are_served(
    fleet: Muster, waiting: Waiting, is_long: bool, kind: str
) -> None:
    with fleet.client() as honest:
        ids: list[str] = []
        if kind in ("watch", "inspect"):
            for _ in range(LARGE):  # one at a time: this test is not about workers' messages
                task = honest.submit("large.make", {"size": RESULT_BYTES_MAX - 1000})
                assert len(task.result(PATIENCE_SECONDS)) == RESULT_BYTES_MAX - 1000
                ids.append(task.id)
        before = len(fleet.log())
        put_out: list[int] = []
        with attacked(kind, fleet.tasks_socket, ids, put_out, SECONDS_LONG if is_long else SECONDS):
            for value in range(TRIPS):
                task = honest.submit("jobs.echo", {"value": value})
                assert task.result(PATIENCE_SECONDS) == value
            if kind in PUT_OUT:
                waiting(
                    "somebody is put out",
                    lambda: "event=client.dropped" in fleet.log(),
                    PATIENCE_SECONDS,
                )
            with fleet.client(connect_timeout=PATIENCE_SECONDS) as newcomer:
                assert newcomer.submit("jobs.echo", {"value": 1}).result(PATIENCE_SECONDS) == 1
        assert peak_bytes(fleet.pid) < RSS_BYTES_MAX
        log = fleet.log()[before:]
        assert slowest_turn(log) <= TURN_SECONDS_MAX
        if kind in PUT_OUT:
            assert put_out[0] >= 1
        for task_id in ids:  # a client that reads gets every result
            assert len(honest.task(task_id).result(PATIENCE_SECONDS)) == RESULT_BYTES_MAX - 1000
    assert fleet.stop() == 0
    assert "Traceback" not in fleet.log()
