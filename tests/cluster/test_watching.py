"""Real daemons that share schedules: rules, history and changes, and schedules at run time."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from postgres import Cluster, Server
from test_node import prepared
from test_policy import apply

from musterd import Client
from musterd.ipc.errors import InvalidSchedule, MusterdError, UnknownSchedule
from musterd.supervisor.api import rpc
from musterd.supervisor.ctl import main
from support.daemon import Muster
from support.waiting import wait_for

WORKER = """
import json
from pathlib import Path
from musterd import Permanent, task

@task
def read(ctx, path: str) -> dict:
    found = json.loads(Path(path).read_text())
    if "error" in found:
        raise Permanent(found["error"])
    return found
"""
WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def database(server: Server) -> Cluster:
    cluster = prepared(server, "watching")
    for role in ("admin", "submit"):
        if not cluster.sql(f"SELECT FROM pg_roles WHERE rolname = 'w_{role}'"):
            cluster.sql(f"CREATE ROLE w_{role} LOGIN PASSWORD 'hunter2' IN ROLE musterd_{role}")
    return cluster


def url_of(database: Cluster, user: str) -> str:
    host = database.server.folder
    return f"postgresql://{user}:hunter2@/{database.name}?host={host}&port=5432"


def make(database: Cluster, folder: Path, name: str) -> Muster:
    """Make a node that shares the pool `jobs`, and has `own` for itself."""
    home = folder / name
    home.mkdir()
    (home / "jobs.py").write_text(WORKER)
    url = home / "url"
    url.write_text(url_of(database, "u_daemon"))
    url.chmod(0o600)
    pool = {"worker": "jobs", "size": 1, "env": {"PYTHONPATH": str(home)}}
    pages = {"worker": "musterd.workers.parser:ParserWorker", "size": 1}
    pages["options"] = {"allow": ["127.0.0.1"]}
    cluster = {"url_file": str(url), "node": name, "lease": "5s", "pools": ["jobs", "pages"]}
    given = {f"cluster__{key}": value for key, value in cluster.items()}
    return Muster(home, {"jobs": pool, "own": pool, "pages": pages}, **given)


@pytest.fixture(scope="module")
def nodes(database: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Muster]]:
    database.reset()
    folder = tmp_path_factory.mktemp("nodes")
    musters = [make(database, folder, name) for name in ("shed", "barn")]
    try:
        for muster in musters:
            muster.start()
        engine = database.engine()
        wait_for("both have joined", lambda: sum(each.alive for each in engine.nodes()) == 2)
        yield musters
    finally:
        for muster in musters:
            muster.stop()
        database.close()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page"
    write(path, price=49, seen=1)
    return path


def write(path: Path, **found: object) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.rename(path)


def reported(node: Muster, kind: str, schedule: str) -> list[dict[str, Any]]:
    recent: list[dict[str, Any]] = node.ask(rpc.Events())["recent"]
    return [each for each in recent if each["event"] == kind and each["schedule"] == schedule]


def told_once(nodes: list[Muster], kind: str, schedule: str) -> dict[str, Any]:
    """Wait until each node reports an event; return that of the one node that alerts people."""
    wait_for(f"{kind} everywhere", lambda: all(reported(node, kind, schedule) for node in nodes))
    found = [each for node in nodes for each in reported(node, kind, schedule)]
    assert len(found) == len(nodes)
    [alerting] = [each for each in found if not each.get("elsewhere")]
    return alerting


def on_cluster(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["--cluster", "--url-file", str(folder / "admin"), *words]) == 0
    return capsys.readouterr().out


def test_rules_history_and_content_are_those_of_one_machine_on_every_node(
    nodes: list[Muster],
    database: Cluster,
    tmp_path: Path,
    page: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = f"""
