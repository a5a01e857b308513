"""Client("postgresql://…"): a program without a daemon, a real daemon elsewhere, one PostgreSQL."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from postgres import Cluster, Server, servers

from musterd import (
    AsyncClient,
    Client,
    Context,
    InvalidTask,
    NotConnected,
    QueueFull,
    Secret,
    TaskCancelled,
    TaskFailed,
    TaskMissing,
    UnknownTask,
    call,
    task,
)
from musterd.ipc.client.taskspec import make_spec
from musterd.ipc.wire.messages import TaskDeclaration
from musterd.supervisor.cluster.engine import NodeCard, PoolCard
from support.daemon import Muster, short_folders
from support.waiting import WAIT_SECONDS, wait_for

PASSWORD = "hunter2"
WORKER = """
import time
from musterd import task, Permanent

def note(what):
    with open(__file__ + ".runs", "a") as file:
        file.write(f"{what}\\n")

@task
def double(ctx, x: int) -> int:
    return 2 * x

@task
def fail(ctx) -> int:
    raise Permanent("no price")

@task
def once(ctx, number: int) -> int:
    note(number)
    return number

@task(target="url")
def site(ctx, url: str) -> str:
    return url

@task
def log_in(ctx, user: str, password: str) -> str:
    note(f"log_in {user}")
    return user

@task(timeout=60)
def steps(ctx) -> str:
    ctx.progress(0.5, "half")
    while not ctx.cancelled:
        time.sleep(0.01)
    return "done"

@task(timeout=60)
def slow(ctx, seconds: float) -> str:
    time.sleep(seconds)
    return "done"
