"""Somebody removes, moves, replaces or truncates the files of a running daemon's store."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from musterd import QueueFull
from support.daemon import Muster

SECONDS = 60
EXIT_CONFIGURATION = 78


def files_of(daemon: Muster) -> list[Path]:
    return [path for path in daemon.state.glob("store.db*") if path.name != "store.db.reserve"]


def remove(daemon: Muster) -> None:
    for path in files_of(daemon):
        path.unlink()


def move(daemon: Muster) -> None:
    elsewhere = daemon.folder / "elsewhere"
    elsewhere.mkdir()
    for path in files_of(daemon):
        path.rename(elsewhere / path.name)


@pytest.mark.parametrize("lose", [remove, move])
def test_nothing_that_was_acknowledged_is_lost_with_the_files(jobs, waiting, lose) -> None:
    daemon = jobs(size=1)
    with daemon.client() as client:
        done = client.submit("jobs.echo", {"value": "done"})
        assert done.result(SECONDS) == "done"
        assert daemon.ctl("pause", "jobs").returncode == 0
        acknowledged, over = [], threading.Event()

        def submit() -> None:
            while not over.is_set():
                handle = client.submit("jobs.echo", {"value": len(acknowledged)}, wait=True)
                handle.ack(SECONDS)
                acknowledged.append(handle.id)

        thread = threading.Thread(target=submit)
        thread.start()
        try:
            waiting("some are acknowledged", lambda: len(acknowledged) > 20)
            lose(daemon)
            before = len(acknowledged)
            waiting("and some more", lambda: len(acknowledged) > before + 20)
        finally:
            over.set()
            thread.join(SECONDS)
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        assert client.task(done.id).result(SECONDS) == "done"
        assert daemon.ctl("resume", "jobs").returncode == 0
        results = [client.task(id_).result(SECONDS) for id_ in acknowledged]
        assert results == list(range(len(acknowledged)))
    assert "store.lost" in daemon.log()
    assert "store.rewritten" in daemon.log()


def test_an_idle_daemon_notices(jobs, waiting) -> None:
    daemon = jobs(size=0)
    remove(daemon)
    waiting("it is said", lambda: "store.rewritten" in daemon.log())
    assert (daemon.state / "store.db").exists()


def test_without_its_directory_the_daemon_refuses_and_waits(jobs, waiting) -> None:
    daemon = jobs(size=1)
    away = daemon.state.with_name("away")
    with daemon.client() as client:
        daemon.state.rename(away)
        waiting("it is told", lambda: "moved" in daemon.status().problem)
        with pytest.raises(QueueFull, match="was moved"):
            client.submit("jobs.echo", {"value": 1}).ack(SECONDS)
        away.rename(daemon.state)
        waiting("it goes on", lambda: not daemon.status().problem)
        assert client.submit("jobs.echo", {"value": 2}).result(SECONDS) == 2


def test_a_daemon_whose_directory_is_removed_makes_it_again_and_goes_on(jobs, waiting) -> None:
    daemon = jobs(size=1)
    with daemon.client() as client:
        done = client.submit("jobs.echo", {"value": "done"})
        assert done.result(SECONDS) == "done"
        shutil.rmtree(daemon.state)
        waiting("it is said", lambda: "store.rewritten" in daemon.log())
        assert daemon.ctl("restart", "jobs").returncode == 0, "new workers find their directories"
        after = client.submit("jobs.echo", {"value": "after"})
        assert after.result(SECONDS) == "after"
        daemon.kill()
        daemon.start()
        assert client.task(done.id).result(SECONDS) == "done"
        assert client.task(after.id).result(SECONDS) == "after"


def test_a_file_that_was_cut_ends_the_daemon_with_the_reason(jobs) -> None:
    daemon = jobs(size=1)
    with daemon.client() as client:
        client.submit_many([("jobs.echo", {"value": "x" * 1000})] * 500)
        client.flush()
        daemon.stop()
        daemon.start()
        assert client.submit("jobs.echo", {"value": 1}).result(SECONDS) == 1
        os.truncate(daemon.state / "store.db", 0)
        assert daemon.process.wait(SECONDS) == EXIT_CONFIGURATION
    assert "store.db was cut to 0 bytes" in daemon.log()
    daemon.start(wait=False)
    assert daemon.process.wait(SECONDS) == EXIT_CONFIGURATION, "nor does the next start hide it"
    assert "--set store.on_corrupt=set-aside" in daemon.log()


def test_another_store_in_its_place_ends_the_daemon_and_ours_is_saved(jobs, tmp_path) -> None:
    daemon = jobs(size=1)
    with daemon.client() as client:
        first = client.submit("jobs.echo", {"value": "first"})
        assert first.result(SECONDS) == "first"
        assert daemon.stop() == 0
        backup = (daemon.state / "store.db").read_bytes()
        daemon.start()
        second = client.submit("jobs.echo", {"value": "second"})
        assert second.result(SECONDS) == "second"
        (daemon.state / "restored").write_bytes(backup)
        (daemon.state / "restored").chmod(0o600)
        (daemon.state / "restored").rename(daemon.state / "store.db")
        assert daemon.process.wait(SECONDS) == EXIT_CONFIGURATION
        assert "was replaced by another file" in daemon.log()
        (saved,) = daemon.state.glob("store.db.saved-*Z")
        daemon.start()
        assert client.task(first.id).result(SECONDS) == "first"
        assert daemon.ctl("task", second.id).returncode == 4
        assert daemon.stop() == 0
        saved.rename(daemon.state / "store.db")
        daemon.start()
        assert client.task(second.id).result(SECONDS) == "second"
