"""Real daemons when things go wrong: nothing that was acknowledged is lost, each task ends once."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from breakage import allow, fill, ip, namespace, shift_clock, small_disk, standby_of
from nodes import Nodes, freeze, is_root, kill_all, nodes_of, proxy_to, thaw
from postgres import OWNER, PORT, Cluster, Server, servers

from musterd import Client, QueueFull
from support.waiting import wait_for

WEEK_NS = 7 * 86_400 * 10**9
HOUR = 3600


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Server, Nodes]]:
    """A server of its own, and nodes on it."""
    with servers() as server, nodes_of(server, tmp_path, "faults") as nodes:
        yield server, nodes


def submitted(client: Client, numbers: range, **more: object) -> list[str]:
    """Submit tasks one after the other; return the ids once all are acknowledged."""
    handles = [client.submit("jobs.work", {"n": n, **more}) for n in numbers]
    client.flush(timeout=60)
    return [handle.id for handle in handles]


def all_end(nodes: Nodes, number: int) -> None:
    def ended() -> bool:
        try:
            rows = nodes.database.sql("SELECT count(*) FROM musterd.done")
        except psycopg.OperationalError:
            return False
        return rows == [(number,)]

    wait_for(f"{number} tasks have ended", ended)
    nodes.check(number)


# -- PostgreSQL ends, and comes back ----------------------------------------------------------


def test_postgresql_is_killed_while_work_flows(own: tuple[Server, Nodes]) -> None:
    server, nodes = own
    a, b = nodes.start("a", "b")
    with a.client() as of_a, b.client() as of_b, ThreadPoolExecutor(2) as threads:
        under_way = [
            threads.submit(submitted, of_a, range(150)),
            threads.submit(submitted, of_b, range(150, 300)),
        ]
        wait_for("work flows", lambda: len(nodes.runs()) > 20)
        server.stop(signal.SIGQUIT)
        server.start()
        ids = [id_ for each in under_way for id_ in each.result(timeout=60)]
        assert len(set(ids)) == 300
    all_end(nodes, 300)
    assert {n for n, _ in nodes.runs()} == set(range(300))
    assert "deadlock" not in server.log


@pytest.mark.long
def test_a_crash_of_postgresql_that_forgets_claims_starts_no_task_twice(tmp_path: Path) -> None:
    """The node registers what it runs before anything is granted to anybody."""
    with servers(wal_writer_delay="10s") as server, nodes_of(server, tmp_path, "faults") as nodes:
        a = nodes.make("a", lease="1h")
        hour_ns = HOUR * 10**9  # nothing else is written that would take the claim to the disk
        a.tune("musterd.supervisor.cluster.claimer", BEGUN_NS=hour_ns)
        a.tune("musterd.supervisor.cluster.calls", TICK_NS=hour_ns, REAP_NS=hour_ns)
        a.start()
        nodes.wait_for(a)
        gate = nodes.folder / "gate"
        with a.client() as client:
            client.submit("jobs.work", {"n": 0}).result(timeout=60)
            handle = client.submit("jobs.work", {"n": 1, "until": str(gate)})
            wait_for("it runs", lambda: (1, "a") in nodes.runs("begins"))
            server.stop(signal.SIGQUIT)
            frozen = [each for each in a.processes() if "cluster" in " ".join(each.cmdline())]
            for process in frozen:
                process.send_signal(signal.SIGSTOP)
            server.start()
            state = nodes.database.sql("SELECT state, claim FROM musterd.live")
            [b] = nodes.start("b")
            for process in frozen:
                process.send_signal(signal.SIGCONT)
            wait_for(
                "it is registered again",
                lambda: nodes.database.sql("SELECT FROM musterd.live WHERE state = 1"),
            )
            assert state == [(0, None)]  # the server had forgotten it
            gate.touch()
            assert handle.result(timeout=60) == 1
            assert client.submit("jobs.double", {"x": 1}).result(timeout=60) == 2
        assert nodes.runs() == [(0, "a"), (1, "a")]
        assert b.status().state == "running"
        nodes.check(3)


@pytest.mark.long
def test_a_failover_to_a_synchronous_standby_loses_nothing(tmp_path: Path) -> None:
    with (
        servers(wal_level="replica", max_wal_senders="5") as server,
        standby_of(server) as standby,
        nodes_of(server, tmp_path, "faults") as nodes,
    ):
        both = nodes.url(f"{server.folder},{standby.folder}", f"{PORT},{PORT}")
        url = f"{both}&target_session_attrs=read-write"
        a, b = nodes.start("a", "b", url=url)
        assert "no synchronous standby" not in a.log()
        with a.client() as of_a, b.client() as of_b, ThreadPoolExecutor(2) as threads:
            under_way = [
                threads.submit(submitted, of_a, range(100), seconds=0.01),
                threads.submit(submitted, of_b, range(100, 200), seconds=0.01),
            ]
            wait_for("work flows", lambda: len(nodes.runs()) > 20)
            server.stop(signal.SIGQUIT)
            standby.promote()
            nodes.database.server = standby
            ids = [id_ for each in under_way for id_ in each.result(timeout=60)]
            assert len(set(ids)) == 200
        all_end(nodes, 200)
        for node in (a, b):
            node.stop()


# -- PostgreSQL cannot be reached, or is slow -------------------------------------------------


def test_a_node_that_is_cut_off_loses_its_tasks_and_comes_back(own: tuple[Server, Nodes]) -> None:
    """It runs on what it has; its results do not count. Its clients are refused, and not lost."""
    server, nodes = own
    with proxy_to(server) as proxy:
        [a] = nodes.start("a", url=nodes.url("127.0.0.1", proxy.port))
        gate = nodes.folder / "gate"
        with a.client() as of_a:
            ids = submitted(of_a, range(2), until=str(gate))
            wait_for("both run", lambda: len(nodes.runs("begins")) == 2)
            [b] = nodes.start("b")
            proxy.cut()
            wait_for("they run elsewhere", lambda: len(nodes.runs("begins")) == 4)
            with pytest.raises(QueueFull, match="database"):
                of_a.submit("jobs.double", {"x": 1}).result(timeout=60)
            gate.touch()
            wait_for("both nodes have ended them", lambda: len(nodes.runs()) == 4)
            all_end(nodes, 2)
            proxy.heal()
            assert [of_a.task(id_).result(timeout=60) for id_ in ids] == [0, 1]
            wait_for("a is back", lambda: nodes.tenure("a"))
            assert of_a.submit("jobs.double", {"x": 2}, wait=True).result(timeout=60) == 4
        nodes.check(3)
        wait_for("the log tells of it", lambda: "cluster.fenced" in a.log())
        for line in (
            "cluster.away",
            "cluster.unreachable",
            "cluster.lease_over",
            "cluster.reachable",
        ):
            assert line in a.log()
        assert "cluster.node_lost" in b.log()


def test_a_fence_that_stops_ends_what_runs_with_the_lease(own: tuple[Server, Nodes]) -> None:
    server, nodes = own
    with proxy_to(server) as proxy:
        url = nodes.url("127.0.0.1", proxy.port)
        [a] = nodes.start("a", url=url, cluster__fence="stop")
        gate = nodes.folder / "gate"
        with a.client() as client:
            ids = submitted(client, range(2), until=str(gate))
            wait_for("both run", lambda: len(nodes.runs("begins")) == 2)
            proxy.cut()
            wait_for("nothing runs any more", lambda: not a.pool("jobs").busy)
            assert nodes.runs() == []
            proxy.heal()
            gate.touch()
            assert [client.task(id_).result(timeout=60) for id_ in ids] == [0, 1]
        nodes.check(2)


@pytest.mark.long
def test_postgresql_cannot_be_reached_for_longer_than_the_lease(own: tuple[Server, Nodes]) -> None:
    """Nobody is reaped: nobody could beat. What ran meanwhile counts, and runs once."""
    server, nodes = own
    a, b = nodes.start("a", "b")
    gate = nodes.folder / "gate"
    with a.client() as client:
        ids = submitted(client, range(4), until=str(gate))
        wait_for("all run", lambda: len(nodes.runs("begins")) == 4)
        tenures = [nodes.tenure("a"), nodes.tenure("b")]
        server.stop()
        for node in (a, b):
            wait_for("the lease is over", lambda each=node: "cluster.lease_over" in each.log())  # type: ignore[misc]
        gate.touch()
        wait_for("all have ended", lambda: len(nodes.runs()) == 4)
        server.start()
        assert [client.task(id_).result(timeout=60) for id_ in ids] == list(range(4))
    nodes.check(4)
    assert [nodes.tenure("a"), nodes.tenure("b")] == tenures
    assert len(nodes.runs()) == 4


@pytest.mark.long
def test_a_server_that_says_nothing_holds_nobody_for_ever(own: tuple[Server, Nodes]) -> None:
    """As a network that drops everything without a word."""
    server, nodes = own
    with proxy_to(server) as proxy:
        [a] = nodes.start("a", url=nodes.url("127.0.0.1", proxy.port))
        with a.client() as client:
            assert client.submit("jobs.double", {"x": 1}).result(timeout=60) == 2
            proxy.be_silent()
            stuck = client.submit("jobs.double", {"x": 2})  # nobody knows whether it is accepted
            wait_for("it is said", lambda: "cluster.unreachable" in a.log())
            with pytest.raises(QueueFull, match="database"):
                client.submit("jobs.double", {"x": 2}).result(timeout=60)
            wait_for("it is said", lambda: "cluster.away" in a.log())
            proxy.heal()
            assert stuck.result(timeout=60) == 4
            assert client.submit("jobs.double", {"x": 3}, wait=True).result(timeout=60) == 6
            proxy.be_silent()
            wait_for("it is said again", lambda: a.log().count("cluster.away") >= 2)
        assert a.stop() == 0
        proxy.heal()


@pytest.mark.long
def test_a_slow_postgresql_is_slow_and_nothing_else(own: tuple[Server, Nodes]) -> None:
    server, nodes = own
    with proxy_to(server) as proxy:
        proxy.delay_seconds = 0.05
        [a] = nodes.start("a", url=nodes.url("127.0.0.1", proxy.port))
        with a.client() as client:
            ids = submitted(client, range(30))
            assert [client.task(id_).result(timeout=60) for id_ in ids] == list(range(30))
        nodes.check(30)
        assert a.stop() == 0
        for line in ("cluster.unreachable", "cluster.fenced", "cluster.lease_over"):
            assert line not in a.log()


@pytest.mark.long
@pytest.mark.skipif(not is_root(), reason="network namespaces need root")
def test_the_network_of_one_node_is_cut_and_healed(tmp_path: Path) -> None:
    """Packets are lost without a word: no connection is closed."""
    with (
        namespace("md-node-a") as (inside, outside),
        servers(listen_addresses=f"'{outside}'") as server,
        nodes_of(server, tmp_path, "faults") as nodes,
    ):
        allow(server, inside)
        a = nodes.make("a", url=nodes.url(outside))
        a._launcher = ["ip", "netns", "exec", "md-node-a"]
        a.start()
        nodes.wait_for(a)
        [b] = nodes.start("b")
        gate = nodes.folder / "gate"
        with b.client() as client:
            ids = submitted(client, range(4), until=str(gate))
            wait_for("all run", lambda: len(nodes.runs("begins")) == 4)
            ip("link", "set", "md-out", "down")
            wait_for("a is lost", lambda: "cluster.node_lost" in b.log())
            gate.touch()
            results = [client.task(id_).result(timeout=60) for id_ in ids]
            assert results == list(range(4))
            ip("link", "set", "md-out", "up")
            wait_for("a is back", lambda: nodes.tenure("a"))
            with a.client() as of_a:
                more = submitted(of_a, range(4, 20))
                assert [of_a.task(id_).result(timeout=60) for id_ in more] == list(range(4, 20))
        nodes.check(20)
        assert "cluster.fenced" in a.log()


# -- PostgreSQL is short of something ---------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(not is_root(), reason="a small file system needs root")
def test_a_full_disk_refuses_work_and_loses_none(tmp_path: Path, short_folder: Path) -> None:
    short_folder.chmod(0o711)  # PostgreSQL, another user, has its folder in it
    with (
        small_disk(short_folder / "disk") as disk,
        servers(folder=disk, max_wal_size="'64MB'") as server,
        nodes_of(server, tmp_path, "faults") as nodes,
    ):
        [a] = nodes.start("a")
        with a.client() as client:
            ids = submitted(client, range(20))
            ballast = disk / "ballast"
            fill(ballast)
            full = client.submit("jobs.work", {"n": 20, "until": "x" * 2_000_000})
            with pytest.raises(QueueFull, match="database"):
                full.result(timeout=60)
            assert "No space left on device" in a.log()
            ballast.unlink()
            if server._process is not None and server._process.poll() is not None:
                server.start()  # it ends where it cannot write its log
            ids += submitted(client, range(21, 40))
            results = [client.task(id_).result(timeout=60) for id_ in ids]
            assert results == [*range(20), *range(21, 40)]
        all_end(nodes, 39)


def test_a_server_that_is_read_only_for_now_is_waited_for(own: tuple[Server, Nodes]) -> None:
    """Some services make it so while the disk is full. So is a standby before it takes over."""
    server, nodes = own
    [a] = nodes.start("a")
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = 'faults' AND pid <> pg_backend_pid()"
    )
    with a.client() as client:
        ids = submitted(client, range(10))
        server.execute("ALTER DATABASE faults SET default_transaction_read_only = on")
        server.execute(end)
        doubtful = client.submit("jobs.work", {"n": 10})  # it may have been under way
        wait_for("that is said", lambda: "event=cluster.unreachable" in a.log())
        with pytest.raises(QueueFull, match="database"):
            client.submit("jobs.work", {"n": 11}).result(timeout=60)
        server.execute("ALTER DATABASE faults RESET default_transaction_read_only")
        server.execute(end)
        more = client.submit("jobs.work", {"n": 12}, wait=True)
        assert more.result(timeout=60) == 12
        with suppress(QueueFull):
            assert doubtful.result(timeout=60) == 10
            ids.append(doubtful.id)
        assert [client.task(id_).result(timeout=60) for id_ in ids] == list(range(len(ids)))
    assert "read-only transaction" in a.log()
    assert "cluster.refused" not in a.log()
    nodes.check(len(ids) + 1)


@pytest.mark.long
def test_a_server_without_a_free_connection_is_away_until_there_is_one(tmp_path: Path) -> None:
    with (
        servers(max_connections="16", superuser_reserved_connections="3") as server,
        nodes_of(server, tmp_path, "faults") as nodes,
    ):
        [a] = nodes.start("a")
        with a.client() as client:
            ids = submitted(client, range(10))
            sessions = "FROM pg_stat_activity WHERE usename = 'u_daemon'"
            others: list[psycopg.Connection] = []
            url = nodes.url()

            def take_all() -> bool:
                server.execute(f"SELECT pg_terminate_backend(pid) {sessions} AND query !~ 'other'")
                try:
                    other = psycopg.connect(url, autocommit=True)
                    other.execute("SELECT 'other'")
                    others.append(other)
                except psycopg.OperationalError:
                    return len(others) > 8
                return False

            wait_for("all connections are taken", take_all)
            wait_for("it is said", lambda: "cluster.away" in a.log())
            with pytest.raises(QueueFull, match="database"):
                client.submit("jobs.double", {"x": 1}).result(timeout=60)
            for other in others:
                other.close()
            again = client.submit("jobs.work", {"n": 10}, wait=True)
            ids += [again.id, *submitted(client, range(11, 20))]
            assert [client.task(id_).result(timeout=60) for id_ in ids] == list(range(20))
        nodes.check(20)
        assert "too many clients" in server.log or "remaining connection slots" in server.log


def test_a_transaction_that_is_held_open_holds_nobody_up(own: tuple[Server, Nodes]) -> None:
    server, nodes = own
    server.execute(f"GRANT pg_read_all_stats TO {OWNER}")
    [a] = nodes.start("a")
    with psycopg.connect(nodes.database.url) as held, a.client() as client:
        held.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        held.execute("SELECT count(*) FROM musterd.live")
        ids = submitted(client, range(200))
        assert [client.task(id_).result(timeout=60) for id_ in ids] == list(range(200))
        engine = nodes.database.engine()
        assert engine.statistics().oldest_snapshot_ns > 0
    nodes.check(200)


# -- time -------------------------------------------------------------------------------------


def test_clocks_that_are_an_hour_apart_change_nothing(own: tuple[Server, Nodes]) -> None:
    """Only PostgreSQL's clock counts."""
    _, nodes = own
    a, b = nodes.make("a"), nodes.make("b")
    for node, seconds in ((a, HOUR), (b, -HOUR)):
        shift_clock(node, seconds)
        node.start(wait=False)
    for node in (a, b):
        nodes.wait_for(node)
    with a.client() as of_a, b.client() as of_b:
        gate = nodes.folder / "gate"
        held = submitted(of_a, range(4), until=str(gate))
        wait_for("both work", lambda: len(nodes.runs("begins")) == 4)
        expires = of_a.submit("jobs.work", {"n": 4}, expires=1)
        later = of_b.submit("jobs.work", {"n": 5}, delay=1, expires=3000)
        wait_for("it has expired", lambda: expires.status().state == "expired")
        gate.touch()
        assert [of_b.task(id_).result(timeout=60) for id_ in held] == list(range(4))
        assert later.result(timeout=60) == 5
    rows = nodes.database.sql(
        "SELECT bool_and(submitted_at BETWEEN now() - interval '10 min' AND now() "
        "AND finished_at BETWEEN submitted_at AND now()) FROM musterd.done"
    )
    assert rows == [(True,)]
    nodes.check(6)
    for node in (a, b):
        assert "cluster.fenced" not in node.log()


