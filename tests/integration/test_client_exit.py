"""Submitted tasks arrive even when the program ends without closing its client."""

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from musterd import AsyncClient, Client, NotConnected
from support.daemon import Jobs, Muster

DEADLINE = 60.0
# Later versions of Python warn about things that these programs do on purpose.
FORKING = ("-W", "ignore:This process:DeprecationWarning")
UNDELIVERED = 120  # Python's own exit code when it cannot flush its output

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a program of that text and return how it ended: run(program, socket)."""

    def run(program: str, socket: str, *options: str) -> "subprocess.CompletedProcess[str]":
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        return subprocess.run(
            [sys.executable, *FORKING, *options, str(path), socket],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    return run


def assert_arrived(daemon: Muster, ids: list[str], count: int) -> None:
    assert len(set(ids)) == count
    with Client(daemon.tasks_socket) as client:
        for task_id in ids:
            client.task(task_id).result(DEADLINE)


SYNC = """
    import sys
    from musterd import Client
    musterd = Client(sys.argv[1])
    for n in range(8):
        print(musterd.submit("jobs.echo", {"value": n}).id)
"""
DROPPED = """
    import sys
    from musterd import Client
    def work():
        musterd = Client(sys.argv[1])
        return [musterd.submit("jobs.echo", {"value": n}).id for n in range(8)]
    print(*work(), sep="\\n")
"""
ASYNC = """
    import asyncio, sys
    from musterd import AsyncClient
    async def main():
        musterd = AsyncClient(sys.argv[1])
        for n in range(8):
            print((await musterd.submit("jobs.echo", {"value": n}, on_done=repr)).id)
    asyncio.run(main())
"""
ASYNC_DROPPED = ASYNC + "    import gc; gc.collect()\n"
ASYNC_IN_A_THREAD = """
    import asyncio, sys, threading
    from musterd import AsyncClient
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    async def main():
        musterd = AsyncClient(sys.argv[1])
        return [(await musterd.submit("jobs.echo", {"value": n})).id for n in range(8)]
    print(*asyncio.run_coroutine_threadsafe(main(), loop).result(), sep="\\n")
"""
PARENT_AND_CHILD = """
    import os, sys
    from musterd import Client
    ours = Client(sys.argv[1])
    ids = [ours.submit("jobs.echo", {"value": n}).id for n in range(4)]
    child = os.fork()
    if child == 0:
        theirs = Client(sys.argv[1])
        ids = [theirs.submit("jobs.echo", {"value": n}).id for n in range(4)]
    else:
        assert os.waitpid(child, 0)[1] == 0
    print(*ids, sep="\\n")
"""
MULTIPROCESSING = """
    import multiprocessing, sys
    from musterd import Client
    def work(socket):
        musterd = Client(socket)
        print(*[musterd.submit("jobs.echo", {"value": n}).id for n in range(8)], sep="\\n")
    if __name__ == "__main__":
        child = multiprocessing.get_context(METHOD).Process(target=work, args=(sys.argv[1],))
        child.start()
        child.join()
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(SYNC, id="Client"),
        pytest.param(DROPPED, id="Client that is dropped"),
        pytest.param(ASYNC, id="AsyncClient"),
        pytest.param(ASYNC_DROPPED, id="AsyncClient that is collected"),
        pytest.param(ASYNC_IN_A_THREAD, id="AsyncClient whose loop runs on"),
        pytest.param(PARENT_AND_CHILD, id="fork"),
        pytest.param(MULTIPROCESSING.replace("METHOD", "'fork'"), id="multiprocessing by fork"),
        pytest.param(MULTIPROCESSING.replace("METHOD", "'spawn'"), id="multiprocessing by spawn"),
    ],
)
def test_what_a_program_submitted_arrives_though_it_closes_nothing(
    jobs: Jobs, run: Run, program: str
) -> None:
    daemon = jobs()
    ended = run(program, daemon.tasks_socket)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert_arrived(daemon, ended.stdout.split(), 8)


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_what_could_not_be_delivered_is_said_with_its_ids(
    tmp_path: Path, run: Run, kind: str
) -> None:
    program = (SYNC if kind == "Client" else ASYNC).replace(
        "sys.argv[1]", "sys.argv[1], connect_timeout=0.2"
    )
    ended = run(program, str(tmp_path / "no.sock"))
    ids = ended.stdout.split()
    assert len(ids) == 8
    assert ended.returncode == UNDELIVERED
    assert ended.stderr.startswith("musterd: 8 tasks were not delivered")
    assert "no such socket; start musterd" in ended.stderr
    assert all(task_id in ended.stderr for task_id in ids)
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_rejection_that_nobody_saw_is_said_at_the_end(jobs: Jobs, run: Run) -> None:
    daemon = jobs()
    ended = run(SYNC.replace("jobs.echo", "nobody.knows"), daemon.tasks_socket)
    assert ended.returncode == UNDELIVERED
    assert ended.stderr.startswith("musterd: 8 tasks were not accepted")
    assert "nobody" in ended.stderr
    assert all(task_id in ended.stderr for task_id in ended.stdout.split())


