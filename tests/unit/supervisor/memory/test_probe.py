"""The thread that measures memory: when it does."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from musterd.supervisor.memory import probe as probes
from musterd.supervisor.memory.probe import Probe
from support.waiting import wait_for


def test_each_interval_ends_with_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    over = threading.Semaphore(0)

    class Poll:
        """Waits until the test says that the time is over."""

        def register(self, *_: object) -> None: ...

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            waits.append(milliseconds)
            while not over.acquire(timeout=0.005) and not probe._closing.is_set():
                pass
            return []

    monkeypatch.setattr(probes, "select", SimpleNamespace(poll=Poll, POLLIN=1, POLLPRI=2))
    probe = Probe(0.2, tmp_path, environ={})
    probe.start()
    try:
        wait_for("it waits", lambda: len(waits) == 1)
        assert probe.take() is None
        over.release()
        wait_for("a sample", probe.take)
        wait_for("it waits again", lambda: len(waits) == 2)
        probe.look_every(1.0)
        over.release()
        wait_for("it waits again", lambda: len(waits) == 3)
        assert probe.take() is not None
        assert waits == [200, 200, 1000]
    finally:
        probe.close()