@pytest.mark.long
def test_a_node_that_comes_back_after_a_week_is_the_same_node(own: tuple[Server, Nodes]) -> None:
    """Its tenure is over, its tasks have run elsewhere, old results are gone; it keeps its name."""
    _, nodes = own
    database: Cluster = nodes.database
    [a] = nodes.start("a")
    with a.client() as client:
        submitted(client, range(2))
        all_end(nodes, 2)
        gate = nodes.folder / "gate"
        held = submitted(client, range(2, 4), until=str(gate))
        wait_for("they run", lambda: len(nodes.runs("begins")) == 4)
    [identity] = database.sql("SELECT identity FROM musterd.node WHERE name = 'a'")
    kill_all(a)
    gate.touch()
    database.pass_ns(WEEK_NS)
    [b] = nodes.start("b")
    with b.client() as client:
        assert [client.task(id_).result(timeout=60) for id_ in held] == [2, 3]
    engine = database.engine()
    engine.retain(86_400 * 10**9)
    database.close()
    nodes.check(2)
    a.start()
    nodes.wait_for(a)
    assert [identity] == database.sql("SELECT identity FROM musterd.node WHERE name = 'a'")
    assert (a.state / "node.id").read_text().split()[0] == identity[0]
    with a.client() as client:
        assert client.submit("jobs.double", {"x": 1}).result(timeout=60) == 2
    assert "name_taken" not in a.log()
    nodes.check(3)


