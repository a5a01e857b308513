"""The engine on PostgreSQL where it is not like the one in memory: locks, races, crashes, disk."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Literal

import psycopg
import pytest
from postgres import Cluster, Server, servers
from rig import UNWELL, Rig, end, pool, want

from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy
from musterd.ipc.wire.messages import CANCELLED, FAILED, SUCCEEDED
from musterd.ipc.wire.node_messages import LoginVerdict
from musterd.supervisor.cluster.engine import (
    ClusterPolicy,
    EngineAway,
    EngineError,
    Grant,
    Held,
    NodeCard,
    Run,
    ScheduleCard,
)
from musterd.supervisor.cluster.handling import (
    LockAsk,
    ProgressMark,
    StateAsk,
)
from musterd.supervisor.cluster.migrate import migrate
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.core.model.policy import GatePolicy, SchedulePolicy, TargetPolicy
from musterd.supervisor.core.model.runs import Way, way_of
from musterd.supervisor.core.model.timing import Every
from support.waiting import Waiting, wait_for

HOUR = 3600
LOCKS = ("l", "m", "n")  # of the storm
STATES = ("x", "y", "z")
LOGINS: tuple[Literal["worked", "failed", "wanted"], ...] = ("worked", "failed", "wanted")


def late_submit(cluster: Cluster, rig: Rig) -> tuple[psycopg.Connection, list[str]]:
    """Submit in a transaction that is still open; return its connection, and the ids."""
    connection = psycopg.connect(cluster.url)
    tasks = rig.tasks(1)
    connection.execute(
        f"SELECT * FROM {cluster.schema}.submit_1(%s::text[], %s::text[], %s::bytea[], NULL, NULL, "
        f"NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, false)",
        ([t.id for t in tasks], [t.name for t in tasks], [t.args for t in tasks]),
    )
    return connection, [task.id for task in tasks]


# -- nothing is passed over -----------------------------------------------------------------------


def overtaken(cluster: Cluster, rig: Rig, tenure: int) -> list[str]:
    """Submit a task that is committed after later ones of its lane were claimed and the lane was
    left; nobody is told of it. Return its id."""
    rig.submit(rig.task())
    rig.drained(tenure)
    connection, ids = late_submit(cluster, rig)
    # As after some thousand tasks, when the head moves on.
    cluster.sql("SELECT setval('musterd.seq', nextval('musterd.seq') + 10000)")
    rig.submit(*rig.tasks(300))
    assert len(rig.drained(tenure)) == 300
    [(head,)] = cluster.sql("SELECT max(head) FROM musterd.lane")
    connection.commit()
    [(seq,)] = cluster.sql("SELECT seq FROM musterd.live WHERE id = %s", ids[0])
    assert isinstance(head, int)
    assert isinstance(seq, int)
    assert seq <= head, "the head has not passed it: this test tests nothing"
    connection.close()
    return ids


def test_a_task_that_is_committed_late_is_found_when_it_is_told(cluster: Cluster) -> None:
    rig = cluster.rig()
    a = rig.join()
    ids = overtaken(cluster, rig, a)
    [(lane, seq)] = cluster.sql("SELECT lane, seq FROM musterd.live WHERE id = %s", ids[0])
    cluster.sql(
        "SELECT * FROM musterd.wake_1(ARRAY[%s::int], %s, NULL, NULL, NULL, NULL, NULL, 0, NULL)",
        lane,
        seq,
    )
    assert [grant.id for grant in rig.claim(a, 5)] == ids


def test_a_task_whose_client_died_before_it_told_anybody_is_found_by_a_tick(
    cluster: Cluster,
) -> None:
    rig = cluster.rig()
    a = rig.join()
    ids = overtaken(cluster, rig, a)
    rig.engine.tick()
    assert [grant.id for grant in rig.claim(a, 5)] == ids


def test_a_login_task_whose_node_died_before_it_was_submitted_is_begun_by_a_tick(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, other = cluster.rig(), cluster.engine()
    a = rig.join()
    rig.submit(*rig.tasks(2, session="acme"))
    (grant,) = rig.claim(a, 5)
    monkeypatch.setattr(rig.engine, "_begin_logins", lambda: None)
    verdict = LoginVerdict("acme", "wanted", 2, 1, 10, "", "p.fetch")
    rig.finish(a, grant, kind="untouched", login=verdict)
    assert rig.claim(a, 5) == []  # the session is closed all the same
    other.tick()
    (login,) = rig.claim(a, 5)
    assert login.spec.name == "p.fetch"
    rig.finish(a, login)
    other.tick()
    assert [(each.id, each.again) for each in rig.claim(a, 5)] == [(grant.id, True)]


def test_lanes_that_left_the_ring_are_brought_back_by_a_tick(cluster: Cluster) -> None:
    rig = cluster.rig()
    a = rig.join()
    rig.submit(rig.task(), *rig.tasks(5, target="s"))
    cluster.sql("UPDATE musterd.lane SET state = 'e'")
    assert rig.claim(a, 10) == []
    rig.engine.tick()
    assert len(rig.claim(a, 10)) == 6
    rig.submit(*rig.tasks(2, target="t"))
    cluster.sql("UPDATE musterd.lane SET state = 'p', wake_at = NULL")
    rig.pass_time(0.5)  # somebody has just looked, for all nodes
    rig.engine.tick()
    assert len(rig.claim(a, 10)) == 2


def test_a_look_at_all_lanes_that_takes_long_is_made_rarely(cluster: Cluster) -> None:
    rig, here = cluster.rig(), "SELECT set_config('search_path', 'musterd', true)"

    def looks() -> bool:
        return bool(cluster.sql(f"{here}, musterd.is_turn('musterd.repaired', 400)")[0][1])

    def rests(seconds: int) -> None:
        span = f"interval '{seconds} s'"
        cluster.sql(f"{here}, musterd.rest('musterd.repaired', musterd.clock() - {span})")

    assert looks()
    rests(0)
    rig.pass_time(1)
    assert looks()
    rests(10)  # a twentieth of the time would be a look in 200 s
    rig.pass_time(20)
    assert not looks()
    rig.pass_time(10)
    assert looks()
    rests(10)
    rig.pass_time(-60)  # the clock was set back
    assert looks()


def test_a_place_wakes_lanes_of_another_pool_under_the_lock_of_that_pool(
    cluster: Cluster, waiting: Waiting
) -> None:
    rig = cluster.rig()
    rig.apply(ClusterPolicy(targets={"s": TargetPolicy(max_concurrent=1)}))
    a = rig.join("a", pool("p"), pool("q"))
    rig.submit(rig.task(target="s"))
    rig.submit(rig.task(target="s", pool="q"))
    grant = rig.claim_one(a)
    assert rig.claim(a, 5, "q") == []  # parked
    [(number,)] = cluster.sql("SELECT pool FROM musterd.pool WHERE name = 'q'")
    blocker = psycopg.connect(cluster.url)
    blocker.execute("SELECT pg_advisory_xact_lock(7301, %s)", (number,))
    thread = threading.Thread(target=lambda: rig.finish(a, grant))
    thread.start()
    wanted = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    waiting("the wake waits for the pool", lambda: cluster.sql(wanted)[0][0] == 1)
    states = "SELECT state FROM musterd.lane WHERE pool = %s"
    assert cluster.sql(states, number) == [("p",)]
    blocker.close()
    thread.join()
    assert cluster.sql(states, number) == [("r",)]
    assert len(rig.claim(a, 5, "q")) == 1


# -- the disk -----------------------------------------------------------------------------------


def committed_how(cluster: Cluster, tenure: int, names: list[str]) -> str:
    """Claim, undo it, and return how its transaction would have been committed."""
    with psycopg.connect(cluster.url) as connection:
        claim = "SELECT * FROM musterd.claim_1(%s, ARRAY['p'], ARRAY[1], %s)"
        assert len(connection.execute(claim, (tenure, names)).fetchall()) == 1
        row = connection.execute("SHOW synchronous_commit").fetchone()
        connection.rollback()
        assert row is not None
        return str(row[0])


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [({}, "off"), ({"max_concurrent": 5}, "on"), ({"rate": 1.0, "burst": 5}, "on")],
)
def test_claims_wait_for_the_disk_where_a_site_has_limits_and_nowhere_else(
    cluster: Cluster, limits: dict[str, object], wanted: str
) -> None:
    rig = cluster.rig()
    rig.apply(ClusterPolicy(targets={"s": TargetPolicy(**limits)}))  # type: ignore[arg-type]
    a = rig.join()
    rig.submit(rig.task(target="s"))
    assert committed_how(cluster, a, ["p.extract", "p.fetch"]) == wanted


def test_claims_of_a_class_with_places_wait_for_the_disk(cluster: Cluster) -> None:
    rig = cluster.rig()
    rig.apply(ClusterPolicy(classes={"gold": GatePolicy("gold", max_concurrent=3)}))
    a = rig.join()
    rig.submit(rig.task(policy="gold"))
    assert committed_how(cluster, a, ["p.extract", "p.fetch"]) == "on"


@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "one process of it"])
def test_what_was_acknowledged_survives_a_crash_of_the_server(whole: bool) -> None:
    with servers() as server:
        server.execute("CREATE DATABASE x")
        url = server.url("x")
        migrate(url)
        engine, other = PostgresEngine(url), PostgresEngine(url)
        rig = Rig(engine, lambda _: None, lambda _: None)
        rig.apply(ClusterPolicy(targets={"s": TargetPolicy(max_concurrent=2)}))
        a, b = rig.join("a"), other.join(NodeCard("id-b", "b", pools=(pool(),))).tenure
        ids = rig.submit(*rig.tasks(20))
        limited = rig.submit(*rig.tasks(5, target="s"))
        grants = rig.claim(a, 12)
        held = [each for each in grants if each.id in limited]
        assert len(held) == 2
        free = [each for each in grants if each.id not in limited]
        rig.finish(a, *free[:3])
        epoch = engine.beat(a).epoch
        if whole:
            server.stop(signal.SIGQUIT)
            for each, tenure in ((engine, a), (other, b)):
                with pytest.raises(EngineAway):
                    each.beat(tenure)
            server.start()
        else:
            server.kill_one()
            engine.close()
            other.close()
        assert engine.beat(a).epoch != epoch
        assert other.claim(b, [want(5)]) == []  # before everybody has registered
        assert other.rejoin(b, []) == []
        running = [Held(each.id, each.claim) for each in [*held, *free[3:]]]
        assert engine.rejoin(a, running) == []
        more = [grant.id for grant in other.claim(b, [want(30)])]
        assert not set(more) & {each.id for each in grants}
        assert not set(more) & set(limited), "the places of running tasks were forgotten"
        assert len(rig.finish(a, *held, *free[3:])) == len(running)
        assert set(ids) | set(limited) == {
            *more,
            *(each.id for each in grants),
            *(each.id for each in rig.claim(a, 30)),
            *(id_ for id_ in limited if rig.view(id_).state in ("queued", SUCCEEDED)),
        }
        engine.close()
        other.close()


# -- ended tasks ----------------------------------------------------------------------------------


def partitions(cluster: Cluster) -> int:
    query = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'musterd.done'::regclass"
    return int(str(cluster.sql(query)[0][0])) - 1  # without the default


def test_ended_tasks_are_kept_by_time_and_dropped_as_a_whole(cluster: Cluster) -> None:
    rig = cluster.rig()
    engine = cluster.engine()
    a = rig.join(lease=1000 * HOUR)
    rig.pass_time(48 * HOUR)
    [early] = rig.submit(rig.task())
    rig.drained(a)  # before its partition is made
    assert cluster.sql("SELECT count(*) FROM musterd.done_rest") == [(1,)]
    engine.retain(24 * HOUR * SECOND_NS)
    assert cluster.sql("SELECT count(*) FROM musterd.done_rest") == [(0,)]
    made = partitions(cluster)
    assert made >= 8
    rig.pass_time(10 * HOUR)
    [late] = rig.submit(rig.task())
    rig.drained(a)
    engine.retain(24 * HOUR * SECOND_NS)
    assert [rig.ended(id_).state for id_ in (early, late)] == [SUCCEEDED, SUCCEEDED]
    rig.pass_time(20 * HOUR)
    assert engine.retain(24 * HOUR * SECOND_NS) >= 1
    assert rig.outcome(early) is None
    assert rig.ended(late).state == SUCCEEDED
    rig.pass_time(20 * HOUR)
    engine.retain(24 * HOUR * SECOND_NS)
    assert rig.outcome(late) is None


def test_a_resend_is_looked_up_in_all_partitions(cluster: Cluster) -> None:
    rig = cluster.rig()
    engine = cluster.engine()
    a = rig.join(lease=100 * HOUR)
    specs = []
    for _ in range(4):
        engine.retain(100 * HOUR * SECOND_NS)
        specs.append(rig.task())
        rig.submit(specs[-1])
        rig.drained(a)
        rig.pass_time(4 * HOUR)
    assert {each.state for each in engine.submit(specs, resend=True)} == {"known"}
    assert rig.claim(a, 5) == []


# -- those who wait, and nodes --------------------------------------------------------------------


def test_nodes_and_waiters_are_notified_after_the_commit(cluster: Cluster) -> None:
    rig = cluster.rig()
    a = rig.join()
    with psycopg.connect(cluster.url, autocommit=True) as ear:
        for channel in ("musterd_pool", "musterd_waiter_77", f"musterd_node_{a}"):
            ear.execute(f"LISTEN {channel}")

        def heard() -> set[tuple[str, str]]:
            return {(each.channel, each.payload) for each in ear.notifies(timeout=10, stop_after=1)}

        rig.submit(rig.task(), waiter=77)
        assert heard() == {("musterd_pool", "p")}
        grant = rig.claim_one(a)
        rig.engine.cancel([grant.id])
        assert heard() == {(f"musterd_node_{a}", "")}
        rig.finish(a, grant, kind="failed")
        assert heard() == {("musterd_waiter_77", "")}
        assert rig.ended(grant.id).state == CANCELLED


def test_a_change_is_told_whatever_the_order_of_the_transactions(cluster: Cluster) -> None:
    rig = cluster.rig()
    note = (
        "INSERT INTO musterd.change (event, schedule, task, digest, entry, before, at, at_ns, "
        "reason, count, pool) VALUES ('task.changed', %s, 't', 'd', 0, 0, now(), 0, '', 0, '')"
    )
    first = rig.engine.changes()
    with psycopg.connect(cluster.url) as early:
        early.execute(note, ("early",))
        cluster.sql(note, "late")
        told = rig.engine.changes(first.after)
        assert [each.schedule for each in told.notes] == ["late"]
    again = rig.engine.changes(told.after)
    assert [each.schedule for each in again.notes] == ["early"]
    assert rig.engine.changes(again.after).notes == ()


def test_a_policy_has_a_limit(cluster: Cluster) -> None:
    engine = cluster.engine()
    large = ClusterPolicy(schedules=(ScheduleCard("kites", bytes(13 * 1024 * 1024)),))
    with pytest.raises(EngineError, match="at most 16 MiB"):
        engine.apply(large, 0)
    assert engine.policy().version == 0


def test_an_end_is_told_whatever_the_order_of_the_transactions(cluster: Cluster) -> None:
    """A transaction that began earlier may be committed later."""
    rig = cluster.rig()
    a = rig.join()
    rig.submit(*rig.tasks(2), waiter=5)
    first, second = rig.claim(a, 2)
    early = psycopg.connect(cluster.url)
    early.execute("SELECT pg_current_xact_id()")
    early.execute(
        "SELECT * FROM musterd.finish_1(%s, ARRAY[%s], ARRAY[%s::bigint], ARRAY[0::smallint], "
        "NULL, ARRAY[1::bigint], NULL, NULL, ARRAY[false], ARRAY[0::bigint], ARRAY[-1::bigint], "
        "ARRAY[0::bigint], NULL, NULL, NULL)",
        (a, first.id, first.claim),
    )
    rig.finish(a, second)
    told = rig.engine.ended(5)
    assert told.ids == (second.id,)
    early.commit()
    early.close()
    again = rig.engine.ended(5, told.after)
    assert again.ids == (first.id,)
    assert rig.engine.ended(5, again.after).ids == ()


def test_portions_of_ends_miss_none_that_is_committed_between_them(cluster: Cluster) -> None:
    rig = cluster.rig()
    a = rig.join()
    ids = rig.submit(*rig.tasks(9), waiter=5)
    grants = rig.claim(a, 9)
    early = psycopg.connect(cluster.url)
    early.execute("SELECT pg_current_xact_id()")
    early.execute(
        "SELECT * FROM musterd.finish_1(%s, ARRAY[%s], ARRAY[%s::bigint], ARRAY[0::smallint], "
        "NULL, ARRAY[1::bigint], NULL, NULL, ARRAY[false], ARRAY[0::bigint], ARRAY[-1::bigint], "
        "ARRAY[0::bigint], NULL, NULL, NULL)",
        (a, grants[0].id, grants[0].claim),
    )
    for grant in grants[1:7]:
        rig.finish(a, grant)
    first = rig.engine.ended(5, limit=4)
    assert (len(first.ids), first.more) == (4, True)
    early.commit()  # its number is lower than that of all others
    early.close()
    rig.finish(a, *grants[7:])
    heard, after, more = [*first.ids], first.after, True
    while more:
        told = rig.engine.ended(5, after, limit=4)
        heard, after, more = [*heard, *told.ids], told.after, told.more
    told = rig.engine.ended(5, after)
    assert (sorted([*heard, *told.ids]), told.more) == (sorted(ids), False)
    assert rig.engine.ended(5, told.after).ids == ()


def test_a_connection_younger_than_the_lease_reaps_nobody(cluster: Cluster) -> None:
    rig = cluster.rig()
    rig.join("a", lease=30)
    cluster.sql("UPDATE musterd.node SET beat = beat - interval '1 hour'")
    assert cluster.engine().reap() == []
    rig.pass_time(31)
    assert [each.name for each in cluster.engine().reap()] == ["a"]


def test_a_connection_that_ends_during_a_call_is_said_and_comes_back(cluster: Cluster) -> None:
    rig = cluster.rig()
    a = rig.join()
    with ThreadPoolExecutor(1) as pool, psycopg.connect(cluster.url) as other:
        other.execute("SELECT FROM musterd.node FOR UPDATE")
        beat = pool.submit(rig.engine.beat, a)
        waits = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"
        wait_for("it waits", lambda: len(cluster.sql(waits, cluster.name)) == 1)
        [[pid]] = cluster.sql(waits, cluster.name)
        cluster.sql("SELECT pg_terminate_backend(%s)", pid)
        with pytest.raises(EngineAway):
            beat.result(60)
    rig.engine.beat(a)


def test_a_connection_that_ended_before_a_call_is_made_again(cluster: Cluster) -> None:
    rig = cluster.rig()
    a = rig.join()
    mine = "FROM pg_stat_activity WHERE application_name = 'musterd' AND datname = %s"
    cluster.sql(f"SELECT pg_terminate_backend(pid) {mine}", cluster.name)
    wait_for("it has ended", lambda: not cluster.sql(f"SELECT pid {mine}", cluster.name))
    rig.engine.beat(a)


@pytest.mark.parametrize("text", ["a\0b", "ü" * 100])
def test_any_text_is_taken_or_refused(cluster: Cluster, text: str) -> None:
    rig = cluster.rig()
    a = rig.join()
    [verdict] = rig.engine.submit([rig.task(key=text)])
    assert verdict.state == ("rejected" if "\0" in text else "accepted")
    rig.submit(rig.task())
    failure = UNWELL.__class__("error", "E", text)
    for grant in rig.claim(a, 2):
        rig.finish(a, grant, kind="failed", failure=failure)
        assert rig.ended(grant.id).failure == failure


def test_text_is_kept_whatever_encoding_the_environment_names(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    rig = cluster.rig()
    a = rig.join()
    rig.submit(rig.task(key="東京"))
    assert rig.claim_one(a).spec.key == "東京"


def test_a_queue_that_fills_up_during_a_submit_leaves_no_key_to_a_task_that_is_refused(
    server: Server,
) -> None:
    """Others would wait for its end. Each look at the queue may find it as full as it is then."""
    cluster = Cluster(server, "filling")
    rig = cluster.rig()
    a = rig.join()
    cluster.sql("CREATE SEQUENCE musterd.looks")
    cluster.sql("GRANT USAGE ON musterd.looks TO PUBLIC")
    cluster.sql(
        "CREATE OR REPLACE FUNCTION musterd.has_room(p_pool int, p_priority int) RETURNS bool "
        "LANGUAGE sql AS 'SELECT nextval(''musterd.looks'') IN (1, 4)'"
    )
    first = rig.task(key="k")
    states = [rig.engine.submit([task])[0].state for task in (first, *rig.tasks(3, key="k"))]
    states += [rig.engine.submit([first])[0].state]  # by a program that waits for room
    assert states == ["accepted", "rejected", "rejected", "joined", "known"]
    assert rig.drained(a) == [first.id]
    assert cluster.sql("SELECT id FROM musterd.live") == []
    cluster.close()


# -- all at once ----------------------------------------------------------------------------------

RAFTS = SchedulePolicy("rafts", "p.extract", Every(SECOND_NS))


class Storm:
    """Several clients and nodes at once, each a thread with connections of its own."""

    def __init__(self, cluster: Cluster, seed: int, rounds: int) -> None:
        self.cluster = cluster
        self.seed = seed
        self.rounds = rounds
        self.accepted: list[str] = []
        self.errors: list[BaseException] = []
        self.over: list[object] = []
        self.holders: dict[str, int] = {}  # of locks, by name

    def run(self) -> None:
        works: list[Callable[[PostgresEngine, Random], None]] = [
            *([self.client] * 3),
            *([self.node] * 3),
            self.keeper,
            *([self.scheduler] * 2),
            self.ruler,
        ]
        threads = [
            threading.Thread(target=self._guard, args=(work, place))
            for place, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guard(self, work: Callable[[PostgresEngine, Random], None], place: int) -> None:
        engine = PostgresEngine(self.cluster.url)
        try:
            work(engine, Random(f"{self.seed} {place}"))
        except (EngineError, AssertionError, psycopg.Error) as error:
            self.errors.append(error)
        finally:
            engine.close()

    def client(self, engine: PostgresEngine, rng: Random) -> None:
        rig = Rig(engine, lambda _: None, lambda _: None)
        for _ in range(self.rounds):
            tasks = []
            for _ in range(rng.randrange(1, 12)):
                options = {
                    "id": f"{rng.getrandbits(64):x}",
                    "pool": rng.choice("pq"),
                    "target": rng.choice(("", "s", "t", "u")),
                    "priority": rng.randrange(4),
                    "policy": rng.choice(("", "", "gold")),
                    "on_open": rng.choice(("", "fail", "fallback")),
                    "session": rng.choice(("", "", "", "acme", "shop")),
                }
                if rng.random() < 0.5:
                    options["key"] = f"{options['pool']}{rng.randrange(4)}"
                tasks.append(rig.task(**options))  # type: ignore[arg-type]
            verdicts = engine.submit(tasks, waiter=1)
            if rng.random() < 0.3:
                rng.shuffle(tasks)
                engine.submit(tasks, waiter=2, resend=True)
            good = [
                each.id for each in verdicts if each.state in ("accepted", "joined", "answered")
            ]
            self.accepted += good
            if rng.random() < 0.5:
                engine.cancel(rng.sample(good, min(3, len(good))))

    def node(self, engine: PostgresEngine, rng: Random) -> None:
        name = f"n{rng.getrandbits(32)}"
        rig = Rig(engine, lambda _: None, lambda _: None)
        tenure = rig.join(name, pool("p"), pool("q"), lease=HOUR)
        for _ in range(self.rounds * 2):
            wants = [want(rng.randrange(1, 8), each) for each in rng.sample("pq", 2)]
            grants = engine.claim(tenure, wants)
            ends = []
            for grant in grants:
                kind = rng.choice(("succeeded", "succeeded", "failed", "untouched", "crashed"))
                how: dict[str, object] = {}
                if grant.id.startswith("@rafts"):  # most of them fail
                    kind = rng.choice(("succeeded", "failed", "failed", "failed"))
                    how = {"retry_ns": SECOND_NS // 10}
                elif kind == "failed":
                    how = {"retry_ns": rng.choice((-1, 0)), "failure": UNWELL}
                if rng.random() < 0.3:
                    how["clears"] = rng.choice(STATES)
                if grant.spec.session:
                    said = rng.choice(LOGINS)
                    task = rng.choice(("p.fetch", "q.fetch"))
                    how["login"] = LoginVerdict(grant.spec.session, said, 2, 1, 10, "", task)
                    kind = "untouched" if said == "wanted" else kind
                ends.append(end(grant, kind, **how))  # type: ignore[arg-type]
            rng.shuffle(ends)
            self._share(engine, rng, tenure, grants)
            inside = self.cluster.sql(
                "SELECT held, count(*) FROM musterd.live WHERE state = 1 AND held = 's' GROUP BY 1"
            )
            self.over += [row for row in inside if int(str(row[1])) > 3]
            if rng.random() < 0.1:
                self._let_go(tenure, *LOCKS)
                tenure = rig.join(name, pool("p"), pool("q"), lease=HOUR)  # its claims have no end
            else:
                engine.finish(tenure, ends)

    def _share(self, engine: PostgresEngine, rng: Random, tenure: int, grants: list[Grant]) -> None:
        """Load and save states, take and return locks, as handlers do."""
        asks = [
            StateAsk(each.id, each.claim, rng.choice(STATES), rng.random() < 0.7, b"value", 1)
            for each in grants
        ]
        engine.states(tenure, asks)
        kinds = rng.choices(("want", "pass", "leave"), k=len(LOCKS))
        names = rng.sample(LOCKS, len(LOCKS))
        wanted = [LockAsk(name, tenure, kind) for name, kind in zip(names, kinds, strict=True)]  # type: ignore[arg-type]
        self._let_go(tenure, *(each.name for each in wanted if each.kind != "want"))
        views = engine.locks(tenure, wanted)
        for name, view in zip(names, views, strict=True):
            if view.taken and self.holders.setdefault(name, tenure) != tenure:
                self.over.append((name, tenure, dict(self.holders)))
        engine.progress(tenure, [ProgressMark(each.id, 0.5, "half") for each in grants])

    def _let_go(self, tenure: int, *names: str) -> None:
        for name in names:
            if self.holders.get(name) == tenure:
                del self.holders[name]

    def keeper(self, engine: PostgresEngine, rng: Random) -> None:
        for _ in range(self.rounds):
            engine.tick()
            engine.reap()
            if rng.random() < 0.2:
                engine.retain(HOUR * SECOND_NS)

    def scheduler(self, engine: PostgresEngine, rng: Random) -> None:
        rig = Rig(engine, lambda _: None, lambda _: None)
        for _ in range(self.rounds * 2):
            for due in engine.due():
                alone = due.name == "rafts"  # no run of it is beside another one
                key = {"key": f"{'r' if alone else 'p'}{rng.randrange(4)}"}
                key = key if rng.random() < 0.7 else {}
                id_ = f"@{due.name}.{rng.getrandbits(64):x}{rng.choice(('', '', '', 'm'))}"
                run = Run(due.now_ns, rig.task(id=id_, target=rng.choice(("", "s")), **key))
                moved = {"last_ns": due.now_ns, "next_ns": due.now_ns, "memory": b""}
                anew = rng.random() < 0.1
                way: Way = "begins"
                if alone:
                    way = way_of(
                        RAFTS, alive=due.alive != "", retrying=due.retrying, asked=due.asked != ""
                    )
                runs = [] if anew or way in ("hastens", "left out") else [run]
                settled = engine.settle(due, runs, anew=anew, way=way, **moved)  # type: ignore[arg-type]
                for verdict in settled.verdicts if settled is not None else ():
                    self.accepted += [id_] if verdict.rejection is None else []
            engine.changes()
            engine.schedules()

    def ruler(self, engine: PostgresEngine, rng: Random) -> None:
        for _ in range(self.rounds // 4):
            engine.apply(storm_policy(rng.randrange(20, 40)), engine.policy().version)
            engine.invalidate("p", prefix=True)
            engine.breaker(rng.choice("stu"), rng.choice(("open", "close", "reset")))
            engine.retry(rng.sample(self.accepted, min(5, len(self.accepted))))
            engine.reset_login("acme")
            engine.pause(rng.choice(("kites", "boats")), paused=rng.random() < 0.3)


def storm_policy(failures: int) -> ClusterPolicy:
    return ClusterPolicy(
        breaker=BreakerPolicy(failures=failures, open_ns=SECOND_NS // 100),
        classes={"gold": GatePolicy("gold", max_concurrent=4)},
        targets={"s": TargetPolicy(max_concurrent=3), "t": TargetPolicy(rate=500.0, burst=5)},
        schedules=(
            ScheduleCard("boats", notify=True),
            ScheduleCard("kites", notify=failures % 4 > 0),
            ScheduleCard("rafts", notify=failures % 2 > 0),
        ),
    )


@pytest.mark.timeout(900)  # with --long, on a busy machine
@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_everything_ends_every_task_once_and_without_a_deadlock(
    cluster: Cluster, seed: int, is_long: bool
) -> None:
    rig = cluster.rig()
    rig.join("first", pool("p"), pool("q"))
    rig.apply(storm_policy(30))
    storm = Storm(cluster, seed, 400 if is_long else 40)
    before = cluster.server.log.count("deadlock detected")
    storm.run()
    assert not storm.errors, storm.errors
    assert cluster.server.log.count("deadlock detected") == before
    assert not storm.over, f"more than 3 tasks of a site, or a lock with two: {storm.over}"
    for each in rig.engine.nodes():
        rig.engine.forget(each.name)
    rig.apply(ClusterPolicy())
    for target in "stu":
        rig.engine.breaker(target, "reset")
    tenure = rig.join("last", pool("p"), pool("q"), lease=HOUR)
    rig.pass_time(100)
    while cluster.sql("SELECT FROM musterd.live LIMIT 1"):
        rig.engine.tick()
        grants = rig.engine.claim(tenure, [want(100, "p"), want(100, "q")])
        rig.finish(tenure, *grants)
        rig.pass_time(30)
        stuck = cluster.sql("SELECT id, state FROM musterd.live WHERE NOT %s", bool(grants))
        assert grants or not stuck, stuck
    ended = "SELECT id, count(*) FROM musterd.done WHERE id NOT LIKE %s GROUP BY id"
    ids = cluster.sql(ended, "login-%")
    assert sorted(str(id_) for id_, _ in ids) == sorted(set(storm.accepted))
    assert {number for _, number in ids} == {1}
    assert {rig.ended(id_).state for id_ in storm.accepted} <= {SUCCEEDED, FAILED, CANCELLED}
    assert cluster.sql("SELECT count(*) FROM musterd.key") == [(0,)]
    rig.engine.tick()
    assert {row[0] for row in cluster.sql("SELECT counted FROM musterd.pool")} == {0}
