"""musterctl on a real PostgreSQL and real daemons: what people type, see and get as exit code."""

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from postgres import Cluster, Server, servers
from test_node import make_node, prepared

from musterd import Client, TaskFailed
from musterd.supervisor import ctl
from musterd.supervisor.ctl import bulk, cluster_bulk
from support import json_answers
from support.daemon import Muster
from support.waiting import wait_for

CTL = (sys.executable, "-m", "musterd.supervisor.ctl")


class Desk:
    """A cluster of two nodes, and an operator in front of it."""

    def __init__(self, database: Cluster, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.admin = self._file("admin.url", "postgres")
        self.shed = make_node(database, folder, "shed")
        self.attic = make_node(database, folder, "attic")

    def _file(self, name: str, user: str) -> str:
        path = self.folder / name
        server = self.database.server.folder
        path.write_text(f"postgresql://{user}@/{self.database.name}?host={server}&port=5432")
        path.chmod(0o600)
        return str(path)

    def run(self, *words: str, admin: bool = False) -> tuple[int, str, str]:
        """Run musterctl as the daemon's user, or as an administrator."""
        where = ["--url-file", self.admin] if admin else ["-c", str(self.shed.config_path)]
        if words[0] == "cluster":
            return musterctl(*words, *where)
        return musterctl("--cluster", *where, *words)

    def text(self, *words: str, admin: bool = False) -> str:
        code, out, err = self.run(*words, admin=admin)
        assert (code, err) == (0, ""), (out, err)
        return out

    def json(self, *words: str, admin: bool = False, code: int = 0) -> Any:
        found, out, err = self.run(*words, "--json", admin=admin)
        assert found == code, (out, err)
        json_answers.check(words, out)
        return msgspec.json.decode(out)

    def node(self, name: str) -> dict[str, Any]:
        (found,) = [each for each in self.json("cluster", "nodes")["nodes"] if each["name"] == name]
        return dict(found)


def musterctl(*words: str) -> tuple[int, str, str]:
    """Run musterctl in this process, which starts faster."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = ctl.main(list(words))
    return code, out.getvalue(), err.getvalue()


def process(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*CTL, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def desk(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    desk = Desk(prepared(server, "desk"), tmp_path_factory.mktemp("desk"))
    desk.shed.start()
    desk.attic.start()
    try:
        wait_for("both nodes have joined", lambda: _alive(desk) == 2)
        yield desk
    finally:
        desk.shed.stop()
        desk.attic.stop()


def _alive(desk: Desk) -> int:
    ((number,),) = desk.database.sql("SELECT count(*) FROM musterd.node WHERE tenure <> 0")
    return int(str(number))


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def client(desk: Desk) -> Iterator[Client]:
    with desk.shed.client() as client:
        yield client


def shared_out(desk: Desk, ids: list[str]) -> dict[str, str]:
    """Return which node has which of four tasks; nothing as long as one has too many."""
    nodes = {id_: str(desk.json("task", id_).get("node")) for id_ in ids}
    return nodes if sorted(nodes.values()) == ["attic", "attic", "shed", "shed"] else {}


# -- what is printed as JSON, and completed -------------------------------------------------------


def test_every_answer_of_the_cluster_is_what_the_schema_says(desk: Desk, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[targets."shop.example"]\nrate = "5/s"\n')
    applied = desk.json("cluster", "apply", str(policy), admin=True)
    assert [each["key"] for each in applied["changes"]] == ['targets."shop.example".rate']
    assert desk.json("cluster", "show")["version"] == applied["version"]
    assert desk.json("cluster", "drain", "shed", admin=True)["state"] == "draining"
    assert desk.json("cluster", "drain", "shed", "--undo", admin=True)["state"] == "alive"
    assert desk.json("cluster", "drain", "nobody", admin=True, code=4)["error"]["data"] is None
    assert {each["name"] for each in desk.json("cluster", "nodes")["nodes"]} >= {"shed", "attic"}
    policy.write_text("")
    desk.json("cluster", "apply", str(policy), admin=True)


def test_names_of_the_cluster_are_completed(desk: Desk) -> None:
    def offered(line: str) -> list[str]:
        words = f"musterctl -c {desk.shed.config_path} {line}"
        done = subprocess.run(
            CTL,
            env={
                **os.environ,
                "_MUSTERCTL_COMPLETE": "bash_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split()) - 1),
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return [found.partition(",")[2] for found in done.stdout.splitlines() if found]

    wait_for("the tasks of nodes", lambda: offered("--cluster submit jobs.d") == ["jobs.double"])
    assert offered("cluster drain sh") == ["shed"]
    assert offered("--cluster status jo") == ["jobs"]


# -- migrate --------------------------------------------------------------------------------------


def test_a_migration_says_what_it_did_what_to_type_and_may_be_repeated(tmp_path: Path) -> None:
    with servers() as server:
        server.execute("CREATE DATABASE fresh; ")
        server.execute('CREATE ROLE "the daemon" LOGIN')
        url = f"postgresql://postgres@/fresh?host={server.folder}&port=5432"
        (tmp_path / "admin").write_text(url)
        (tmp_path / "admin").chmod(0o600)
        config = tmp_path / "musterd.toml"
        config.write_text(
            f'[cluster]\nurl = "postgresql://the%20daemon@/fresh?host={server.folder}"'
        )
        words = ("cluster", "migrate", "--url-file", str(tmp_path / "admin"), "-c", str(config))
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(lambda _: process(*words), range(3)))
        assert [code for code, _, _ in results] == [0, 0, 0], results
        created = [out for _, out, _ in results if "created, version 1" in out]
        assert len(created) == 1
        assert "roles made: musterd_submit, musterd_node, musterd_admin" in created[0]
        assert 'GRANT "musterd_node" TO "the daemon";' in created[0]
        assert sum("nothing to do" in out for _, out, _ in results) == 2
        assert all("no synchronous standby" in err for _, _, err in results)
        code, out, err = musterctl("cluster", "nodes", "-c", str(config))
        assert code == 78
        assert "GRANT musterd_node TO the daemon" in err
        (grant,) = [line.strip() for line in created[0].splitlines() if "GRANT" in line]
        server.execute(grant)
        code, out, err = musterctl("cluster", "nodes", "-c", str(config))
        assert (code, err) == (0, "")
        assert "no node has joined yet" in out
        code, out, _ = musterctl(*words, "--json")
        json_answers.check(words, out)
        result = msgspec.json.decode(out)
        assert (result["before"], result["version"], result["grants"]) == (1, 1, [])
        server.execute("UPDATE musterd.meta SET version = 99, minimum = 99", database="fresh")
        code, _, err = musterctl(*words)
        assert code == 78
        assert "upgrade musterd" in err


# -- nodes ----------------------------------------------------------------------------------------


def test_nodes_are_listed_drained_and_let_go_on(desk: Desk, client: Client) -> None:
    table = desk.text("cluster", "nodes").splitlines()
    assert [line.split()[:2] for line in table[1:]] == [["attic", "alive"], ["shed", "alive"]]
    code, _, err = desk.run("cluster", "drain", "shed")
    assert code == 78  # the daemon's user may not
    assert "musterd_admin" in err
    slow = [client.submit("jobs.slow", {"seconds": 30}) for _ in range(4)]
    client.flush()
    wait_for("they are shared out", lambda: shared_out(desk, [each.id for each in slow]))
    assert "2 tasks still run there" in desk.text("cluster", "drain", "shed", admin=True)
    more = client.submit("jobs.slow", {"seconds": 0})
    ids = [each.id for each in slow]
    assert [each["state"] for each in desk.json("cancel", *ids)["tasks"]] == ["cancelled"] * 4
    assert more.result(timeout=60) == "done"
    task = desk.json("task", more.id)
    assert (task["state"], task["node"]) == ("succeeded", "attic")
    assert desk.node("shed")["state"] == "draining"
    assert "nothing runs there" in desk.text("cluster", "drain", "shed", admin=True)
    assert "claims tasks again" in desk.text("cluster", "drain", "shed", "--undo", admin=True)
    assert desk.node("shed")["state"] == "alive"
    assert desk.run("cluster", "drain", "nobody", admin=True)[0] == 4
    code, _, err = desk.run("cluster", "forget", "shed", admin=True)
    assert code == 1
    assert "--force" in err


# -- tasks ----------------------------------------------------------------------------------------


def test_a_task_that_a_shut_site_refused_is_said_so_and_no_dead_letter(
    desk: Desk, client: Client
) -> None:
    assert desk.run("breaker", "open", "shut.example", admin=True)[0] == 0
    refused = client.submit("jobs.double", {"x": 2}, target="shut.example", on_open="fail")
    with pytest.raises(TaskFailed) as raised:
        refused.result(timeout=60)
    assert (raised.value.kind, raised.value.type) == ("open", "BreakerOpen")
    id_ = refused.id
    assert id_ in desk.text("tasks", "--state", "failed")
    assert id_ not in desk.text("dead")
    assert id_ in desk.text("events", "--kind", "task.refused")
    assert id_ not in desk.text("events", "--level", "warning")


def test_tasks_of_all_nodes_are_shown_and_steered(desk: Desk, client: Client) -> None:
    good = client.submit("jobs.double", {"x": 2}, target="site.example")
    assert good.result(timeout=60) == 4
    bad = client.submit("jobs.fail")
    with pytest.raises(TaskFailed):
        bad.result(timeout=60)
    assert desk.json("task", good.id)["value"] == 4
    assert desk.json("task", good.id)["node"] in ("attic", "shed")
    shown = desk.text("task", bad.id)
    assert re.search("^node: +(attic|shed)$", shown, re.MULTILINE)
    assert "no price" in shown
    assert "failed attempts:" in shown
    assert desk.json("tasks", "--state", "finished", "--limit", "2")["tasks"][0]["id"] == bad.id
    assert bad.id in desk.text("tasks", "--pool", "jobs")
    assert "no tasks" in desk.text("tasks", "--pool", "nobody")
    assert good.id in desk.text("tasks", "--target", "site.example")
    assert bad.id in desk.text("dead", "--error", "no price")
    assert "no failed tasks" in desk.text("dead", "--target", "site.example")
    assert bad.id in desk.text("dead", "--since", "1h")
    assert bad.id in desk.text("dead")
    assert desk.text("retry", bad.id) == f"{bad.id}: queued\n"
    wait_for("it fails again", lambda: desk.json("task", bad.id)["state"] == "failed")
    code, _, err = desk.run("retry", good.id, "nobody")
    assert code == 4
    assert "has succeeded" in err
    assert f"musterctl --cluster task {good.id}" in err
    code, _, err = desk.run("purge", bad.id)
    assert code == 78  # the daemon's user may not
    code, _, err = desk.run("retry", "nobodys")
    assert (code, err) == (4, "musterctl: no such task: 'nobodys': see musterctl --cluster tasks\n")
    code, out, _ = desk.run("purge", bad.id, good.id, admin=True)
    assert (code, out) == (1, "1 failed tasks deleted\n")
    assert desk.run("task", bad.id)[0] == 4


def test_tasks_of_all_nodes_are_steered_in_bulk(
    desk: Desk, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [client.submit("jobs.fail", target=f"{site}.example") for site in "abab"]
    for each in bad:
        with pytest.raises(TaskFailed):
            each.result(timeout=60)
    code, out, err = desk.run("retry", "--target", "a.example")
    assert (code, out) == (2, "")
    assert "2 failed tasks of site a.example: to run them again, add --yes" in err
    done = desk.text("retry", "--target", "a.example", "--yes")
    assert done == "2 failed tasks of site a.example queued again\n"
    ids = sorted(each.id for each in bad)
    wait_for(
        "they fail again",
        lambda: sorted(each["id"] for each in desk.json("dead")["tasks"]) == ids,
    )
    later = [client.submit("jobs.double", {"x": 1}, delay=600, key=f"k{n}") for n in range(2)]
    client.flush()
    assert (
        desk.text("cancel", "--key", "k1", "--yes") == "1 unfinished task with key k1 cancelled\n"
    )
    assert [desk.json("task", each.id)["state"] for each in later] == ["waiting", "cancelled"]
    assert desk.run("purge", "--target", "b.example", "--older-than", "1s", "--yes")[0] == 2
    code, out, _ = desk.run("purge", "--target", "b.example", "--yes", admin=True)
    assert (code, out) == (0, "2 failed tasks of site b.example deleted\n")
    assert len(desk.json("dead")["tasks"]) == 2
    monkeypatch.setattr(bulk, "CLUSTER_BULK_MAX", 1)
    monkeypatch.setattr(cluster_bulk, "CLUSTER_BULK_MAX", 1)
    code, out, err = desk.run("cancel", "--all", "--yes")
    assert (code, out) == (0, "1 unfinished task cancelled\n")
    assert "these were the newest 1: type the command again" in err


def test_a_cancel_reaches_the_node_that_runs_the_task(desk: Desk, client: Client) -> None:
    """With --cluster, and on another node without it."""
    slow = [client.submit("jobs.slow", {"seconds": 60}) for _ in range(4)]
    client.flush()
    nodes = wait_for("they are shared out", lambda: shared_out(desk, [each.id for each in slow]))
    running = desk.json("tasks", "--state", "running")["tasks"]
    assert {each["id"]: each["node"] for each in running} == nodes
    elsewhere = next(id_ for id_, node in nodes.items() if node == "attic")
    here = next(id_ for id_, node in nodes.items() if node == "shed")
    local = ("-s", desk.shed.control_socket)
    listed = musterctl(*local, "tasks")[1]
    assert here in listed
    assert elsewhere not in listed
    assert "musterctl --cluster tasks" in listed
    code, out, _ = musterctl(*local, "task", elsewhere)
    assert code == 0
    assert "node:        attic" in out
    code, out, err = musterctl(*local, "cancel", elsewhere, here)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == sorted(f"{id_}: cancelled" for id_ in (elsewhere, here))
    rest = [id_ for id_ in nodes if id_ not in (elsewhere, here)]
    assert desk.run("cancel", *rest)[0] == 0
    assert desk.run("cancel", "nobody")[0] == 4
    code, _, err = musterctl(*local, "cancel", "nobody")
    assert code == 4
    assert "musterctl --cluster tasks" in err


def test_a_node_says_where_the_tasks_of_the_cluster_are(desk: Desk) -> None:
    local = ("-s", desk.shed.control_socket)
    code, out, err = musterctl(*local, "dead")
    assert (code, err) == (0, "")
    assert "musterctl --cluster dead" in out
    code, _, err = musterctl(*local, "retry", "nobody")
    assert code == 4
    assert "musterctl --cluster retry" in err
    code, _, err = musterctl(*local, "task", "nobody")
    assert code == 4
    assert "no such task in the cluster" in err
    answer = msgspec.json.decode(musterctl(*local, "--json", "tasks")[1])
    assert answer["cluster"] is True


# -- sites, status, events, top -------------------------------------------------------------------


def test_breakers_of_all_nodes_are_listed_and_set(desk: Desk) -> None:
    assert desk.text("breaker", "open", "shop.example", admin=True) == (
        "shop.example: forced-open\n"
    )
    assert "shop.example  forced-open" in desk.text("breaker")
    assert desk.json("breaker", "reset", "shop.example", admin=True)["state"] == "closed"
    code, _, err = desk.run("breaker", "open", "shop.example")
    assert code == 78
    assert "musterd_admin" in err


def test_a_session_is_forgotten_for_all_nodes(desk: Desk) -> None:
    desk.database.sql("INSERT INTO musterd.state VALUES ('session:acme', 'sealed')")
    assert desk.text("sessions", "forget", "acme", admin=True) == "acme: forgotten\n"
    assert not desk.database.sql("SELECT FROM musterd.state WHERE key = 'session:acme'")
    code, _, err = desk.run("sessions", "forget", "acme", admin=True)
    assert (code, "the cluster keeps no session 'acme'" in err) == (4, True)


def test_sessions_are_listed_and_reset_for_all_nodes(desk: Desk) -> None:
    assert "no sessions" in desk.text("sessions", admin=True)
    desk.database.sql(
        "INSERT INTO musterd.login VALUES "
        "('acme', 3, 1, now() + interval '1 hour', 'wrong password', 'shed', now())"
    )
    desk.database.sql("INSERT INTO musterd.state VALUES ('session:other', 'sealed')")
    acme, other = desk.json("sessions", admin=True)["sessions"]
    assert (acme["name"], acme["login_failures"]) == ("acme", 3)
    assert 3500 < acme["held_seconds"] <= 3600
    assert (other["name"], other["kept"], other["bytes"]) == ("other", True, 6)
    assert "acme: 3 login(s) failed: wrong password" in desk.text("sessions", admin=True)
    again = "acme: logs in again when a task needs it\n"
    assert desk.text("sessions", "reset", "acme", admin=True) == again
    assert desk.database.sql("SELECT FROM musterd.login") == []
    code, _, err = desk.run("sessions", "reset", "acme", admin=True)
    assert (code, "the cluster knows no session 'acme'" in err) == (4, True)
    assert desk.run("sessions", "reset", "other", admin=True)[0] == 0  # it is as it should be
    desk.database.sql("DELETE FROM musterd.state WHERE key = 'session:other'")


def test_a_queued_task_says_what_it_waits_for(desk: Desk, client: Client) -> None:
    desk.text("breaker", "open", "shut.example", admin=True)
    task = client.submit("jobs.double", {"x": 1}, target="shut.example")
    client.flush()
    assert "the breaker of shut.example" in desk.json("task", task.id)["waits_for"]
    desk.text("breaker", "close", "shut.example", admin=True)
    assert task.result(timeout=60) == 2


def test_the_status_is_one_of_all_nodes(desk: Desk) -> None:
    status = desk.json("status")
    assert (status["state"], status["at_target"], status["problem"]) == ("running", True, "")
    (jobs,) = status["pools"]
    assert (jobs["state"], jobs["running"], jobs["size"]) == ("RUNNING", 4, 4)
    assert [node["name"] for node in status["nodes"]] == ["attic", "shed"]
    text = desk.text("status")
    assert text.startswith("running: 2 nodes alive; ")
    assert max(map(len, text.splitlines())) <= 80, text
    assert desk.run("status", "nobody")[0] == 4
    assert desk.json("status", "jobs")["at_target"] is True


def test_events_are_followed(desk: Desk, client: Client) -> None:
    words = ["--cluster", "-c", str(desk.shed.config_path), "events", "-f", "--json", "-n", "0"]
    follower = subprocess.Popen([*CTL, *words], stdout=subprocess.PIPE)
    events: list[str] = []

    def read() -> None:
        assert follower.stdout is not None
        events.extend(msgspec.json.decode(line)["event"] for line in follower.stdout)

    thread = Thread(target=read)
    thread.start()
    engine, turns = desk.database.engine(), iter(range(1000))

    def told() -> bool:
        """Let it happen until it is seen: the first look has nothing to compare with."""
        client.submit("jobs.fail")
        engine.drain("attic", draining=next(turns) % 2 == 0)
        time.sleep(1.2)  # for one look, which comes once a second
        return {"task.failed", "cluster.node_draining", "cluster.node_resumed"} <= {*events}

    try:
        wait_for("all is told", told)
    finally:
        engine.drain("attic", draining=False)
        follower.kill()
        follower.wait()
        thread.join()
        assert follower.stdout is not None
        follower.stdout.close()
        desk.database.close()
    assert "no price" in desk.text("events", "--kind", "task.failed", "-n", "1")


def test_top_shows_the_nodes_in_80_columns(desk: Desk) -> None:
    text = desk.text("top")
    assert max(map(len, text.splitlines())) <= 80, text
    for part in ("ALL OK", "attic", "shed", "jobs", "DONE/S"):
        assert part in text
    assert len(desk.json("top")["fleet"]["nodes"]) == 2


@pytest.mark.parametrize("command", [["tail"], ["memory"], ["scale", "jobs", "3"], ["shutdown"]])
def test_what_is_about_one_machine_is_refused(desk: Desk, command: list[str]) -> None:
    code, _, err = desk.run(*command)
    assert code == 2
    assert "is about one machine: run it there, without --cluster" in err


# -- trouble --------------------------------------------------------------------------------------


def test_a_lost_node_is_a_problem_until_it_is_forgotten(tmp_path: Path, server: Server) -> None:
    database = Cluster(server, "losing")
    desk = Desk(database, tmp_path)
    rig = database.rig()
    from rig import pool

    rig.join("gone", pool("jobs", ("slow",)), lease=5)
    rig.join("here", lease=3600)
    [id_] = rig.submit(rig.task("slow", pool="jobs"))
    rig.pass_time(6)
    assert "gone: silent" in desk.json("status", admin=True, code=3)["problem"]
    assert "no live node has the pool jobs" in desk.json("task", id_, admin=True)["waits_for"]
    rig.engine.reap()
    problem = desk.json("status", admin=True, code=3)["problem"]
    assert "gone: lost" in problem
    assert "pool jobs is stranded: 1 task waits" in problem
    assert desk.text("cluster", "forget", "gone", admin=True) == "gone: forgotten\n"
    assert [each["name"] for each in desk.json("cluster", "nodes", admin=True)["nodes"]] == ["here"]
    database.close()


def test_a_database_that_is_away_is_69_and_no_password_is_told(tmp_path: Path) -> None:
    with servers() as server:
        desk = Desk(prepared(server), tmp_path)
        server.stop()
        for words in (["status"], ["tasks"], ["top"], ["events"], ["cluster", "nodes"]):
            code, out, err = desk.run(*words)
            assert code == 69, (words, err)
            assert "does not answer" in err
            assert "hunter2" not in out + err
            assert len(err.splitlines()) == 1
        found = desk.json("status", code=69)
        assert found["error"]["code"] == 69


def test_a_wrong_password_is_not_told(
    desk: Desk, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "url"
    path.write_text("postgresql://nobody:hunter2@/nodes?host=" + str(desk.database.server.folder))
    path.chmod(0o600)
    assert ctl.main(["cluster", "nodes", "--url-file", str(path)]) == 78
    said = capfd.readouterr()
    assert "nobody" in said.err
    assert "hunter2" not in said.out + said.err


def test_the_node_of_a_stopped_daemon_has_left(desk: Desk, tmp_path: Path) -> None:
    """The last one: it stops a daemon that the others use."""
    node: Muster = desk.attic
    node.stop()
    wait_for("it has left", lambda: desk.node("attic")["state"] == "left")
    assert desk.json("status")["state"] == "running"
    assert desk.text("cluster", "forget", "attic", admin=True) == "attic: forgotten\n"