# -- the end of a daemon ----------------------------------------------------------------------


def test_a_daemon_stops_in_good_time_while_postgresql_is_away(own: tuple[Server, Nodes]) -> None:
    """Its ends are lost to the lease, and run again."""
    server, nodes = own
    [a] = nodes.start("a")
    gate = nodes.folder / "gate"
    with a.client() as client:
        submitted(client, range(2), until=str(gate))
        wait_for("they run", lambda: len(nodes.runs("begins")) == 2)
        server.stop()
        wait_for("it is said", lambda: "cluster.away" in a.log())
        gate.touch()
        wait_for("they have ended", lambda: len(nodes.runs()) == 2)
    assert a.stop() == 0
    assert "what ended last runs again" in a.log()
    server.start()
    a.start()
    all_end(nodes, 2)


@pytest.mark.long
def test_a_frozen_daemon_leaves_its_name_to_nobody(own: tuple[Server, Nodes]) -> None:
    """A member that finds its name taken goes on serving, and joins when the name is free."""
    _, nodes = own
    [a] = nodes.start("shed")
    freeze(a)
    second = nodes.make("shed", home="other").start(wait=False)
    wait_for("it is waited for", lambda: "cluster.name_taken" in second.log())
    identity = (second.state / "node.id").read_text().split()[0]
    look = "SELECT FROM musterd.node WHERE tenure <> 0 AND identity = %s"
    wait_for("the second is a member", lambda: nodes.database.sql(look, identity))
    thaw(a)
    wait_for("it is said", lambda: "cluster.name_taken" in a.log())
    with a.client() as client:
        handle = client.submit("jobs.work", {"n": 1}, wait=True)
        assert handle.result(timeout=60) == 1  # run by the other
        assert a.status().state in ("running", "degraded")
        assert second.stop() == 0
        assert client.submit("jobs.work", {"n": 2}).result(timeout=60) == 2
    nodes.check(2)
