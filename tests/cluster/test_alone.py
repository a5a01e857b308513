"""One session at a time for a number: the calls of a process that died are over before others."""

from threading import Thread

import psycopg
import pytest
from postgres import Cluster
from rig import Rig

from musterd.supervisor.cluster.engine import EngineAway
from musterd.supervisor.cluster.postgres import PostgresEngine
from support.waiting import wait_for

NUMBER = (1 << 61) + 12345


def test_a_second_session_ends_the_first_with_what_it_is_doing(cluster: Cluster) -> None:
    rig: Rig = cluster.rig()
    rig.join()
    first = PostgresEngine(cluster.url, alone=NUMBER)
    assert first.look_up(["x"]) == []
    lost: list[Exception] = []

    def submit() -> None:
        try:
            first.submit(rig.tasks(1))
        except EngineAway as error:
            lost.append(error)

    with psycopg.connect(cluster.url) as blocking:
        blocking.execute(f"LOCK TABLE {cluster.schema}.live IN EXCLUSIVE MODE")
        thread = Thread(target=submit)
        thread.start()
        waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_for("the submit waits", lambda: cluster.sql(waits))
        second = PostgresEngine(cluster.url, alone=NUMBER)
        assert second.look_up(["x"]) == []  # it has waited for the end of the other session
        thread.join(timeout=60)
        assert lost, "the first session was not ended"
    assert rig.engine.counts() == []
    first.close()
    second.close()


def test_other_numbers_are_not_disturbed(cluster: Cluster) -> None:
    first = PostgresEngine(cluster.url, alone=NUMBER)
    second = PostgresEngine(cluster.url, alone=NUMBER + 1)
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