[schedule.kites]
task = "jobs.read"
args = {{path = "{page}"}}
every = "500ms"
notify = "task.changed"
watch = ["price"]
by = 5
stale = 2
"""
    clients = [node.client() for node in nodes]
    readers = [client.changes("kites") for client in clients]
    assert apply(database, tmp_path, text) == 0

    def price() -> object:
        kept = clients[1].history("kites") if clients[1].schedules.list() else []
        return kept[-1].value if kept else None

    wait_for("the baseline is kept", lambda: price() == {"price": 49})
    write(page, price=47, seen=2)  # by less than 5
    wait_for("it is kept", lambda: price() == {"price": 47})
    write(page, price=39, seen=3)
    for reader in readers:
        change = next(reader)
        assert (change.before, change.after) == ({"price": 49}, {"price": 39})
        assert change.summary == "price 49 → 39"
        assert change.task.result(timeout=WAIT_SECONDS)["seen"] == 3
    event = told_once(nodes, "task.changed", "kites")
    assert (event["summary"], event["before"]) == ("price 49 → 39", {"price": 49})
    assert (event["pool"], event["number"], event["number_before"]) == ("jobs", 3, 1)
    for client in clients:
        values = [each.value for each in client.history("kites")]
        assert values == [{"price": 49}, {"price": 47}, {"price": 39}]
    assert "kites  price 49 → 39" in on_cluster(tmp_path, capsys, "changes")
    lines = on_cluster(tmp_path, capsys, "history", "kites").splitlines()
    assert [line[6] for line in lines] == [" ", " ", "*"]
    write(page, error="a challenge page")
    stale = told_once(nodes, "watch.stale", "kites")
    assert "a challenge page" in stale["reason"]
    listed = json.loads(on_cluster(tmp_path, capsys, "--json", "schedule"))["schedules"]
    assert listed[0]["stale"]
    write(page, price=39)
    told_once(nodes, "watch.recovered", "kites")
    with (
        Client(url_of(database, "w_submit"), connect_timeout=WAIT_SECONDS) as direct,
        pytest.raises(MusterdError, match="musterd_admin"),
    ):
        direct.history("kites")
    for reader, client in zip(readers, clients, strict=True):
        reader.close()
        client.close()
    assert apply(database, tmp_path, "") == 0


def test_schedules_are_put_on_one_node_and_seen_run_and_deleted_on_another(
    nodes: list[Muster], database: Cluster, tmp_path: Path, page: Path
) -> None:
    args = {"path": str(page)}
    with nodes[0].client() as shed, nodes[1].client() as barn:
        shed.schedules.put("shared", task="jobs.read", args=args, every="1h")
        shed.schedules.put("mine", task="own.read", args=args, every="1h")
        assert [each.name for each in shed.schedules.list()] == ["mine", "shared"]
        assert [each.name for each in barn.schedules.list()] == ["shared"]
        seen = barn.schedules.get("shared")
        assert (seen.task, seen.when, seen.state) == ("jobs.read", "every 1h", "active")
        assert barn.schedules.run("shared").result(timeout=WAIT_SECONDS)["price"] == 49
        assert shed.schedules.run("mine").result(timeout=WAIT_SECONDS)["price"] == 49
        wait_for("it is counted", lambda: shed.schedules.get("shared").runs == 1)
        barn.schedules.pause("shared")
        assert shed.schedules.get("shared").state == "paused"
        shed.schedules.resume("shared")
        shed.schedules.put("shared", task="jobs.read", args=args, every="300ms")
        wait_for("it runs by itself", lambda: barn.schedules.get("shared").runs >= 3)
        with pytest.raises(InvalidSchedule, match="no node has"):
            shed.schedules.put("wrong", task="nothing.read", every="1h")
        with pytest.raises(InvalidSchedule, match="every"):
            shed.schedules.put("wrong", task="jobs.read", every="soon")
        with pytest.raises(UnknownSchedule):
            barn.schedules.delete("mine")
        barn.schedules.delete("shared")
        shed.schedules.delete("mine")
        assert shed.schedules.list() == []
        for call in (shed.schedules.run, shed.schedules.pause, shed.history):
            with pytest.raises(UnknownSchedule):
                call("shared")


def test_schedules_survive_all_nodes_and_those_of_the_policy_are_read_only(
    nodes: list[Muster], database: Cluster, tmp_path: Path, page: Path
) -> None:
    args = {"path": str(page)}
    text = f'[schedule.fixed]\ntask = "jobs.read"\nargs = {{path = "{page}"}}\nevery = "1h"\n'
    assert apply(database, tmp_path, text) == 0
    with nodes[0].client() as client:
        client.schedules.put("kept", task="jobs.read", args=args, every="300ms")
        with pytest.raises(MusterdError, match="cluster apply"):
            client.schedules.put("fixed", task="jobs.read", args=args, every="1s")
        with pytest.raises(MusterdError, match="cluster apply"):
            client.schedules.delete("fixed")
    for node in nodes:
        node.kill()
    for node in nodes:
        node.start()
    with nodes[1].client() as client:
        runs = client.schedules.get("kept").runs
        wait_for("it goes on", lambda: client.schedules.get("kept").runs > runs)
        client.schedules.delete("kept")
    assert apply(database, tmp_path, "") == 0


def test_a_program_without_a_node_puts_schedules_if_its_role_may(
    nodes: list[Muster], database: Cluster, page: Path
) -> None:
    args = {"path": str(page)}
    with Client(url_of(database, "w_admin"), connect_timeout=WAIT_SECONDS) as admin:
        admin.schedules.put(
            "direct", task="jobs.read", args=args, every="1h", notify="task.changed"
        )
        assert [each.name for each in admin.schedules.list()] == ["direct"]
        assert admin.schedules.run("direct").result(timeout=WAIT_SECONDS)["price"] == 49
        wait_for("it is kept", lambda: len(admin.history("direct")) == 1)
        with Client(url_of(database, "w_submit"), connect_timeout=WAIT_SECONDS) as submitter:
            for call in (
                lambda: submitter.schedules.put("x", task="jobs.read", args=args, every="1h"),
                lambda: submitter.schedules.delete("direct"),
                lambda: submitter.schedules.run("direct"),
                lambda: submitter.schedules.pause("direct"),
            ):
                with pytest.raises(MusterdError, match="musterd_admin"):
                    call()
        admin.schedules.delete("direct")
        assert admin.schedules.list() == []


def test_musterctl_adds_edits_and_removes_schedules_of_the_cluster(
    nodes: list[Muster],
    database: Cluster,
    tmp_path: Path,
    page: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert apply(database, tmp_path, "") == 0

    def ask(*words: str) -> str:
        return on_cluster(tmp_path, capsys, "schedule", *words)

    said = ask("add", "ctl", "--task", "jobs.read", "--every", "1h", f"path={page}")
    assert said == "ctl: active, every 1h\n"
    assert ask("edit", "ctl", "--every", "2h") == "ctl: active, every 2h\n"
    run = ask("run", "ctl").strip()
    with nodes[0].client() as client:
        assert client.task(run).result(timeout=WAIT_SECONDS)["price"] == 49
    refused = nodes[0].ctl("schedule", "add", "ctl", "--task", "jobs.read", "--every", "1h")
    assert "musterctl --cluster schedule add" in refused.stderr
    assert "all nodes share: use --cluster" in nodes[0].ctl("history", "ctl").stderr
    assert ask("remove", "ctl") == "ctl: removed\n"
    sites = tmp_path / "sites.csv"
    sites.write_text(
        "name,url,task\nkites,http://127.0.0.1:1/,jobs.read\ntea,http://127.0.0.1:1/,\n"
    )
    capsys.readouterr()
    words = ("--cluster", "--url-file", str(tmp_path / "admin"), "import", str(sites))
    assert main([*words, "--dry-run"]) == 1
    assert "'parser', which no node has" in capsys.readouterr().err
    assert main([*words]) == 1  # of two, one
    with nodes[1].client() as client:
        assert [each.name for each in client.schedules.list()] == ["kites"]
    assert ask("remove", "kites") == "kites: removed\n"


class Site(BaseHTTPRequestHandler):
    """A page with an ETag; `answers` are the statuses that it gave."""

    answers: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        same = self.headers.get("If-None-Match") == '"1"'
        body = b"" if same else b"<p class=price>49</p>"
        self.answers.append(304 if same else 200)
        self.send_response(self.answers[-1])
        self.send_header("ETag", '"1"')
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_a_page_that_another_node_has_read_costs_this_one_a_304(
    nodes: list[Muster], database: Cluster
) -> None:
    engine = database.engine()
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server, nodes[0].client() as client:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        args = {"url": f"http://127.0.0.1:{server.server_port}/", "select": {"price": ".price"}}
        keys = {"task": "pages.extract", "args": args, "every": "1h", "notify": "task.changed"}
        client.schedules.put_many({"page": keys})
        try:
            for awake, asleep in (("shed", "barn"), ("barn", "shed")):
                engine.drain(asleep, draining=True)
                engine.drain(awake, draining=False)
                run = client.schedules.run("page")
                assert run.result(timeout=WAIT_SECONDS) == {"price": "49"}
                assert (engine.view(run.id) or run).worker == awake
            assert Site.answers == [200, 304]
        finally:
            engine.drain("shed", draining=False)
            client.schedules.delete("page")
            server.shutdown()