def test_many_ids_are_bounded(tmp_path: Path, run: Run) -> None:
    program = SYNC.replace("range(8)", "range(1234)").replace(
        "sys.argv[1]", "sys.argv[1], connect_timeout=0.2"
    )
    ended = run(program, str(tmp_path / "no.sock"))
    assert ended.stderr.startswith("musterd: 1234 tasks were not delivered")
    assert ended.stderr.endswith("and 1134 more\n")


@pytest.mark.parametrize(
    ("last", "status"), [("raise KeyError('mine')", 1), ("sys.exit(3)", UNDELIVERED)]
)
def test_the_exit_status_of_a_program_that_failed_anyway(
    tmp_path: Path, run: Run, last: str, status: int
) -> None:
    program = SYNC.replace("sys.argv[1]", "sys.argv[1], connect_timeout=0.2") + f"    {last}\n"
    ended = run(program, str(tmp_path / "no.sock"))
    assert ended.returncode == status
    assert "musterd: 8 tasks were not delivered" in ended.stderr


def test_other_exit_handlers_run_and_may_write(tmp_path: Path, run: Run) -> None:
    program = """
        import atexit, sys
        atexit.register(lambda: print("the last word", file=sys.stderr, flush=True))
        """ + SYNC.replace("\n    ", "\n        ").replace(
        "sys.argv[1]", "sys.argv[1], connect_timeout=0.2"
    )
    ended = run(program, str(tmp_path / "no.sock"))
    assert ended.returncode == UNDELIVERED
    assert ended.stderr.splitlines()[1:] == ["the last word"]


@pytest.mark.parametrize("program", [SYNC, DROPPED, ASYNC, ASYNC_DROPPED])
def test_an_unclosed_client_is_a_resource_warning(jobs: Jobs, run: Run, program: str) -> None:
    daemon = jobs()
    ended = run(program, daemon.tasks_socket, "-W", "default")
    assert ended.returncode == 0
    warnings = [line for line in ended.stderr.splitlines() if "ResourceWarning" in line]
    assert [line for line in warnings if "unclosed" in line and "Client" in line], ended.stderr
    assert len([line for line in warnings if "Client" in line]) == 1
    assert_arrived(daemon, ended.stdout.split(), 8)


def test_a_closed_client_warns_of_nothing(jobs: Jobs, run: Run) -> None:
    daemon = jobs()
    for program in (
        SYNC + "    musterd.close()\n",
        ASYNC.replace(
            "    asyncio.run",
            """
        await musterd.close()
    asyncio.run""",
        ),
    ):
        ended = run(program, daemon.tasks_socket, "-X", "dev")
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_callback_that_hangs_does_not_hold_the_end_up(jobs: Jobs, run: Run) -> None:
    daemon = jobs()
    program = """
        import sys, threading
        from musterd import Client
        musterd = Client(sys.argv[1], connect_timeout=0.5)
        called = threading.Event()
        def hang(task):
            called.set()
            threading.Event().wait()
        print(musterd.submit("jobs.echo", on_done=hang).id)
        called.wait()
        print(musterd.submit("jobs.echo").id)
    """
    ended = run(program, daemon.tasks_socket)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert_arrived(daemon, ended.stdout.split(), 2)


