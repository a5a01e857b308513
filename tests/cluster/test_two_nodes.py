"""Two real daemons and one PostgreSQL: work is shared, nodes differ, nodes die and come back."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import WORKER, Nodes, exit_code, freeze, kill_all, nodes_of, thaw
from postgres import Server

from support.waiting import wait_for


@pytest.fixture
def nodes(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    name = f"two{abs(hash(request.node.name)) % 10**9}"
    with nodes_of(server, tmp_path, name) as made:
        yield made


def test_work_is_shared_and_each_node_serves_its_clients(nodes: Nodes) -> None:
    a, b = nodes.start("a", "b")
    gate = nodes.folder / "gate"
    with a.client() as of_a, b.client() as of_b:
        held = [of_a.submit("jobs.work", {"n": n, "until": str(gate)}) for n in range(4)]
        wait_for("all four places are taken", lambda: len(nodes.runs("begins")) == 4)
        assert sorted(node for _, node in nodes.runs("begins")) == ["a", "a", "b", "b"]
        more = [of_b.submit("jobs.work", {"n": n}) for n in range(4, 30)]
        of_b.flush()
        gate.touch()
        assert [handle.result(timeout=60) for handle in (*held, *more)] == list(range(30))
    assert {node for _, node in nodes.runs()} == {"a", "b"}
    nodes.check(30)


def test_a_node_gets_only_what_its_code_has_and_tells_of_new_code_while_it_is_busy(
    nodes: Nodes,
) -> None:
    special = WORKER + '\n@task\ndef special(ctx) -> str:\n    return os.environ["NODE"]\n'
    [b] = nodes.start("b", pools=("jobs", "side"))
    [a] = nodes.start("a", worker=special)
    gate = nodes.folder / "gate"
    with b.client() as client:
        handles = [client.submit("jobs.special") for _ in range(20)]
        assert {handle.result(timeout=60) for handle in handles} == {"a"}
        a.stop()
        waits = client.submit("jobs.special")
        assert client.submit("jobs.double", {"x": 1}).result(timeout=60) == 2
        busy = client.submit("side.work", {"n": 1, "until": str(gate)})
        wait_for("b is busy", lambda: nodes.runs("begins"))
        assert waits.status().state == "queued"
        tenure = nodes.tenure("b")
        (b.folder / "jobs.py").write_text(special)
        config = json.loads(b.config_path.read_text())
        config["pools"]["jobs"]["env"] |= {"BUILD": "2"}
        b.config_path.write_text(json.dumps(config))
        assert b.ctl("reload").returncode == 0
        assert waits.result(timeout=20) == "b"  # declared while `work` still runs
        assert not nodes.runs()
        gate.touch()
        assert busy.result(timeout=60) == 1
    assert nodes.tenure("b") == tenure
    nodes.check(23)


def test_a_pool_without_workers_gets_one_for_what_another_node_has_accepted(nodes: Nodes) -> None:
    [a] = nodes.start("a", pools=("side",))
    b = nodes.make("b")
    config = json.loads(b.config_path.read_text())
    config["pools"]["jobs"] |= {"size": 0, "min": 0, "max": 2}
    b.config_path.write_text(json.dumps(config))
    b.start(wait=False)
    nodes.wait_for(b)
    with a.client() as client:
        assert client.submit("jobs.double", {"x": 1}).result(timeout=60) == 2
    assert "from 0 to 1: a task waits and there is no worker" in b.log()
    nodes.check(1)


def test_the_tasks_of_a_killed_node_run_on_the_other_when_its_lease_is_over(nodes: Nodes) -> None:
    a, b = nodes.start("a", "b")
    gate = nodes.folder / "gate"
    with b.client() as client:
        handles = [client.submit("jobs.work", {"n": n, "until": str(gate)}) for n in range(4)]
        wait_for("all run", lambda: len(nodes.runs("begins")) == 4)
        of_a = [n for n, node in nodes.runs("begins") if node == "a"]
        kill_all(a)
        gate.touch()
        assert [handle.result(timeout=60) for handle in handles] == list(range(4))
    assert {node for n, node in nodes.runs() if n in of_a} == {"b"}
    nodes.check(4)
    wait_for("the log tells of it", lambda: "cluster.node_lost" in b.log())
    assert "node 'a' was not heard of for its lease: 2 claims went back" in b.log()


def test_a_node_that_is_started_again_gives_its_tasks_back_at_once(nodes: Nodes) -> None:
    """Its name is its own, although its lease is not over."""
    [a] = nodes.start("a", lease="1h")
    gate = nodes.folder / "gate"
    with a.client() as client:
        handles = [client.submit("jobs.work", {"n": n, "until": str(gate)}) for n in range(4)]
        wait_for("two run", lambda: len(nodes.runs("begins")) == 2)
        before = nodes.tenure("a")
        kill_all(a)
        gate.touch()
        a.start()
        assert [handle.result(timeout=60) for handle in handles] == list(range(4))
    assert nodes.tenure("a") > before
    nodes.check(4)
    assert "name_taken" not in a.log()


def test_a_second_live_node_of_one_name_exits_with_69_and_says_so(nodes: Nodes) -> None:
    [a] = nodes.start("shed")
    second = nodes.make("shed", home="other").start(wait=False)
    assert exit_code(second) == 69
    assert "the name 'shed' is taken" in second.log()
    assert "cluster.node" in second.log()
    with a.client() as client:
        assert client.submit("jobs.double", {"x": 4}).result(timeout=60) == 8
    assert a.status().state == "running"
    nodes.check(1)


def test_a_machine_with_a_copied_state_dir_is_a_node_of_its_own(nodes: Nodes) -> None:
    [a] = nodes.start("a")
    before = nodes.tenure("a")
    b = nodes.make("b")
    [identity] = nodes.folder.joinpath("a").rglob("node.id")
    copied = nodes.folder / "b" / identity.relative_to(nodes.folder / "a")
    copied.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(identity, copied)
    nodes.wait_for(b.start())
    wait_for("it is said", lambda: "cluster.copied" in b.log())
    with b.client() as client:
        assert client.submit("jobs.double", {"x": 4}).result(timeout=60) == 8
    assert nodes.tenure("a") == before
    assert "cluster.fenced" not in a.log()
    nodes.check(1)


@pytest.mark.long
def test_the_name_of_a_node_whose_machine_is_gone_is_free_after_its_lease(nodes: Nodes) -> None:
    [a] = nodes.start("shed")
    kill_all(a)
    new = nodes.make("shed", home="other").start(wait=False)
    wait_for("it waits", lambda: "cluster.name_taken" in new.log())
    wait_for("it is up", new._is_up)
    with new.client() as client:
        assert client.submit("jobs.double", {"x": 4}).result(timeout=60) == 8
    nodes.check(1)


@pytest.mark.long
def test_the_results_of_a_node_that_was_stopped_for_longer_than_its_lease_do_not_count(
    nodes: Nodes,
) -> None:
    a, b = nodes.start("a", "b")
    gate = nodes.folder / "gate"
    with b.client() as client:
        handles = [client.submit("jobs.work", {"n": n, "until": str(gate)}) for n in range(4)]
        wait_for("all run", lambda: len(nodes.runs("begins")) == 4)
        of_a = [n for n, node in nodes.runs("begins") if node == "a"]
        freeze(a)
        gate.touch()
        assert [handle.result(timeout=60) for handle in handles] == list(range(4))
        nodes.check(4)
        before = nodes.database.sql("SELECT id, xact FROM musterd.done ORDER BY id")
        thaw(a)
        wait_for("it joins again", lambda: nodes.tenure("a"))
        wait_for("the log tells of it", lambda: "cluster.fenced" in a.log())
        done = [client.submit("jobs.work", {"n": n}) for n in range(4, 20)]
        assert [handle.result(timeout=60) for handle in done] == list(range(4, 20))
    after = dict(nodes.database.sql("SELECT id, xact FROM musterd.done"))  # type: ignore[arg-type]
    assert before == [(id_, after[id_]) for id_, _ in before]  # type: ignore[index]
    assert {node for n, node in nodes.runs() if n in of_a} >= {"b"}
    assert "2 attempts of this node do not count and run again elsewhere" in a.log()
    nodes.check(20)
