"""One session at a time for a number: the calls of a process that died are over before others."""

from collections.abc import Callable
from threading import Thread

import psycopg
import pytest
from postgres import Cluster
from rig import Rig

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.cluster.checks import KIND_BITS, LIFE_BITS
from musterd.supervisor.cluster.engine import EngineAway, Held, NodeCard
from musterd.supervisor.cluster.postgres import PostgresEngine
from support.waiting import wait_for

NUMBER = (1 << 61) + (12345 << LIFE_BITS + KIND_BITS)  # of a node


LATE: dict[str, Callable[[PostgresEngine, Rig, int], object]] = {
    "submit": lambda engine, rig, _: engine.submit(rig.tasks(1)),
    "cancel": lambda engine, _, __: engine.cancel(["running"]),
    "claim": lambda engine, rig, tenure: rig.__class__(engine, print, print).claim(tenure, 5),
    "release": lambda engine, _, tenure: engine.release(tenure, []),
    "rejoin": lambda engine, _, tenure: engine.rejoin(tenure, []),
    "leave": lambda engine, _, tenure: engine.leave(tenure),
    "join": lambda engine, _, __: engine.join(NodeCard("id-a", "a", 30 * SECOND_NS)),
}


@pytest.mark.parametrize("method", LATE)
def test_a_late_call_of_a_process_that_died_has_no_effect(cluster: Cluster, method: str) -> None:
    """Its sessions are ended by the first session of the next process, whatever that does first."""
    rig: Rig = cluster.rig()
    a = rig.join()
    rig.submit(rig.task(id="running"))
    grant = rig.claim_one(a)
    rig.submit(rig.task(id="queued"))
    first = PostgresEngine(cluster.url, alone=NUMBER + (1 << KIND_BITS) + 3)
    assert first.look_up(["x"]) == []
    lost: list[Exception] = []

    def call() -> None:
        try:
            LATE[method](first, rig, a)
        except EngineAway as error:
            lost.append(error)

    tables = ", ".join(f"{cluster.schema}.{name}" for name in ("live", "node", "lane"))
    with psycopg.connect(cluster.url) as blocking:
        blocking.execute(f"LOCK TABLE {tables} IN EXCLUSIVE MODE")
        thread = Thread(target=call)
        thread.start()
        waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_for("the call waits", lambda: cluster.sql(waits))
        second = PostgresEngine(cluster.url, alone=NUMBER + (2 << KIND_BITS) + 4)
        assert second.look_up(["x"]) == []  # it has waited for the end of the other session
        thread.join(timeout=60)
        assert lost, "the first session was not ended"
    assert [(each.state, each.tasks) for each in rig.engine.counts()] == [
        ("queued", 1),
        ("running", 1),
    ]
    assert second.beat(a).cancel == ()
    assert second.rejoin(a, [Held(grant.id, grant.claim)]) == []
    first.close()
    second.close()


def test_the_sessions_of_one_process_live_side_by_side(cluster: Cluster) -> None:
    engines = [PostgresEngine(cluster.url, alone=NUMBER + kind) for kind in range(3)]
    for _ in range(2):
        for engine in engines:
            assert engine.look_up(["x"]) == []
    pids = [each._connection.info.backend_pid for each in engines if each._connection is not None]
    assert len(set(pids)) == 3
    for engine in engines:
        assert engine.look_up(["x"]) == []
    again = [each._connection.info.backend_pid for each in engines if each._connection is not None]
    assert again == pids
    for engine in engines:
        engine.close()


def test_other_numbers_are_not_disturbed(cluster: Cluster) -> None:
    first = PostgresEngine(cluster.url, alone=NUMBER)
    second = PostgresEngine(cluster.url, alone=NUMBER + (1 << LIFE_BITS + KIND_BITS))
    for _ in range(2):
        assert first.look_up(["x"]) == second.look_up(["x"]) == []
    assert first._connection is not None
    pid = first._connection.info.backend_pid
    assert first.look_up(["x"]) == []
    assert first._connection.info.backend_pid == pid
    first.close()
    second.close()


@pytest.mark.parametrize("number", [1, (1 << 62) - 1])
def test_any_number_will_do(cluster: Cluster, number: int) -> None:
    engines = [PostgresEngine(cluster.url, alone=number) for _ in range(2)]
    for engine in engines:
        assert engine.look_up(["x"]) == []
    for engine in engines:
        engine.close()
