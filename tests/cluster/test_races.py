"""Races in PostgreSQL, each led to its worst moment by a lock that the test holds."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random

import msgspec
import psycopg
import pytest
from postgres import Cluster, Server
from rig import Rig, end, pool

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import QUEUE_FULL, SUCCEEDED, TaskSpec
from musterd.supervisor.cluster.engine import ClusterPolicy, EngineUnreached, Verdict
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.cluster.watching import Judged
from musterd.supervisor.core.model.policy import TargetPolicy
from support.waiting import Waiting

# How people of most countries sort: a before B. The order of locks is that of bytes: B before a.
HUMAN = "TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C' LOCALE_PROVIDER icu ICU_LOCALE 'en'"


@pytest.fixture(scope="module")
def _human(server: Server) -> Cluster:
    return Cluster(server, "human", options=HUMAN)


@pytest.fixture
def human(_human: Cluster) -> Iterator[Cluster]:
    """A cluster in a database that sorts text as people do."""
    _human.reset()
    yield _human
    _human.close()


@contextmanager
def behind(
    cluster: Cluster, waiting: Waiting, lock: str, *acts: Callable[[], object]
) -> Iterator[psycopg.Connection]:
    """Let `acts` run into a lock, and wait there while the body runs; then they go on.

    The body gets the connection that has the lock. What it does there is committed.
    """
    with psycopg.connect(cluster.url) as blocker:
        blocker.execute(lock)
        failures: list[BaseException] = []

        def run(act: Callable[[], object]) -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - told by the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=run, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        blocked = (
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND %s = ANY (pg_blocking_pids(pid))"
        )
        pid = blocker.info.backend_pid
        many = len(acts)
        waiting("they wait for the lock", lambda: cluster.sql(blocked, pid)[0][0] == many)
        try:
            yield blocker
        finally:
            blocker.commit()
            for thread in threads:
                thread.join()
    if failures:
        raise failures[0]


def is_free(cluster: Cluster, statement: str) -> bool:
    """Whether a statement need not wait for anybody. It is undone."""
    with psycopg.connect(cluster.url) as connection:
        try:
            connection.execute(f"SET LOCAL lock_timeout = '200ms'; {statement}")
        except psycopg.errors.LockNotAvailable:
            return False
        finally:
            connection.rollback()
        return True


# -- keys -----------------------------------------------------------------------------------------


def keyed(cluster: Cluster) -> tuple[Rig, int, PostgresEngine]:
    """Return a cluster of which the keys `old` and `elder` are answered from memory."""
    rig = cluster.rig()
    a = rig.join("a", pool(queue_size=100, cache_ns=3600 * SECOND_NS))
    rig.submit(rig.task(key="old"), rig.task(key="elder"))
    rig.drained(a)
    return rig, a, cluster.engine()


@pytest.mark.parametrize("room", [True, False])
def test_a_key_is_led_by_a_task_that_was_taken_whatever_becomes_of_the_queue_meanwhile(
    cluster: Cluster, waiting: Waiting, room: bool
) -> None:
    """How full a queue is, is counted beside the submits."""
    rig, a, engine = keyed(cluster)
    full, empty = ("UPDATE musterd.pool SET counted = " + each for each in ("queue_size", "0"))
    cluster.sql(empty if room else full)
    # The first task has been looked at when the second one waits: its answer is to be noted.
    tasks = [rig.task(key="new"), rig.task(key="old", cache_ns=-1)]
    verdicts = []
    lock = "LOCK TABLE musterd.done IN EXCLUSIVE MODE"
    with behind(cluster, waiting, lock, lambda: verdicts.extend(engine.submit(tasks))) as blocker:
        blocker.execute(full if room else empty)
    assert verdicts[1].state == "answered"
    rejection = verdicts[0].rejection
    if rejection is None:
        assert cluster.sql("SELECT key, leader FROM musterd.key") == [("new", tasks[0].id)]
    else:
        assert rejection.code == QUEUE_FULL
        assert cluster.sql("SELECT key FROM musterd.key") == []
    cluster.sql(empty)
    [other] = rig.submit(rig.task(key="new"))
    granted = rig.claim(a, 5)
    assert len(granted) == 1, "of tasks with one key one runs"
    rig.finish(a, *granted)
    rig.ended(other)


# -- one id, twice at once ------------------------------------------------------------------------


def sent(engine: PostgresEngine, task: TaskSpec) -> Verdict:
    """Submit a task as a gateway does: what was undone is sent again."""
    for resend in (False, *[True] * 9):
        with suppress(EngineUnreached):
            return engine.submit([task], resend=resend)[0]
    raise AssertionError("a submit is undone again and again")


BODIES = [
    ({"key": "new"}, {"key": "other"}),
    ({"key": "new"}, {}),
    ({"key": "new"}, {"key": "old", "cache_ns": -1}),
    ({}, {"key": "old", "cache_ns": -1}),
    ({"key": "old", "cache_ns": -1}, {"key": "elder", "cache_ns": -1}),
    ({"key": "new"}, {"key": "other", "args": b"\x90"}),
    ({}, {"args": b"\x90"}),
    ({"key": "old", "cache_ns": -1}, {"args": b"\x90"}),
]


@pytest.mark.parametrize("bodies", BODIES)
def test_an_id_that_two_submit_at_once_is_one_task(
    cluster: Cluster, waiting: Waiting, bodies: tuple[dict[str, object], ...]
) -> None:
    rig, a, engine = keyed(cluster)
    tasks = [rig.task(id="twice", **body) for body in bodies]
    engines = [engine, cluster.engine()]
    verdicts: list[Verdict] = []

    def submit(place: int) -> None:
        verdicts.append(sent(engines[place], tasks[place]))

    # Both have decided what becomes of their tasks when they wait: nobody knows the id.
    lock = "LOCK TABLE musterd.lane IN EXCLUSIVE MODE"
    with behind(cluster, waiting, lock, lambda: submit(0), lambda: submit(1)):
        pass
    first, second = sorted(verdicts, key=lambda each: each.state in ("known", "rejected"))
    assert first.state in ("accepted", "answered")
    assert second.state == ("known" if tasks[0].args == tasks[1].args else "rejected")
    if second.state == "known" and first.state == "answered":
        assert second.outcome is not None, "who is answered is told nothing later"
    rig.drained(a)
    rows = "SELECT count(*) FROM musterd.done WHERE id = 'twice'"
    assert cluster.sql(rows) == [(1,)], "one final state"
    assert cluster.sql("SELECT key FROM musterd.key") == []
    later = [rig.task(key=key) for key in ("new", "other", "old")]
    rig.submit(*later)
    assert set(rig.drained(a)) == {each.id for each in later}


def test_an_id_that_many_submit_at_once_is_one_task(cluster: Cluster) -> None:
    rig, a, _ = keyed(cluster)
    before = cluster.server.log.count("deadlock detected")
    told: list[tuple[TaskSpec, Verdict]] = []
    failures: list[BaseException] = []

    def submit(seed: int) -> None:
        rng, engine = Random(seed), cluster.engine()
        try:
            for start in range(0, 200, 10):
                tasks = [
                    rig.task(
                        id=f"id{rng.randrange(start, start + 5)}",
                        key=rng.choice(("", "old", "k1", "k2", "k3")),
                        cache_ns=rng.choice((0, -1)),
                        args=rng.choice((b"\x80", b"\x80", b"\x90")),
                    )
                    for _ in range(5)
                ]
                told.extend((task, sent(engine, task)) for task in tasks)
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        rig.drained(a)
    assert not failures, failures
    rig.pass_time(10)
    rig.engine.tick()
    rig.drained(a)
    assert cluster.server.log.count("deadlock detected") == before
    assert cluster.sql("SELECT id FROM musterd.live") == []
    assert cluster.sql("SELECT key FROM musterd.key") == []
    again = "SELECT id FROM musterd.done GROUP BY id HAVING count(*) > 1"
    assert cluster.sql(again) == [], "one final state"
    bodies = {str(id_): args for id_, args in cluster.sql("SELECT id, args FROM musterd.done")}
    for task, verdict in told:
        assert (bodies[task.id] == task.args) == (verdict.state != "rejected"), verdict


# -- the order of locks ---------------------------------------------------------------------------


def test_ends_lock_tasks_in_the_order_of_bytes(human: Cluster, waiting: Waiting) -> None:
    rig = human.rig()
    a = rig.join()
    rig.submit(rig.task(id="a"), rig.task(id="B"))
    ends = [end(grant) for grant in rig.claim(a, 2)]
    lock = "SELECT FROM musterd.live WHERE id = 'B' FOR UPDATE"
    with behind(human, waiting, lock, lambda: rig.engine.finish(a, ends)):
        assert is_free(human, "SELECT FROM musterd.live WHERE id = 'a' FOR UPDATE")


def test_submits_lock_keys_in_the_order_of_bytes(human: Cluster, waiting: Waiting) -> None:
    rig = human.rig()
    rig.join()
    rig.submit(rig.task(key="a"), rig.task(key="B"))
    tasks = [rig.task(key="a"), rig.task(key="B")]
    lock = "SELECT FROM musterd.key WHERE key = 'B' FOR UPDATE"
    with behind(human, waiting, lock, lambda: rig.submit(*tasks)):
        assert is_free(human, "SELECT FROM musterd.key WHERE key = 'a' FOR UPDATE")


def test_submits_make_lanes_in_the_order_of_bytes(human: Cluster, waiting: Waiting) -> None:
    rig = human.rig()
    rig.join()
    rig.submit(rig.task())
    new = (
        "INSERT INTO musterd.lane (pool, level, target, class, on_open) "
        "SELECT pool, level, '{}', '', '' FROM musterd.lane"
    )
    tasks = [rig.task(target="a"), rig.task(target="B")]
    with behind(human, waiting, new.format("B"), lambda: rig.submit(*tasks)):
        assert is_free(human, new.format("a"))


def test_judgements_lock_what_is_known_in_the_order_of_bytes(
    human: Cluster, waiting: Waiting
) -> None:
    rig = human.rig()
    human.sql(
        "INSERT INTO musterd.schedule (name, plan, notify) VALUES ('a', '', true), ('B', '', true)"
    )
    found = [Judged(name, 0, b"", ()) for name in ("a", "B")]
    new = "INSERT INTO musterd.watched VALUES ('{}', 0, '')"
    with behind(human, waiting, new.format("B"), lambda: rig.engine.judged(found)):
        assert is_free(human, new.format("a"))


def test_ends_of_runs_wait_for_no_judgement(human: Cluster) -> None:
    rig = human.rig()
    a = rig.join()
    human.sql("INSERT INTO musterd.schedule (name, plan, notify) VALUES ('a', '', true)")
    rig.submit(rig.task(id="@a.1"))
    grant = rig.claim_one(a)
    with psycopg.connect(human.url) as judge:
        judge.execute("INSERT INTO musterd.watched VALUES ('a', 0, '')")
        judge.execute("SELECT FROM musterd.schedule WHERE name = 'a' FOR KEY SHARE")
        assert rig.finish(a, grant) != []


# -- nodes ----------------------------------------------------------------------------------------


def test_a_node_joins_beside_somebody_who_reads_ended_tasks_for_long(cluster: Cluster) -> None:
    """A backup, for one. New partitions wait for it; nodes and clients do not."""
    rig = cluster.rig()
    rig.pass_time(3600 * 48)  # no partition is there yet
    with psycopg.connect(cluster.url) as reader:
        reader.execute("SELECT count(*) FROM musterd.done")
        a = rig.join()
        [id_] = rig.submit(rig.task())
        rig.drained(a)
        assert rig.ended(id_).id == id_


# -- lanes ----------------------------------------------------------------------------------------

MANY = (
    "INSERT INTO musterd.lane (pool, level, target, class, on_open, state) "
    "SELECT p.pool, 2, 's' || g, '', '', 'e' FROM musterd.pool p, generate_series(1, 3000) g"
)
LANES = "SELECT target FROM musterd.lane ORDER BY target"


def test_lanes_and_sites_without_tasks_are_forgotten_if_there_are_many(cluster: Cluster) -> None:
    """Whoever submits may name any number of sites."""
    rig = cluster.rig()
    rig.apply(ClusterPolicy(target=TargetPolicy(max_concurrent=5)))
    a = rig.join()
    rig.submit(rig.task(target="running"), rig.task(target="retried"), rig.task(target="gone"))
    grants = sorted(rig.claim(a, 3), key=lambda grant: grant.spec.target)
    gone, retried, running = grants
    rig.finish(a, retried, kind="failed", retry_ns=3600 * SECOND_NS)
    rig.finish(a, gone)
    rig.submit(rig.task(target="queued"), rig.task(target="delayed", delay_ns=3600 * SECOND_NS))
    rig.submit(rig.task(target="led", key="k"), rig.task(target="joined", key="k"))
    rig.engine.retain(3600 * SECOND_NS)
    assert ("gone",) in cluster.sql(LANES), "a few are no burden"
    cluster.sql(MANY)
    rig.engine.retain(3600 * SECOND_NS)
    kept = [("delayed",), ("joined",), ("led",), ("queued",), ("retried",), ("running",)]
    assert cluster.sql(LANES) == kept
    assert cluster.sql("SELECT target FROM musterd.site ORDER BY target") == kept
    rig.finish(a, running)
    rig.submit(rig.task(target="gone"))
    assert {grant.spec.target for grant in rig.claim(a, 10)} == {"gone", "queued", "led"}


def test_a_lane_into_which_a_task_is_being_put_is_not_forgotten(
    cluster: Cluster, waiting: Waiting
) -> None:
    rig = cluster.rig()
    engine = cluster.engine()
    a = rig.join()
    rig.submit(rig.task())
    rig.drained(a)
    cluster.sql(MANY)
    tasks = [rig.task(id="t1", target="s1")]
    # The submit has found its lane when it waits for another one of this id.
    lock = (
        "INSERT INTO musterd.live (id, seq, lane, state, submitted_at, queued_at, owner, name, "
        "priority, args) VALUES ('t1', 0, 0, 2, now(), now(), 10, 'p.extract', 2, '')"
    )
    with behind(cluster, waiting, lock, lambda: rig.submit(*tasks)) as blocker:
        engine.retain(3600 * SECOND_NS)
        assert cluster.sql("SELECT count(*) FROM musterd.lane")[0][0] == 3001
        blocker.rollback()
    engine.retain(3600 * SECOND_NS)
    assert cluster.sql(LANES) == [("s1",)]
    assert [grant.id for grant in rig.claim(a, 5)] == ["t1"]


# -- pools ----------------------------------------------------------------------------------------


def test_what_counts_tasks_locks_pools_as_a_node_that_declares_them(
    cluster: Cluster, waiting: Waiting
) -> None:
    rig = cluster.rig()
    for name in "srqp":  # their numbers have another order than their names
        rig.join(name, pool(name))
        rig.submit(rig.task(pool=name))
    lock = "SELECT FROM musterd.pool WHERE name = 'p' FOR UPDATE"
    with behind(cluster, waiting, lock, rig.engine.tick):
        assert is_free(cluster, "SELECT FROM musterd.pool WHERE name <> 'p' FOR UPDATE")


def test_a_queue_has_its_limit_where_no_node_is_alive(cluster: Cluster) -> None:
    rig = cluster.rig()
    tenure = rig.join("a", pool(queue_size=100))
    rig.engine.tick()
    rig.engine.leave(tenure)
    states = []
    for _ in range(10):
        rig.pass_time(6)
        states += [each.state for each in rig.engine.submit(rig.tasks(20))]
    assert 100 <= states.count("accepted") <= 120
    assert set(states[-20:]) == {"rejected"}


# -- last good results ----------------------------------------------------------------------------


def kept(cluster: Cluster) -> tuple[Rig, int, list[str]]:
    """Return a cluster that has two last good results, and their keys in the order of bytes."""
    rig = cluster.rig()
    a = rig.join()
    rig.submit(*[rig.task(args=each, fallback_on="failure") for each in (b"\x01", b"\x02")])
    rig.finish(a, *rig.claim(a, 2), keeps=True)
    rows = cluster.sql('SELECT key FROM musterd.good ORDER BY key COLLATE "C"')
    return rig, a, [str(key) for (key,) in rows]


GOOD = "SELECT FROM musterd.good WHERE key = '{}' FOR UPDATE"


@pytest.mark.parametrize("order", [(b"\x01", b"\x02"), (b"\x02", b"\x01")])
def test_ends_write_last_good_results_in_the_order_of_bytes(
    cluster: Cluster, waiting: Waiting, order: tuple[bytes, bytes]
) -> None:
    """Two nodes may end tasks with the same arguments at the same time."""
    rig, a, keys = kept(cluster)
    rig.submit(*[rig.task(args=each, fallback_on="failure") for each in order])
    ends = [end(grant, keeps=True) for grant in rig.claim(a, 2)]
    with behind(cluster, waiting, GOOD.format(keys[0]), lambda: rig.engine.finish(a, ends)):
        assert is_free(cluster, GOOD.format(keys[1]))


def test_what_is_being_written_anew_is_not_waited_for_by_who_forgets_it(cluster: Cluster) -> None:
    rig, _, keys = kept(cluster)
    rig.pass_time(8 * 24 * 3600)
    with psycopg.connect(cluster.url) as writer:
        writer.execute(GOOD.format(keys[0]))
        rig.engine.tick()
        assert cluster.sql("SELECT key FROM musterd.good") == [(keys[0],)]


# -- sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
def test_a_claim_under_way_in_another_pool_keeps_the_session(
    cluster: Cluster, commits: bool
) -> None:
    rig = cluster.rig()
    a = rig.join("a", pool("p"), pool("q"))
    rig.submit(rig.task(session="acme"), rig.task(pool="q", session="acme"), rig.task(pool="q"))
    with psycopg.connect(cluster.url) as other:
        query = "SELECT id FROM musterd.claim_1(%s, '{p}', '{9}', '{p.extract,p.fetch}')"
        claimed = other.execute(query, (a,)).fetchall()
        assert len(claimed) == 1
        assert [grant.spec.session for grant in rig.claim(a, 9, "q")] == [""]
        if not commits:
            other.rollback()
    assert [grant.spec.session for grant in rig.claim(a, 9, "q")] == ([] if commits else ["acme"])


# -- policies -------------------------------------------------------------------------------------


def test_an_end_counts_though_a_policy_is_applied_at_this_moment(
    cluster: Cluster, waiting: Waiting
) -> None:
    rig = cluster.rig()
    a = rig.join()
    [id_] = rig.submit(rig.task(target="s"))
    grant = rig.claim_one(a)
    doc = msgspec.json.encode(ClusterPolicy(target=TargetPolicy(max_concurrent=5)))
    former = rig.engine.policy().version

    def finish() -> None:
        with suppress(EngineUnreached):
            assert rig.finish(a, grant) != []
            return
        assert rig.finish(a, grant) != []

    # It has begun to end when the policy, which has locked all claims, gives its site limits.
    lock = "SELECT FROM musterd.live FOR UPDATE"
    with behind(cluster, waiting, lock, finish) as blocker:
        blocker.execute("SELECT musterd.apply_1(%s, %s)", (doc, former))
    assert rig.ended(id_).state == SUCCEEDED
