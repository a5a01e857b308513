"""Messages to systemd, on a socket such as its own."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskDeclaration
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.policy import ScalingPolicy
from musterd.supervisor.service.notify import Notifier
from musterd.supervisor.service.problems import Problem, Problems
from musterd.supervisor.service.systemd_status import GRACE_NS, WATCHDOG_SHARE, SystemdStatus
from support.core import Muster

MINUTE_NS = 60 * SECOND_NS


class Systemd:
    def __init__(self, path: Path, **environ: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        self._notifier = Notifier({"NOTIFY_SOCKET": str(path), **environ})
        self.systemd_status = SystemdStatus(self._notifier, 0)

    def heard(self) -> list[str]:
        """Return every line since the last call."""
        lines: list[str] = []
        while True:
            try:
                lines += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return lines

    def close(self) -> None:
        self.systemd_status.close()
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path / "notify", WATCHDOG_USEC="8000000", WATCHDOG_PID=str(os.getpid()))
    yield made
    made.close()


def extension() -> str:
    return f"EXTEND_TIMEOUT_USEC={GRACE_NS // 1000}"


def test_ready_is_told_when_every_worker_is_there_and_more_time_is_asked_for_until_then(
    systemd: Systemd, muster: type[Muster]
) -> None:
    m = muster(size=2)
    m.tell(events.Started())
    systemd.systemd_status.turn(m.now_ns, m.fleet, Problems())
    assert systemd.heard() == [
        "WATCHDOG=1",
        "STATUS=starting: 0 of 2 workers, 0 busy; 0 tasks waiting, 0 done",
        extension(),
    ]
    systemd.systemd_status.turn(m.now_ns + SECOND_NS, m.fleet, Problems())
    assert systemd.heard() == [extension()]
    m = muster(size=2)
    m.start()
    systemd.systemd_status.turn(m.now_ns + 2 * SECOND_NS, m.fleet, Problems())
    heard = systemd.heard()
    assert heard[-2:] == ["READY=1", "STATUS=2 of 2 workers, 0 busy; 0 tasks waiting, 0 done"]
    systemd.systemd_status.turn(
        m.now_ns + 3 * SECOND_NS,
        m.fleet,
        Problems(Problem(lambda: None, "", "", now="the disk is full")),
    )
    assert systemd.heard()[-1].startswith("STATUS=degraded: the disk is full; 2 of 2 workers")


def test_a_slot_that_is_given_up_or_pauses_for_long_is_not_waited_for(
    systemd: Systemd, muster: type[Muster]
) -> None:
    m = muster(size=2)
    m.start()
    for worker in (1, 3, 4, 5):
        m.exit(worker)
        m.wait(MINUTE_NS)
        if m.slots[0].worker:
            m.tell(events.WorkerForked(m.slots[0].worker, 77))
    assert [slot.state for slot in m.slots] == ["FATAL", "RUNNING"]
    systemd.systemd_status.turn(m.now_ns, m.fleet, Problems())
    assert "READY=1" in systemd.heard()


def test_workers_held_back_by_memory_are_not_waited_for_but_told(
    systemd: Systemd, muster: type[Muster]
) -> None:
    m = muster(size=2)
    m.start()
    m.tell(events.StopRequested((("p", 1),)))
    m.exit(2, code=0)
    m.slots[1].held = True
    systemd.systemd_status.turn(m.now_ns, m.fleet, Problems())
    heard = systemd.heard()
    assert "READY=1" in heard
    assert heard[-1].startswith("STATUS=degraded: p: 1 held back by memory; 1 of 2 workers"), heard


def test_of_a_pool_that_grows_its_minimum_is_waited_for(
    systemd: Systemd, muster: type[Muster]
) -> None:
    m = muster(size=3, scaling=ScalingPolicy(min=1, max=5))
    started = m.tell(events.Started())
    started += m.tell(events.ForkServerReady("p", (TaskDeclaration("x"),)))
    systemd.systemd_status.turn(m.now_ns, m.fleet, Problems())
    assert "READY=1" not in systemd.heard()
    m.bring_up(1)
    systemd.systemd_status.turn(m.now_ns, m.fleet, Problems())
    assert "READY=1" in systemd.heard()


def test_the_watchdog_is_fed_in_time_but_not_in_every_turn(
    systemd: Systemd, muster: type[Muster]
) -> None:
    m = muster()
    m.start()
    fed = 0
    for turn in range(100):  # ten seconds
        systemd.systemd_status.turn(m.now_ns + turn * SECOND_NS // 10, m.fleet, Problems())
        fed += systemd.heard().count("WATCHDOG=1")
    assert fed == 10 * WATCHDOG_SHARE // 8


def test_the_watchdog_of_another_process_is_not_fed(tmp_path: Path, muster: type[Muster]) -> None:
    systemd = Systemd(tmp_path / "notify", WATCHDOG_USEC="8000000", WATCHDOG_PID="1")
    m = muster()
    m.start()
    systemd.systemd_status.turn(m.now_ns, m.fleet, Problems())
    assert "WATCHDOG=1" not in systemd.heard()
    systemd.close()


def test_a_reload_is_told_with_its_time_and_only_while_the_fleet_is_up(
    systemd: Systemd, muster: type[Muster]
) -> None:
    m = muster()
    m.start()
    systemd.systemd_status.reloading()
    systemd.systemd_status.reloaded()
    assert systemd.heard() == [], "READY must not be told before that is so"
    systemd.systemd_status.turn(m.now_ns, m.fleet, Problems())
    systemd.heard()
    systemd.systemd_status.reloading()
    said = systemd.heard()
    assert said[0] == "RELOADING=1"
    assert said[1].removeprefix("MONOTONIC_USEC=").isdecimal()
    systemd.systemd_status.reloaded()
    assert systemd.heard() == ["READY=1"]


def test_the_end_is_told_once_and_more_time_is_asked_for_each_second(
    systemd: Systemd, muster: type[Muster]
) -> None:
    m = muster()
    m.start()
    systemd.systemd_status.turn(m.now_ns, m.fleet, Problems())
    systemd.heard()
    m.tell(events.ShutdownRequested("asked"))
    systemd.systemd_status.turn(m.now_ns, m.fleet, Problems())
    assert systemd.heard() == [
        "STOPPING=1",
        "STATUS=stopping (stop): running tasks: 0, workers left: 1",
        extension(),
    ]
    systemd.systemd_status.turn(m.now_ns + SECOND_NS, m.fleet, Problems())
    systemd.systemd_status.reloading()
    systemd.systemd_status.stopping()
    assert systemd.heard() == [extension()]


def test_nobody_listens(muster: type[Muster]) -> None:
    systemd_status = SystemdStatus(Notifier({}), 0)
    m = muster()
    m.start()
    systemd_status.turn(m.now_ns, m.fleet, Problems())
    assert systemd_status.ready
    systemd_status.close()
