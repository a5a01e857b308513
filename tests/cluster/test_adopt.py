"""The queue of one machine moves into the cluster: nothing is lost, nothing is there twice."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from postgres import Cluster, Server
from rig import Rig, pool, want
from test_node import WORKER

from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor import ctl
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.store.departure import Departure, Doubt
from support import json_answers
from support.daemon import Muster
from support.waiting import wait_for

CTL = (sys.executable, "-m", "musterd.supervisor.ctl")
TASKS = ("double", "slow", "fail")


class Killed(BaseException):
    """What a kill -9 is to a process."""


@pytest.fixture(scope="module")
def database(server: Server) -> Cluster:
    return Cluster(server, "adopting")


@pytest.fixture
def rig(database: Cluster) -> Iterator[Rig]:
    """A cluster whose one node has declared the pool."""
    database.reset()
    rig = database.rig()
    rig.join("attic", pool("jobs", TASKS))
    yield rig
    database.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def machine(home: Path, **settings: object) -> Muster:
    """A daemon without a cluster, whose pool takes tasks and runs none."""
    (home / "jobs.py").write_text(WORKER)
    shared = {"worker": "jobs", "size": 1, "env": {"PYTHONPATH": str(home)}}
    return Muster(home, {"jobs": shared}, **settings)


def fill(muster: Muster, number: int, **options: object) -> list[str]:
    """Put tasks into the store of a daemon, and stop it."""
    muster.start()
    pause(muster)
    with muster.client() as client:
        many = [("jobs.double", {"x": n}, dict(options)) for n in range(number)]
        handles = client.submit_many(many)  # type: ignore[arg-type]
        client.flush()
        ids = [handle.id for handle in handles]
    muster.stop()
    return ids


def pause(muster: Muster) -> None:
    from musterd.supervisor.api import rpc

    muster.ask(rpc.Pause(names=["jobs"]))


def url_file(database: Cluster, home: Path) -> str:
    path = home / "cluster.url"
    path.write_text(f"postgresql://postgres@/{database.name}?host={database.server.folder}")
    path.chmod(0o600)
    return str(path)


def words(database: Cluster, muster: Muster, *more: str) -> list[str]:
    url = url_file(database, muster.folder)
    return ["--json", "cluster", "adopt", "-c", str(muster.config_path), "--url-file", url, *more]


def adopt(database: Cluster, muster: Muster, *more: str) -> tuple[int, dict[str, object]]:
    done = subprocess.run(
        [*CTL, *words(database, muster, *more)], capture_output=True, check=False, timeout=120
    )
    assert done.stdout, done.stderr.decode()
    json_answers.check(("cluster", "adopt"), done.stdout.decode())
    return done.returncode, msgspec.json.decode(done.stdout)


def ids_in(database: Cluster) -> list[str]:
    rows = database.sql("SELECT id FROM musterd.live UNION ALL SELECT id FROM musterd.done")
    return sorted(str(id_) for (id_,) in rows)


def ids_left(muster: Muster) -> list[str]:
    departure = Departure(muster.state / "store.db")
    try:
        tasks, _ = departure.tasks(0, 100_000)
        return sorted(task.spec.id for task in tasks)
    finally:
        departure.close()


def test_all_tasks_are_moved_in_their_order_with_what_they_have(
    database: Cluster, rig: Rig, home: Path
) -> None:
    muster = machine(home)
    ids = fill(muster, 700, target="site.example", priority="high")
    code, result = adopt(database, muster, "--dry-run")
    assert (code, result["moved"], result["pools"]) == (0, 0, {"jobs": 700})
    assert ids_in(database) == []
    code, result = adopt(database, muster)
    assert (code, result["moved"], result["left"]) == (0, 700, {})
    assert ids_in(database) == sorted(ids)
    assert ids_left(muster) == []
    rows = database.sql("SELECT id FROM musterd.live ORDER BY seq")
    assert [id_ for (id_,) in rows] == ids
    view = rig.view(ids[0])
    assert (view.name, view.target, view.priority) == ("jobs.double", "site.example", "high")
    assert msgspec.msgpack.decode(view.args) == {"x": 0}
    code, result = adopt(database, muster)
    assert (code, result["moved"]) == (0, 0)
    muster.start()  # it has nothing to do, and does not mind
    assert muster.pool("jobs").queued.get("high", 0) == 0
    muster.stop()


def test_what_the_cluster_does_not_know_stays_and_is_told(
    database: Cluster, rig: Rig, home: Path
) -> None:
    database.reset()
    muster = machine(home)
    ids = fill(muster, 20)
    code, result = adopt(database, muster)
    assert code == 1
    assert result["moved"] == 0
    ((why, number),) = result["left"].items()  # type: ignore[attr-defined]
    assert "no node has a pool for 'jobs.double'" in why
    assert number == 20
    assert ids_left(muster) == sorted(ids)
    database.rig().join("attic", pool("jobs", TASKS))
    assert adopt(database, muster)[0] == 0
    assert ids_in(database) == sorted(ids)


def test_a_full_queue_is_waited_for_and_then_the_rest_stays(
    database: Cluster,
    rig: Rig,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from musterd.supervisor.ctl import cluster_adopt

    muster = machine(home)
    ids = fill(muster, 30)
    rig.join("attic", pool("jobs", TASKS, queue_size=10))
    rig.submit(*rig.tasks(10, pool="jobs", method="slow"))
    rig.engine.tick()  # it is counted now
    monkeypatch.setattr(cluster_adopt, "FULL_SECONDS", 0.01)
    monkeypatch.setattr(cluster_adopt, "FULL_TRIES", 2)
    assert ctl.main(words(database, muster)) == 78
    said = capfd.readouterr()
    assert "queue of pool 'jobs' is full" in said.err
    assert "run the same command again" in said.err
    assert ids_left(muster) == sorted(ids)
    assert not (muster.state / "adopting.json").exists()


def test_expired_tasks_and_those_of_local_pools_stay(
    database: Cluster, rig: Rig, home: Path
) -> None:
    url = url_file(database, home)
    muster = machine(home)
    ids = fill(muster, 5, expires=0.2)
    config = msgspec.json.decode(muster.config_path.read_bytes())
    config["pools"]["other"] = config["pools"]["jobs"]
    config["cluster"] = {"url_file": url, "pools": ["other"]}
    local = home / "local.json"
    local.write_bytes(msgspec.json.encode(config))
    done = subprocess.run(
        [*CTL, "--json", "cluster", "adopt", "-c", str(local)], capture_output=True, check=False
    )
    assert list(msgspec.json.decode(done.stdout)["left"].values()) == [5], done.stderr
    assert "stay on this machine" in done.stdout.decode()
    code, result = adopt(database, muster)
    assert code == 1
    assert list(result["left"].values()) == [5]  # type: ignore[attr-defined]
    assert "expired" in str(result["left"])
    assert ids_left(muster) == sorted(ids)


def test_a_running_daemon_keeps_its_store(database: Cluster, rig: Rig, home: Path) -> None:
    muster = machine(home).start()
    done = subprocess.run(
        [*CTL, *words(database, muster)], capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 69
    assert b"musterctl shutdown" in done.stderr
    muster.stop()


@pytest.mark.parametrize("killed", [False, True])
def test_what_ran_when_the_daemon_ended_moves_too_and_runs_again(
    database: Cluster, rig: Rig, home: Path, killed: bool
) -> None:
    muster = machine(home, supervisor__drain_timeout="100ms").start()
    runs = home / "jobs.py.runs"
    with muster.client() as client:
        ids = sorted(client.submit("jobs.slow", {"seconds": 50.0}).id for _ in range(2))
        client.flush()
        wait_for("the first one runs", runs.exists)
    if killed:
        muster.kill()
    else:
        muster.stop()
    code, result = adopt(database, muster)
    assert (code, result["moved"]) == (0, 2)
    assert ids_left(muster) == []
    tenure = rig.join("barn", pool("jobs", TASKS))
    grants = rig.engine.claim(tenure, [want(5, "jobs", TASKS)])
    assert sorted((grant.id, grant.attempt, grant.crashes) for grant in grants) == [
        (id_, 1, 0) for id_ in ids
    ]


# -- kills ----------------------------------------------------------------------------------------


def before(function: Callable[..., object]) -> Callable[..., object]:
    def killed(*_arguments: object, **_options: object) -> object:
        raise Killed

    return killed


def after(function: Callable[..., object]) -> Callable[..., object]:
    def killed(*arguments: object, **options: object) -> object:
        function(*arguments, **options)
        raise Killed

    return killed


STEPS = [
    (Departure, "announce"),
    (PostgresEngine, "submit"),
    (Departure, "remove"),
    (Departure, "settle"),
]


@pytest.mark.parametrize("when", [before, after])
@pytest.mark.parametrize(("part", "step"), STEPS)
def test_after_a_kill_at_any_step_the_next_adoption_goes_on(
    *,
    database: Cluster,
    rig: Rig,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: type,
    step: str,
    when: Callable[[Callable[..., object]], Callable[..., object]],
) -> None:
    muster = machine(home)
    ids = fill(muster, 40)
    with monkeypatch.context() as patched:
        patched.setattr(part, step, when(getattr(part, step)))
        with pytest.raises(Killed):
            ctl.main(words(database, muster))
    assert {*ids_in(database), *ids_left(muster)} == {*ids}
    in_both = set(ids_in(database)) & set(ids_left(muster))
    doubtful = (muster.state / "adopting.json").exists()
    assert doubtful or not in_both, "a daemon could run what the cluster has"
    if doubtful:
        muster.start(wait=False)
        assert muster.process is not None
        assert muster.process.wait(timeout=60) == 78
        assert "musterctl cluster adopt" in muster.log()
    # Nodes may have run some of them meanwhile.
    tenure = rig.join("attic", pool("jobs", TASKS))
    grants = rig.claim(tenure, 10, "jobs") if ids_in(database) else []
    rig.finish(tenure, *grants)
    assert adopt(database, muster)[0] == 0
    assert ids_in(database) == sorted(ids)
    assert ids_left(muster) == []
    assert not (muster.state / "adopting.json").exists()


def test_a_process_that_is_killed_loses_nothing(database: Cluster, rig: Rig, home: Path) -> None:
    muster = machine(home)
    ids = fill(muster, 3000)
    for _ in range(3):
        before_ = len(ids_in(database))
        process = subprocess.Popen(
            [*CTL, *words(database, muster)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for("some are moved", lambda n=before_: len(ids_in(database)) > n)  # type: ignore[misc]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if len(ids_in(database)) == len(ids):
            break
    assert adopt(database, muster)[0] == 0
    assert ids_in(database) == sorted(ids)
    assert ids_left(muster) == []


def test_a_doubt_older_than_the_memory_of_the_cluster_is_the_operators_decision(
    database: Cluster, rig: Rig, home: Path
) -> None:
    muster = machine(home)
    ids = fill(muster, 10)
    departure = Departure(muster.state / "store.db")
    assert isinstance(rig.engine, PostgresEngine)
    departure.announce(Doubt(rig.engine.cluster(), "there", 0.0, ids[:3]))
    departure.close()
    done = subprocess.run([*CTL, *words(database, muster)], capture_output=True, check=False)
    assert done.returncode == 78
    assert b"--again" in done.stderr
    assert ids_in(database) == []
    assert adopt(database, muster, "--again")[0] == 0
    assert ids_in(database) == sorted(ids)


def test_another_cluster_does_not_finish_an_adoption(
    database: Cluster, rig: Rig, home: Path
) -> None:
    muster = machine(home)
    ids = fill(muster, 3)
    departure = Departure(muster.state / "store.db")
    departure.announce(Doubt("another", "elsewhere:5432/x", 0.0, ids))
    departure.close()
    done = subprocess.run([*CTL, *words(database, muster)], capture_output=True, check=False)
    assert done.returncode == 78
    assert b"elsewhere:5432/x" in done.stderr


def test_a_task_keeps_what_is_left_of_its_times() -> None:
    from musterd.supervisor.core.model.events import Recovered
    from musterd.supervisor.ctl.cluster_adopt import departing

    spec = TaskSpec("id", "jobs.double", b"\x80", delay_ns=100, expires_ns=1000, max_retries=5)
    task = Recovered(1, spec, 0, 70, 900, 2, 1, 0, False)
    moved = departing(task)
    assert (moved.delay_ns, moved.expires_ns, moved.max_retries) == (70, 900, 3)
    plain = TaskSpec("id", "jobs.double", b"\x80")
    assert departing(Recovered(1, plain, 0, 0, 0, 2, 0, 0, False)) == plain