"""


class Place:
    """A cluster with one daemon, and a folder for programs on other machines."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.cluster = Cluster(server, "direct")
        role = f"LOGIN PASSWORD '{PASSWORD}'"
        self.cluster.sql(f"CREATE ROLE d_nobody {role}")
        self.cluster.sql(f"CREATE ROLE d_node {role} IN ROLE musterd_node")
        for name in ("d_ann", "d_bob", "d_eve", "d_program"):
            self.cluster.sql(f"CREATE ROLE {name} {role} IN ROLE musterd_submit")
        self.here, self.programs = folder / "here", folder / "programs"
        self.here.mkdir()
        self.programs.mkdir()
        home = folder / "node"
        home.mkdir()
        (home / "jobs.py").write_text(WORKER)
        self.runs = home / "jobs.py.runs"
        url = home / "url"
        url.write_text(self.url("d_node"))
        url.chmod(0o600)
        self.node = Muster(
            home,
            {"jobs": {"worker": "jobs", "size": 2, "env": {"PYTHONPATH": str(home)}}},
            cluster__url_file=str(url),
            cluster__node="shed",
            cluster__lease="5s",
            supervisor__redact=["password"],
        )

    def start_node(self) -> None:
        self.node.start()
        wait_for("it has joined", lambda: self.cluster.sql("SELECT FROM musterd.node_task"))

    def url(self, user: str = "d_ann", password: str = PASSWORD, name: str = "direct") -> str:
        return f"postgresql://{user}:{password}@/{name}?host={self.server.folder}&port=5432"

    def client(self, user: str = "d_ann", **options: Any) -> Client:
        return Client(self.url(user), **{"connect_timeout": WAIT_SECONDS, **options})

    def start(
        self, program: str, env: dict[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a program, which has `client` and `say`; it ends with its standard input."""
        text = PROGRAM.format(program=program.replace("\n", "\n    "))
        (self.programs / "temporary").mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", text],
            cwd=self.programs,
            env={**os.environ, "TMPDIR": str(self.programs / "temporary"), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        assert process.stdin is not None
        process.stdin.write(f"{self.url('d_program')}\n")
        process.stdin.flush()
        return process

    def sessions(self, user: str = "d_program") -> int:
        query = "SELECT count(*)::int FROM pg_stat_activity WHERE usename = %s"
        return int(str(self.cluster.sql(query, user)[0][0]))

    def gateways(self) -> list[psutil.Process]:
        """Return the gateways of the programs, whatever their parents are."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                title, folder = process.cmdline()[:1], process.cwd()
                if title == ["musterd: direct"] and folder == str(self.programs):
                    found.append(process)
        return found

    def is_clean(self) -> bool:
        """Whether the programs have left nothing: no process, no session, no file."""
        rest = list((self.programs / "temporary").iterdir())
        return not self.gateways() and not self.sessions() and not rest


PROGRAM = """
import os, sys, threading, time
from musterd import Client

def say(*words):
    print(*words, flush=True)

def gateway_of(client):
    return client._link._direct.state().pid

url = sys.stdin.readline().strip()
client = Client(url, connect_timeout=60)
if True:
    {program}
"""


def heard(process: "subprocess.Popen[str]") -> list[str]:
    """Return the next line that a program says, in words."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def finished(process: "subprocess.Popen[str]") -> int:
    with process:
        return process.wait(WAIT_SECONDS)


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Place]:
    with short_folders() as folder:
        place = Place(server, folder)
        place.start_node()
        try:
            yield place
        finally:
            place.node.stop()


@pytest.fixture
def place(shared: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The clients of this process have a folder of their own, and so do their gateways."""
    monkeypatch.chdir(shared.here)
    shared.runs.unlink(missing_ok=True)
    return shared


# -- what a client can do -------------------------------------------------------------------------


def test_a_submitter_does_what_a_client_of_a_node_does(place: Place) -> None:
    with place.client() as client:
        assert client.submit("jobs.double", {"x": 4}, priority="high").result(WAIT_SECONDS) == 8
        many = client.submit_many([("jobs.double", {"x": n}) for n in range(50)])
        assert [each.result(WAIT_SECONDS) for each in many] == [2 * n for n in range(50)]
        found = client.map("jobs.double", [{"x": n} for n in range(20)])
        assert {each.result() for each in found} == {2 * n for n in range(20)}
        handles = [client.submit("jobs.double", {"x": n}) for n in range(5)]
        done = client.as_completed(handles, timeout=WAIT_SECONDS)
        assert {each.id for each in done} == {each.id for each in handles}
        with pytest.raises(TaskFailed, match="no price"):
            client.submit("jobs.fail").result(WAIT_SECONDS)
        assert client.submit("jobs.double", {"x": 1}, delay=0.2).result(WAIT_SECONDS) == 2
        with pytest.raises(UnknownTask, match="no node has a task"):
            client.submit("jobs.nothing").result(WAIT_SECONDS)
        again = client.task(many[7].id)
        assert again.result(WAIT_SECONDS) == 14
        assert again.status(WAIT_SECONDS).state == "succeeded"
        assert client.recommended_workers(WAIT_SECONDS) == {}
        assert client.submit("jobs.double", {"x": 2}, wait=True).result(WAIT_SECONDS) == 4
        ended = threading.Event()
        client.submit("jobs.double", {"x": 2}, on_done=lambda _: ended.set())
        assert ended.wait(WAIT_SECONDS)


def test_typed_calls_find_the_pools_of_the_nodes(place: Place) -> None:
    @task
    def double(ctx: Context, x: int) -> int: ...

    @task
    def strange(ctx: Context) -> None: ...

    for function in (double, strange):  # as if it were imported from the module of the workers
        function.__module__, function.__qualname__ = "jobs", function.__name__
    with place.client() as client:
        assert client.submit(double, x=4).result(WAIT_SECONDS) == 8
        many = client.map(call(double, n) for n in range(5))
        assert sorted(each.result() for each in many) == [0, 2, 4, 6, 8]
        with pytest.raises(InvalidTask, match="must be int, not str"):
            client.submit(double, x="4")  # type: ignore[call-overload]
        with pytest.raises(UnknownTask, match=r"no pool runs jobs:strange \(pools: jobs\)"):
            client.submit(strange)

    async def work() -> int:
        async with AsyncClient(place.url(), connect_timeout=WAIT_SECONDS) as client:
            return await (await client.submit(double, x=5)).result(WAIT_SECONDS)

    assert asyncio.run(work()) == 10


def test_a_running_task_is_cancelled_and_seen(place: Place) -> None:
    with place.client() as client:
        running = client.submit("jobs.slow", {"seconds": 50})
        wait_for("it runs", lambda: running.status(WAIT_SECONDS).state == "running")
        assert running.status(WAIT_SECONDS).worker.startswith("shed")
        running.cancel()
        with pytest.raises(TaskCancelled):
            running.result(WAIT_SECONDS)


def test_progress_is_heard(place: Place) -> None:
    with place.client() as client:
        handle = client.submit("jobs.steps")
        note = next(handle.progress(timeout=WAIT_SECONDS))
        assert (note.fraction, note.text) == (0.5, "half")
        handle.cancel()
        with pytest.raises(TaskCancelled):
            handle.result(WAIT_SECONDS)


def test_keys_caches_and_invalidation(place: Place) -> None:
    with place.client() as client:

        def run() -> bool:
            handle = client.submit("jobs.once", {"number": 1}, key="direct:1", cache=600)
            assert handle.result(WAIT_SECONDS) == 1
            return handle.outcome().cached

        assert [run(), run()] == [False, True]
        client.invalidate("direct:1", timeout=WAIT_SECONDS)
        assert [run(), run()] == [False, True]
        client.invalidate(prefix="direct:", timeout=WAIT_SECONDS)
        assert run() is False
        with place.client("d_bob") as other:  # keys of another submitter are others
            handle = other.submit("jobs.once", {"number": 2}, key="direct:1", cache=600)
            assert handle.result(WAIT_SECONDS) == 2
    assert place.runs.read_text().split() == ["1", "1", "1", "2"]


def test_what_a_task_declares_is_known(place: Place) -> None:
    with place.client() as client:
        handle = client.submit("jobs.site", {"url": "https://shop.example/x"})
        handle.result(WAIT_SECONDS)
        assert handle.status(WAIT_SECONDS).target == "shop.example"


def test_what_a_node_declares_that_joins_later_is_known_at_once(place: Place) -> None:
    declared = TaskDeclaration("go", target="url")
    pool = PoolCard("late", 1, (declared,))
    engine = place.cluster.engine("d_node")
    with place.client() as client:
        with pytest.raises(UnknownTask):
            client.submit("late.go", {"url": "https://shop.example/"}).ack(WAIT_SECONDS)
        engine.join(NodeCard("id-late", "late", pools=(pool,), redact=("pin",)))
        handle = client.submit("late.go", {"url": "https://shop.example/"})
        with pytest.raises(InvalidTask, match="redact"):
            client.submit("late.go", {"url": "https://shop.example/", "pin": 1}).ack(WAIT_SECONDS)
        assert handle.status(WAIT_SECONDS).target == "shop.example"
        handle.cancel()
        with pytest.raises(TaskCancelled):
            handle.result(WAIT_SECONDS)
    place.cluster.engine().forget("late")
    place.cluster.close()


def test_changes_of_schedules_are_followed(place: Place) -> None:
    with place.client() as client:
        reader = client.changes(timeout=0.2)
        with pytest.raises(TimeoutError):
            next(reader)
        wait_for("it is followed", lambda: reader._following._heard is not None)
        row = ("kites", "@kites.1", "digest")
        place.cluster.sql(
            "INSERT INTO musterd.change (event, schedule, task, digest, entry, before, at, at_ns, "
            "reason, count, pool) "
            "VALUES ('task.changed', %s, %s, %s, 0, 0, now(), 0, '', 0, '')",
            *row,
        )
        wait_for("it is told", reader._following.any_unread)
        found = next(reader)
        assert (found.schedule, found.task.id, found.digest) == row
        with pytest.raises(TaskMissing):  # the run is not a task of this submitter
            found.task.result(WAIT_SECONDS)
        reader.close()


def test_an_async_client_does_the_same(place: Place) -> None:
    async def work() -> None:
        async with AsyncClient(place.url(), connect_timeout=WAIT_SECONDS) as client:
            handle = await client.submit("jobs.double", {"x": 4})
            assert await handle.result(WAIT_SECONDS) == 8
            many = await client.submit_many([("jobs.double", {"x": n}) for n in range(20)])
            assert [await each.result(WAIT_SECONDS) for each in many] == [2 * n for n in range(20)]
            ids = [each.id async for each in client.map("jobs.double", [{"x": 1}, {"x": 2}])]
            assert len(ids) == 2
            assert (await client.task(handle.id)).id == handle.id
            assert (await handle.status(WAIT_SECONDS)).state == "succeeded"
            await client.invalidate("nothing", timeout=WAIT_SECONDS)
            os.kill(client._link._direct.state().pid, signal.SIGKILL)  # type: ignore[union-attr]
            again = await client.submit("jobs.double", {"x": 5})
            assert await again.result(WAIT_SECONDS) == 10

    asyncio.run(work())


def test_a_submitter_sees_its_own_tasks_and_nobody_elses(place: Place) -> None:
    with place.client() as ann, place.client("d_bob") as bob, place.client("d_node") as node:
        handle = ann.submit("jobs.double", {"x": 3})
        assert handle.result(WAIT_SECONDS) == 6
        with pytest.raises(TaskMissing):
            bob.task(handle.id).result(WAIT_SECONDS)
        assert node.task(handle.id).result(WAIT_SECONDS) == 6
        with place.client() as second:
            assert second.task(handle.id).result(WAIT_SECONDS) == 6
        with place.node.client() as local:
            assert local.task(handle.id).result(WAIT_SECONDS) == 6


# -- what is refused ------------------------------------------------------------------------------


def test_a_literal_secret_is_refused_before_it_is_stored(place: Place) -> None:
    with place.client() as client:
        with pytest.raises(InvalidTask, match="redact"):
            client.submit("jobs.log_in", {"user": "ann", "password": "S3cr3t"}).result(WAIT_SECONDS)
        known = client.submit("jobs.log_in", {"user": "ann", "password": Secret("NO_SUCH")})
        with pytest.raises(TaskFailed):  # the node has no such secret; it was accepted
            known.result(WAIT_SECONDS)
    rows = place.cluster.sql("SELECT count(*) FROM musterd.done WHERE name = 'jobs.log_in'")
    assert rows == [(1,)]


def test_a_literal_secret_that_got_past_is_refused_by_the_node_that_claims(place: Place) -> None:
    engine = place.cluster.engine("d_ann")
    spec = make_spec("jobs.log_in", {"user": "eve", "password": "S3cr3t"}, max_retries=3)
    assert engine.submit([spec])[0].state == "accepted"
    with place.client() as client, pytest.raises(TaskFailed, match="redact") as failed:
        client.task(spec.id).result(WAIT_SECONDS)
    engine.close()
    assert failed.value.kind == "invalid"
    assert failed.value.attempts == 1
    assert "S3cr3t" not in str(failed.value)
    assert not place.runs.exists() or "eve" not in place.runs.read_text()


@pytest.fixture
def locked(place: Place) -> Iterator[Place]:
    """The password of d_nobody counts; others are let in without."""
    hba = place.server.folder / "data" / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text(f"local all d_nobody scram-sha-256\n{before}")
    place.cluster.sql("SELECT pg_reload_conf()")
    yield place
    hba.write_text(before)
    place.cluster.sql("SELECT pg_reload_conf()")


def test_each_database_that_cannot_be_used_says_why(locked: Place, tmp_path: Path) -> None:
    place = locked
    with contextlib.suppress(psycopg.Error):
        place.cluster.sql("CREATE DATABASE empty")
    refused = {
        place.url("d_nobody", "wrong"): "password authentication failed",
        place.url("d_nobody"): "GRANT musterd_submit TO d_nobody",
        place.url(name="nowhere"): 'database "nowhere" does not exist',
        place.url(name="empty"): "musterctl cluster migrate",
        place.url("nobody_at_all"): "does not exist",
    }
    for url, why in refused.items():
        client = Client(url, connect_timeout=WAIT_SECONDS)
        handle = client.submit("jobs.double", {"x": 1})
        with pytest.raises(NotConnected, match="cannot be used") as error:
            handle.result(WAIT_SECONDS)
        assert why in str(error.value)
        assert "wrong" not in str(error.value).replace("wrong password", "")
        assert PASSWORD not in str(error.value)
        with pytest.raises(NotConnected):
            client.close(timeout=WAIT_SECONDS)
    away = Client(f"postgresql://ann:{PASSWORD}@/x?host={tmp_path}", connect_timeout=0.5)
    with pytest.raises(NotConnected, match=r"within 0\.5 s") as error:
        away.submit("jobs.double", {"x": 1}).result(WAIT_SECONDS)
    assert PASSWORD not in str(error.value) + repr(away)
    with pytest.raises(NotConnected):
        away.close(timeout=WAIT_SECONDS)


def test_what_a_program_cannot_deliver_is_said_without_its_password(place: Place) -> None:
    program = (
        "from musterd import Client\n"
        f"client = Client('postgresql://ann:{PASSWORD}@/x?host=/nowhere', connect_timeout=0.5)\n"
        "print(client.submit('jobs.double', {'x': 1}).id)"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 120
    assert "not delivered to /nowhere:5432/x" in done.stderr
    assert done.stdout.strip() in done.stderr
    assert PASSWORD not in done.stderr


def test_a_database_that_becomes_usable_is_used(place: Place) -> None:
    place.cluster.sql("CREATE ROLE d_late LOGIN")
    with Client(place.url("d_late"), connect_timeout=WAIT_SECONDS) as client:
        handle = client.submit("jobs.double", {"x": 1})
        with pytest.raises(NotConnected, match="d_late"):
            handle.result(WAIT_SECONDS)
        place.cluster.sql("GRANT musterd_submit TO d_late")

        def result() -> int | None:
            with contextlib.suppress(NotConnected):
                return int(handle.result(WAIT_SECONDS))
            return None

        assert wait_for("it is let in", result) == 2


# -- ends of programs and gateways ----------------------------------------------------------------


def test_a_password_is_nowhere_to_be_seen(place: Place) -> None:
    with place.client() as client:
        client.submit("jobs.double", {"x": 1}).result(WAIT_SECONDS)
        assert client._link._direct is not None
        pid = client._link._direct.state().pid
        for name in ("cmdline", "environ", "comm"):
            assert PASSWORD.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        assert Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0") == b"musterd: direct"
        assert PASSWORD not in repr(client)
        assert psutil.Process(pid).ppid() != os.getpid()  # nobody waits for it by mistake
        titles = place.cluster.sql("SELECT string_agg(query, ' ') FROM pg_stat_activity")
        assert PASSWORD not in str(titles)


def test_a_gateway_that_is_killed_loses_nothing(place: Place) -> None:
    with place.client("d_eve") as client:
        running = client.submit("jobs.slow", {"seconds": 1})
        handles = []
        for number in range(300):
            handles.append(client.submit("jobs.once", {"number": number}))
            if number % 100 == 50:  # all is acknowledged
                client.flush(WAIT_SECONDS)
            if number % 50 == 0 and number:
                assert client._link._direct is not None
                wait_for("it is served", lambda: client._link.session.ready)
                os.kill(client._link._direct.state().pid, signal.SIGKILL)
        assert [each.result(WAIT_SECONDS) for each in handles] == list(range(300))
        assert running.result(WAIT_SECONDS) == "done"
    ran = [int(each) for each in place.runs.read_text().split()]
    assert sorted(ran) == list(range(300))
    wait_for("no session of a dead gateway is left", lambda: place.sessions("d_eve") <= 4)


def test_a_gateway_ends_what_the_one_before_is_still_doing(place: Place) -> None:
    """A submit that comes late would begin a task anew that was sent again, and has ended."""
    waits = (
        "SELECT pid FROM pg_stat_activity WHERE usename = 'd_eve' AND wait_event_type = 'Lock'"
        " AND query LIKE '%%submit_1%%'"
    )
    with place.client("d_eve") as client:
        client.submit("jobs.once", {"number": 1}).result(WAIT_SECONDS)
        with psycopg.connect(place.cluster.url) as blocking:
            blocking.execute("LOCK TABLE musterd.live IN EXCLUSIVE MODE")
            late = client.submit("jobs.once", {"number": 2})
            ((pid,),) = wait_for("the submit waits", lambda: place.cluster.sql(waits))
            assert client._link._direct is not None
            os.kill(client._link._direct.state().pid, signal.SIGKILL)
            ended = f"SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})"
            wait_for("its session is ended", lambda: place.cluster.sql(ended))
        assert late.result(WAIT_SECONDS) == 2
    assert place.runs.read_text().split() == ["1", "2"]


@pytest.mark.parametrize("how", ["exit", "kill", "os._exit"])
def test_a_program_leaves_nothing_however_it_ends(place: Place, how: str) -> None:
    end = {"exit": "", "kill": "time.sleep(600)", "os._exit": "os._exit(0)"}[how]
    process = place.start(
        "client.submit('jobs.once', {'number': 1}).result()\n"
        "later = client.submit('jobs.once', {'number': 2})\n"
        "say(gateway_of(client), later.id)\n" + end
    )
    pid, later = heard(process)
    if how == "kill":
        assert [each.pid for each in place.gateways()] == [int(pid)]
    if how == "kill":
        process.kill()
    finished(process)
    wait_for("nothing is left", place.is_clean)
    if how == "exit":  # what it had not delivered was delivered at its exit
        with place.client("d_node") as client:
            assert client.task(later).result(WAIT_SECONDS) == 2


def test_a_program_and_its_gateway_are_killed_together(place: Place) -> None:
    process = place.start(
        "client.submit('jobs.once', {'number': 1}).result()\n"
        "say(gateway_of(client))\n"
        "client.submit_many([('jobs.slow', {'seconds': 0.01})] * 500)\n"
        "time.sleep(600)"
    )
    (pid,) = heard(process)
    os.kill(int(pid), signal.SIGKILL)
    process.kill()
    finished(process)
    wait_for("nothing is left", place.is_clean)


def test_a_gateway_lives_on_when_the_thread_that_made_it_ends(place: Place) -> None:
    found: list[Client] = []
    thread = threading.Thread(target=lambda: found.append(place.client("d_bob")))
    thread.start()
    thread.join()
    with found[0] as client:
        assert client.submit("jobs.double", {"x": 1}).result(WAIT_SECONDS) == 2
        assert client._link._direct is not None
        pid = client._link._direct.state().pid
        assert client.submit("jobs.double", {"x": 2}).result(WAIT_SECONDS) == 4
        assert client._link._direct.state().pid == pid


def test_a_fork_has_a_gateway_of_its_own_and_keeps_none_alive(place: Place) -> None:
    process = place.start(
        "client.submit('jobs.once', {'number': 1}).result()\n"
        "first = gateway_of(client)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    own = Client(url, connect_timeout=60)\n"
        "    own.submit('jobs.once', {'number': 2}).result()\n"
        "    say(os.getpid(), gateway_of(own), first)\n"
        "    time.sleep(600)\n"
        "client.submit('jobs.once', {'number': 3}).result()\n"
        "assert gateway_of(client) == first\n"
        "time.sleep(600)"
    )
    child, own, first = map(int, heard(process))
    assert own != first
    process.kill()
    wait_for("the first gateway ends", lambda: not psutil.pid_exists(first))
    assert psutil.pid_exists(own)
    os.kill(child, signal.SIGKILL)
    finished(process)
    wait_for("nothing is left", place.is_clean)
    assert sorted(place.runs.read_text().split()) == ["1", "2", "3"]


def test_a_program_that_inherits_orphans_waits_for_its_gateways(place: Place) -> None:
    """As process 1 of a container does."""
    process = place.start(
        "import ctypes\n"
        "assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # a subreaper\n"
        "client.submit('jobs.once', {'number': 1}).result()\n"
        "first = gateway_of(client)\n"
        "os.kill(first, 9)\n"
        "client.submit('jobs.once', {'number': 2}).result()\n"
        "os.kill(gateway_of(client), 9)\n"
        "client.submit('jobs.once', {'number': 3}).result()\n"
        "while os.path.exists(f'/proc/{first}'):\n"
        "    time.sleep(0.01)\n"
        "say('gone')"
    )
    assert heard(process) == ["gone"]
    assert finished(process) == 0
    wait_for("nothing is left", place.is_clean)


def test_signals_for_the_group_of_a_program_leave_its_gateway(place: Place) -> None:
    """Ctrl-C, or the end of a service: the program still delivers what it has."""
    process = place.start(
        "client.submit('jobs.once', {'number': 1}).result()\n"
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "try:\n"
        "    say(gateway_of(client))\n"
        "    time.sleep(600)\n"
        "finally:\n"
        "    late = client.submit('jobs.once', {'number': 2})\n"
        "    say(late.id)",
        start_new_session=True,
    )
    (pid,) = heard(process)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(int(pid), number)
    os.killpg(process.pid, signal.SIGTERM)
    (late,) = heard(process)
    assert finished(process) == 0
    wait_for("nothing is left", place.is_clean)
    with place.client("d_node") as client:
        assert client.task(late).result(WAIT_SECONDS) == 2


def test_two_programs_at_once(place: Place) -> None:
    work = "say(*[each.result() for each in client.submit_many([('jobs.once', {{'number': n}}) for n in range({0}, {0} + 200)])])"  # noqa: E501
    programs = [place.start(work.format(start)) for start in (0, 1000)]
    found = [list(map(int, heard(each))) for each in programs]
    assert found == [list(range(200)), list(range(1000, 1200))]
    assert [finished(each) for each in programs] == [0, 0]
    assert len(place.runs.read_text().split()) == 400
    wait_for("nothing is left", place.is_clean)


def test_a_gateway_that_nobody_uses_ends_and_another_is_started(place: Place) -> None:
    def tuned(milliseconds: int) -> dict[str, str]:
        """Return variables by which gateways wait for so long."""
        folder = place.programs / f"linger-{milliseconds}"
        folder.mkdir()
        module = "import musterd.supervisor.node.direct_loop as module\n"
        (folder / "sitecustomize.py").write_text(
            f"{module}module.LINGER_NS = {milliseconds}_000_000\n"
        )
        return {"PYTHONPATH": str(folder)}

    closes = (
        "client.submit('jobs.once', {'number': 1}).result()\n"
        "say(gateway_of(client))\n"
        "client.close()\n"
        "sys.stdin.readline()\n"
    )
    hasty = place.start(
        closes + "with Client(url, connect_timeout=60) as other:\n"
        "    assert other.submit('jobs.once', {'number': 2}).result() == 2\n"
        "    say(gateway_of(other))",
        env=tuned(100),
    )
    (first,) = map(int, heard(hasty))
    patient = place.start(closes, env=tuned(3_600_000))
    (kept,) = map(int, heard(patient))
    wait_for("it ends by itself", lambda: not psutil.pid_exists(first))
    assert psutil.pid_exists(kept)
    for process in (hasty, patient):
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert int(heard(hasty)[0]) != first
    assert finished(hasty) == finished(patient) == 0


@pytest.mark.long
def test_postgresql_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers() as server, short_folders() as folder:
        place = Place(server, folder)
        monkeypatch.chdir(place.here)
        place.start_node()
        try:
            with place.client() as client:
                running = client.submit("jobs.slow", {"seconds": 1})
                wait_for("it runs", lambda: running.status(WAIT_SECONDS).state == "running")
                handles = [client.submit("jobs.once", {"number": n}) for n in range(200)]
                client.flush(WAIT_SECONDS)
                server.stop(signal.SIGQUIT)
                with pytest.raises(QueueFull, match="database") as refused:
                    client.submit("jobs.double", {"x": 1}).result(WAIT_SECONDS)
                assert refused.value.retry_after > 0
                server.start()
                assert [each.result(WAIT_SECONDS) for each in handles] == list(range(200))
                assert running.result(WAIT_SECONDS) == "done"
                assert client.submit("jobs.double", {"x": 2}, wait=True).result(WAIT_SECONDS) == 4
        finally:
            place.node.stop()


@pytest.mark.long
def test_a_storm_of_killed_gateways_loses_nothing_and_runs_nothing_twice(place: Place) -> None:
    work = (
        "ids = []\n"
        "for first in range({0}, {0} + 1000, 20):\n"
        "    numbers = range(first, first + 20)\n"
        "    many = client.submit_many([('jobs.once', {{'number': n}}) for n in numbers])\n"
        "    assert [each.result() for each in many] == list(numbers)\n"
        "say('done')"
    )
    programs = [place.start(work.format(start)) for start in (0, 10_000, 20_000)]
    killed: set[int] = set()
    chance = random.Random(7)
    while any(each.poll() is None for each in programs):
        for gateway in place.gateways():
            if chance.random() < 0.3:
                with contextlib.suppress(psutil.NoSuchProcess):
                    gateway.kill()
                    killed.add(gateway.pid)
        time.sleep(chance.uniform(0.05, 0.5))
    assert [heard(each) for each in programs] == [["done"]] * 3
    assert [finished(each) for each in programs] == [0, 0, 0]
    assert len(killed) >= 5, "too few were killed to prove anything"
    ran = sorted(map(int, place.runs.read_text().split()))
    assert ran == [start + n for start in (0, 10_000, 20_000) for n in range(1000)]
    wait_for("nothing is left", place.is_clean)
