"""What holds over two real daemons: keys, remembered results, crashes, expiries, places.

What is rare (kills between two steps) is in test_chaos_cluster.py; each rule by itself, for both
engines, in test_contract*.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import WORKER, Nodes, nodes_of
from postgres import Server

from musterd import TaskExpired, TaskFailed
from musterd.supervisor.cluster.engine import ClusterPolicy
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy
from support.waiting import wait_for

HOLDING = (
    WORKER
    + """
@task(timeout=300)
def inside(ctx, n: int, folder: str) -> int:
    os.makedirs(folder, exist_ok=True)
    mine = os.path.join(folder, str(n))
    open(mine, "w").close()
    most = len(os.listdir(folder))
    note(f"{n} begins")
    time.sleep(0.05)
    os.unlink(mine)
    return most

@task(timeout=60)
def die(ctx, n: int, until: str) -> int:
    note(f"{n} begins")
    if not os.path.exists(until):
        os._exit(1)
    return n
"""
)


@pytest.fixture
def nodes(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    name = f"holds{abs(hash(request.node.name)) % 10**9}"
    with nodes_of(server, tmp_path, name) as made:
        yield made


def test_a_key_is_one_over_both_nodes_and_so_is_its_result(nodes: Nodes) -> None:
    a, b = nodes.start("a", "b")
    gate = nodes.folder / "gate"
    with a.client() as of_a, b.client() as of_b:
        work = {"n": 1, "until": str(gate)}
        tasks = [client.submit("jobs.work", work, key="one") for client in (of_a, of_b) * 3]
        wait_for("it runs", lambda: nodes.runs("begins"))
        of_a.flush()
        of_b.flush()
        gate.touch()
        assert [task.result(timeout=60) for task in tasks] == [1] * 6
        for client in (of_a, of_b):
            assert client.submit("jobs.work", work, key="one", cache=3600).result(timeout=60) == 1
        assert len(nodes.runs()) == 1
        of_b.invalidate("one")
        assert of_a.submit("jobs.work", work, key="one", cache=3600).result(timeout=60) == 1
    assert len(nodes.runs()) == 2
    nodes.check(9)


def test_crashes_on_all_nodes_count_and_a_person_runs_it_again_from_any(nodes: Nodes) -> None:
    a, b = nodes.start("a", "b", worker=HOLDING, pool={"max_crashes": 4})
    until = nodes.folder / "well"
    with a.client() as of_a, b.client() as of_b:
        task = of_a.submit("jobs.die", {"n": 1, "until": str(until)})
        with pytest.raises(TaskFailed, match="quarantined"):
            task.result(timeout=60)
        assert len(nodes.runs("begins")) == 4
        cluster = ("--cluster", "--url-file", str(b.folder / "url"), "--json")
        assert task.id in b.ctl(*cluster, "dead").stdout
        until.touch()
        assert b.ctl(*cluster, "retry", task.id).returncode == 0
        assert of_b.task(task.id).result(timeout=60) == 1
    assert len(nodes.runs("begins")) == 5
    nodes.check(1)


def test_what_expires_while_both_nodes_are_busy_never_begins(nodes: Nodes) -> None:
    a, b = nodes.start("a", "b", size=1)
    gate = nodes.folder / "gate"
    with a.client() as of_a, b.client() as of_b:
        held = [of_a.submit("jobs.work", {"n": n, "until": str(gate)}) for n in range(2)]
        wait_for("both places are taken", lambda: len(nodes.runs("begins")) == 2)
        late = of_b.submit("jobs.work", {"n": 2}, expires=0.2, priority="critical")
        with pytest.raises(TaskExpired):
            late.result(timeout=60)
        gate.touch()
        assert [task.result(timeout=60) for task in held] == [0, 1]
        assert of_b.submit("jobs.work", {"n": 3}).result(timeout=60) == 3
    assert sorted(n for n, _ in nodes.runs("begins")) == [0, 1, 3]
    nodes.check(4)


def test_places_of_sites_and_classes_are_one_over_both_nodes(nodes: Nodes) -> None:
    a, b = nodes.start("a", "b", worker=HOLDING, size=3)
    engine = nodes.database.engine()
    policy = ClusterPolicy(
        classes={"gold": GatePolicy("gold", max_concurrent=2)},
        targets={"shop.example": TargetPolicy(max_concurrent=2)},
    )
    engine.apply(policy, engine.policy().version)
    for name in ("target", "policy"):
        which = {name: {"target": "shop.example", "policy": "gold"}[name]}
        folder = str(nodes.folder / name)
        with a.client() as of_a, b.client() as of_b:
            tasks = [
                (of_a, of_b)[n % 2].submit("jobs.inside", {"n": n, "folder": folder}, **which)
                for n in range(20)
            ]
            most = [task.result(timeout=60) for task in tasks]
        assert max(most) <= 2
    nodes.check(40)
