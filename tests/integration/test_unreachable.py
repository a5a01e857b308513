"""What a client hears that waits for a daemon which is not there, or does not let it in."""

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from musterd import AsyncClient, Client, NotConnected
from support.daemon import Jobs, Muster

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")

# Every way to wait with a limit, for a task of a client.
WAITS: dict[str, Callable[..., object]] = {
    "result": lambda client, task: task.result(0.3),
    "outcome": lambda client, task: task.outcome(0.3),
    "ack": lambda client, task: client.submit("jobs.echo").ack(0.3),
    "status": lambda client, task: task.status(0.3),
    "progress": lambda client, task: next(task.progress(0.3)),
    "as_completed": lambda client, task: next(client.as_completed([task], 0.3)),
    "history": lambda client, task: client.history("none", timeout=0.3),
}

AS_SOMEBODY = """
import asyncio, os, sys
uid = int(sys.argv[2])
from musterd import AsyncClient, Client, NotConnected
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)

async def main():
    client = AsyncClient(sys.argv[1], connect_timeout=0.5)
    try:
        await (await client.submit("jobs.echo")).result(timeout=5)
    except NotConnected as error:
        print(error)
    try:
        await client.close()
    except NotConnected:
        pass

client = Client(sys.argv[1], connect_timeout=0.5)
for wait in (
    lambda: client.submit("jobs.echo").result(timeout=0.1),
    lambda: client.submit("jobs.echo").result(timeout=5),
    lambda: next(client.map("jobs.echo", [{}])),
):
    try:
        wait()
    except (NotConnected, TimeoutError) as error:
        print(type(error).__name__, error)
try:
    client.close()
except NotConnected:
    pass
asyncio.run(main())
"""


def lost(jobs: Jobs) -> tuple[Muster, Client, object]:
    """Return a killed daemon, with a client that has spoken to it and a task that did not end."""
    daemon = jobs(supervisor__drain_timeout="100ms")
    client = daemon.client()
    task = client.submit("jobs.nap", {"seconds": 60})
    task.ack(30)
    daemon.kill()
    return daemon, client, task


def test_a_wait_for_a_daemon_that_is_gone_says_so(jobs):
    daemon, client, task = lost(jobs)
    for name, wait in WAITS.items():
        with pytest.raises(TimeoutError) as caught:
            wait(client, task)
        text = str(caught.value)
        assert f"within 0.3 s: no supervisor at {daemon.tasks_socket}: " in text, name
        assert "the socket exists but nobody answers; check that musterd runs" in text, name
    Path(daemon.tasks_socket).unlink()
    for wait in WAITS.values():
        with pytest.raises(TimeoutError, match="there is no such socket; start musterd"):
            wait(client, task)
    daemon.start()  # for a clean end


def test_an_async_wait_says_so_too(jobs):
    daemon = jobs(supervisor__drain_timeout="100ms")

    async def main() -> list[str]:
        said = []
        async with AsyncClient(daemon.tasks_socket) as client:
            task = await client.submit("jobs.nap", {"seconds": 60})
            await task.ack(30)
            daemon.kill()
            waits = (
                task.result(1),
                anext(task.progress(1)),
                anext(client.as_completed([task], 1)),
            )
            for wait in waits:
                with pytest.raises(TimeoutError) as caught:
                    await wait
                said.append(str(caught.value))
        return said

    for text in asyncio.run(main()):
        assert f"within 1 s: no supervisor at {daemon.tasks_socket}: the socket exists" in text
    daemon.start()


@pytest.mark.parametrize("timeout", [0.3, 1.0])
def test_a_daemon_that_never_was_there_is_not_connected(tmp_path, timeout):
    """Whichever of the two limits is over first: nobody is told that a result did not come."""
    path = str(tmp_path / "tasks.sock")
    client = Client(path, connect_timeout=0.3)
    task = client.submit("jobs.echo")
    with pytest.raises(NotConnected, match=f"no supervisor at {path} within 0.3 s: there is no"):
        task.result(timeout=timeout)
    with pytest.raises(NotConnected):
        client.close()


def test_a_wait_shorter_than_the_connect_timeout_may_go_on(tmp_path):
    client = Client(str(tmp_path / "tasks.sock"), connect_timeout=0.5)
    task = client.submit("jobs.echo")
    with pytest.raises(TimeoutError, match=r"did not come within 0.1 s: no supervisor at "):
        task.result(timeout=0.1)
    with pytest.raises(NotConnected):
        client.close()


def test_a_task_that_takes_long_is_only_late(jobs):
    with (
        jobs(supervisor__drain_timeout="100ms").client() as client,
        pytest.raises(TimeoutError) as caught,
    ):
        client.submit("jobs.nap", {"seconds": 2}).result(0.5)
    assert str(caught.value).endswith("did not come within 0.5 s")


def told(daemon: Muster) -> list[str]:
    """Return what a user without rights is told."""
    done = subprocess.run(
        [sys.executable, "-c", AS_SOMEBODY, daemon.tasks_socket, str(NOBODY)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.splitlines()


@needs_root
def test_a_user_without_rights_is_told_who_and_why(jobs):
    daemon = jobs(supervisor__drain_timeout="100ms")
    for folder in (daemon.folder, daemon.folder.parent, daemon.runtime):
        folder.chmod(0o755)
    short, *others = told(daemon)
    why = f"permission denied: user {NOBODY} may not write to the socket"
    assert short.startswith("TimeoutError")
    assert why in short
    assert len(others) == 3
    assert all("NotConnected" in each for each in others[:2])
    assert all(why in each and daemon.tasks_socket in each for each in others)
    assert stat.S_IMODE(os.stat(daemon.tasks_socket).st_mode) == 0o660


@needs_root
def test_a_folder_that_is_shut_is_no_missing_socket(jobs):
    daemon = jobs(supervisor__drain_timeout="100ms")
    daemon.runtime.chmod(0o700)
    for line in told(daemon):
        assert f"user {NOBODY} may not enter its directory" in line
        assert "no such socket" not in line