FORKED = """
    import os, sys
    from musterd import Client
    musterd = Client(sys.argv[1])
    first = musterd.submit("jobs.echo", {"value": 1})
    child = os.fork()
    if child == 0:
        for use in (lambda: musterd.submit("jobs.echo"), first.result, musterd.flush,
                    lambda: list(musterd.as_completed([first]))):
            try:
                use()
            except RuntimeError as error:
                print(error)
        musterd.close()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert musterd.submit("jobs.echo", {"value": 2}).result(20) == 2
"""
FORKED_ASYNC = """
    import asyncio, os, sys
    from musterd import AsyncClient
    musterd = AsyncClient(sys.argv[1])  # connected, and of no loop yet
    async def use():
        task = await musterd.submit("jobs.echo", {"value": 2})
        return await task.result(20)
    child = os.fork()
    if child == 0:
        for _ in range(4):
            try:
                asyncio.run(use())
            except RuntimeError as error:
                print(error)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    async def main():
        assert await use() == 2
        await musterd.close()
    asyncio.run(main())
"""


@pytest.mark.parametrize("program", [FORKED, FORKED_ASYNC])
def test_the_fork_of_a_program_is_told_what_to_do_and_harms_nothing(
    jobs: Jobs, run: Run, program: str
) -> None:
    daemon = jobs()
    ended = run(program, daemon.tasks_socket)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("make a new one there") == 4, ended.stdout


# -- the connect timeout --------------------------------------------------------------------------


CONNECT_SECONDS = 0.3
CALLS = 200


def test_the_connect_timeout_is_counted_over_calls(tmp_path: Path) -> None:
    client = Client(tmp_path / "no.sock", connect_timeout=CONNECT_SECONDS)
    task = client.submit("jobs.echo")
    for _ in range(CALLS):  # each call is shorter than the timeout
        try:
            task.result(timeout=0.05)
        except TimeoutError:
            continue
        except NotConnected:
            break
    else:
        pytest.fail("the connect time-out begins anew in each call")
    for wait in [task.result, task.ack, client.flush] * CALLS:  # else the test takes minutes
        with pytest.raises(NotConnected, match="no such socket"):
            wait()
    with pytest.raises(NotConnected):
        client.close()


def test_async_the_connect_timeout_is_counted_over_calls(tmp_path: Path) -> None:
    async def main() -> None:
        client = AsyncClient(tmp_path / "no.sock", connect_timeout=CONNECT_SECONDS)
        task = await client.submit("jobs.echo")
        for _ in range(CALLS):
            try:
                await task.result(timeout=0.05)
            except TimeoutError:
                continue
            except NotConnected:
                break
        else:
            pytest.fail("the connect time-out begins anew in each call")
        for _ in range(3 * CALLS):  # else the test takes minutes
            with pytest.raises(NotConnected, match="no such socket"):
                await task.result()
        with pytest.raises(NotConnected):
            await client.close()

    asyncio.run(main())


def test_a_daemon_that_starts_after_the_connect_timeout_is_found_by_the_next_call(
    jobs: Jobs,
) -> None:
    daemon = jobs(start=False)
    daemon.runtime.mkdir(exist_ok=True)
    client = Client(daemon.tasks_socket, connect_timeout=0.01)
    task = client.submit("jobs.echo", {"value": 7})
    with pytest.raises(NotConnected):
        task.result()
    daemon.start()
    with client:
        client._driver.link._due_ns = time.monotonic_ns() + 3600 * 10**9  # else it waits an hour
        assert task.result(DEADLINE) == 7
