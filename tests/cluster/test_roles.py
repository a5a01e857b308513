"""Who may do what in PostgreSQL: each role against each function and each table."""

from collections.abc import Iterator

import psycopg
import pytest
from postgres import OWNER, Cluster, Server
from rig import Rig

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import INVALID_TASK, Outcome
from musterd.supervisor.cluster.columns import SIGNATURES
from musterd.supervisor.cluster.engine import EngineError, TaskFilter
from musterd.supervisor.cluster.postgres import PostgresEngine

SUBMIT = {
    *("submit_1", "wake_1", "ended_1", "look_up_1", "fetch_1", "view_1", "cancel_1"),
    *("retry_1", "changes_1", "cards_1", "version_1", "marks_1", "invalidate_1"),
}
NODE = SUBMIT | {
    *("give_back_1", "join_1", "rejoin_1", "beat_1", "leave_1", "reap_1", "claim_1", "begun_1"),
    *("finish_1", "release_1", "progress_1", "tick_1", "retain_1", "state_load_1"),
    *("state_save_1", "states_1", "locks_1", "lock_wake_1", "due_1", "settle_1", "make_way_1"),
    *("policy_1", "counts_1", "ran_1", "announce_1", "schedules_1", "watched_1", "judged_1"),
    *("history_1", "changed_1", "untold_1", "told_1", "put_1", "delete_1", "pause_1"),
    *("statistics_1", "nodes_1", "sites_1", "find_1", "recent_1", "redeclare_1"),
    *("login_said_1", "logins_1", "reset_login_1", "sessions_1", "login_over_1", "logins_due_1"),
    *("granted_logins_1", "session_load_1", "forget_session_1"),
}
ADMIN = SUBMIT | {
    *("apply_1", "policy_1", "breaker_1", "sites_1", "nodes_1", "drain_1", "forget_1"),
    *("reap_1", "find_1", "recent_1", "purge_1", "counts_1", "statistics_1"),
    *("tick_1", "retain_1", "schedules_1", "settle_1", "ran_1", "pause_1"),
    *("history_1", "changed_1", "put_1", "delete_1"),
    *("logins_1", "reset_login_1", "sessions_1", "session_load_1", "forget_session_1"),
}
ROLES = {"submit": SUBMIT, "node": NODE, "admin": ADMIN, "nobody": set[str]()}


@pytest.fixture(scope="module")
def ruled(server: Server) -> Iterator[Cluster]:
    """A cluster with a user of each role, and a second one who submits."""
    cluster = Cluster(server, "ruled")
    for name in ("submit", "node", "admin"):
        cluster.sql(f"CREATE ROLE u_{name} LOGIN IN ROLE musterd_{name}")
    cluster.sql("CREATE ROLE u_other LOGIN IN ROLE musterd_submit; CREATE ROLE u_nobody LOGIN")
    yield cluster
    cluster.close()


@pytest.fixture
def rig(ruled: Cluster) -> Iterator[Rig]:
    """A cluster with a node, whose engine is the superuser's."""
    ruled.reset()
    rig = ruled.rig()
    rig.join()
    yield rig
    ruled.close()


def functions(cluster: Cluster) -> list[tuple[str, str]]:
    """Return all functions of the schema, each with a call of it in which everything is NULL."""
    rows = cluster.sql(
        "SELECT p.proname, p.oid::regproc || '(' || coalesce((SELECT string_agg("
        "'NULL::' || format_type(t, NULL), ', ' ORDER BY o) FROM unnest(p.proargtypes::oid[]) "
        "WITH ORDINALITY u(t, o)), '') || ')' FROM pg_proc p "
        "WHERE p.pronamespace = 'musterd'::regnamespace ORDER BY 1"
    )
    return [(str(name), str(call)) for name, call in rows]


def denied(cluster: Cluster, user: str, statement: str) -> bool:
    """Whether a user may not do this; it is undone in any case."""
    with psycopg.connect(cluster.server.url(cluster.name, user)) as connection:
        try:
            connection.execute(f"SET statement_timeout = '5s'; {statement}")
        except psycopg.errors.InsufficientPrivilege:
            return True
        except psycopg.Error:
            return False  # it was called, and did not like what it got
        finally:
            connection.rollback()
        return False


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_call_its_functions_and_no_other(ruled: Cluster, role: str) -> None:
    found = functions(ruled)
    assert {name for name, _ in found if name.endswith("_1")} == SUBMIT | NODE | ADMIN
    allowed = {
        name for name, call in found if not denied(ruled, f"u_{role}", f"SELECT * FROM {call}")
    }
    assert allowed == ROLES[role]


@pytest.mark.parametrize("role", ROLES)
def test_no_role_touches_a_table(ruled: Cluster, role: str) -> None:
    tables = ruled.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'musterd'")
    assert len(tables) > 15
    for (table,) in tables:
        for statement in (f"SELECT FROM musterd.{table}", f"DELETE FROM musterd.{table}"):
            assert denied(ruled, f"u_{role}", statement), (role, statement)
    assert denied(ruled, f"u_{role}", "SELECT nextval('musterd.seq')")
    assert denied(ruled, f"u_{role}", "CREATE TABLE musterd.mine ()")


def test_every_function_that_the_engine_calls_is_one_of_these(ruled: Cluster) -> None:
    assert set(SIGNATURES) | {"version_1"} == SUBMIT | NODE | ADMIN


def test_functions_cannot_be_led_to_tables_of_the_caller(ruled: Cluster) -> None:
    rows = ruled.sql(
        "SELECT proname, prosecdef, proconfig FROM pg_proc "
        "WHERE pronamespace = 'musterd'::regnamespace AND proname LIKE '%\\_1'"
    )
    for name, definer, settings in rows:
        assert definer, name
        assert isinstance(settings, list)
        assert 'search_path="musterd", pg_temp' in settings or (
            "search_path=musterd, pg_temp" in settings
        ), (name, settings)


# -- a submitter sees its own tasks ---------------------------------------------------------------


def test_a_submitter_sees_its_own_tasks_and_nobody_elses(ruled: Cluster, rig: Rig) -> None:
    mine, other = ruled.engine("u_submit"), ruled.engine("u_other")
    spec = rig.task(args=b"\x81\xa1x\x07", key="k")
    assert mine.submit([spec], waiter=9)[0].state == "accepted"
    assert mine.view(spec.id) is not None
    assert other.view(spec.id) is None
    assert other.cancel([spec.id]) == []
    assert other.retry([spec.id])[0].code == "NoSuchTask"
    tenure = rig.join("b")
    rig.finish(tenure, rig.claim_one(tenure), kind="failed")
    assert mine.ended(9).ids == (spec.id,)
    assert other.ended(9).ids == ()
    assert [each.id for each in mine.look_up([spec.id])] == [spec.id]
    assert other.look_up([spec.id]) == []
    assert other.view(spec.id) is None
    assert other.retry([spec.id])[0].code == "NoSuchTask"
    assert mine.retry([spec.id]) == []
    assert mine.cancel([spec.id]) == [spec.id]


@pytest.mark.parametrize("resend", [False, True])
def test_a_submitter_learns_nothing_by_the_id_of_another(
    ruled: Cluster, rig: Rig, resend: bool
) -> None:
    mine, other = ruled.engine("u_submit"), ruled.engine("u_other")
    spec = rig.task()
    mine.submit([spec])
    [verdict] = other.submit([spec], waiter=5, resend=resend)
    assert verdict.rejection is not None
    assert verdict.rejection.code == INVALID_TASK
    tenure = rig.join("b")
    rig.drained(tenure)
    if resend:
        [verdict] = other.submit([spec], waiter=5, resend=True)
        assert (verdict.state, verdict.outcome) == ("rejected", None)
    assert other.ended(5).ids == ()


def test_a_submitter_makes_no_runs_of_schedules(ruled: Cluster, rig: Rig) -> None:
    """Its result would be told as a change, and hold up the schedule."""
    spec = rig.task(id="@nightly.1")
    [verdict] = ruled.engine("u_submit").submit([spec])
    assert verdict.rejection is not None
    assert verdict.rejection.code == INVALID_TASK
    assert "schedules" in verdict.rejection.message
    assert ruled.engine("u_node").submit([spec])[0].state == "accepted"


def test_keys_of_submitters_are_their_own(ruled: Cluster, rig: Rig) -> None:
    """Nobody gets a result, or makes one for others, by the name of a key."""
    mine, other = ruled.engine("u_submit"), ruled.engine("u_other")
    node = ruled.engine("u_node")

    def state_of(engine: PostgresEngine) -> str:
        return engine.submit([rig.task(key="promo", cache_ns=60 * SECOND_NS)])[0].state

    assert [state_of(engine) for engine in (mine, other, node)] == ["accepted"] * 3
    assert [state_of(engine) for engine in (mine, other, node)] == ["joined"] * 3
    tenure = rig.join("b")
    rig.drained(tenure)
    assert [state_of(engine) for engine in (mine, other, node, rig.engine)] == ["answered"] * 4
    other.invalidate("promo")
    assert state_of(other) == "accepted"
    assert [state_of(engine) for engine in (mine, node)] == ["answered"] * 2
    mine.invalidate("pro", prefix=True)
    assert state_of(mine) == "accepted"
    assert state_of(node) == "answered"
    assert len(rig.engine.find(TaskFilter(key="promo"))) == 15


def test_a_key_of_a_submitter_may_be_as_long_as_any(ruled: Cluster, rig: Rig) -> None:
    mine = ruled.engine("u_submit")
    [accepted, refused] = mine.submit([rig.task(key="k" * 200), rig.task(key="k" * 201)])
    assert accepted.state == "accepted"
    assert refused.rejection is not None
    assert refused.rejection.code == INVALID_TASK
    tenure = rig.join("b")
    assert rig.claim_one(tenure).spec.key == "k" * 200


def test_a_last_good_result_is_that_of_its_submitter(ruled: Cluster, rig: Rig) -> None:
    mine, other = ruled.engine("u_submit"), ruled.engine("u_other")
    tenure = rig.join("b")

    def run(engine: PostgresEngine, **how: object) -> Outcome:
        spec = rig.task(fallback_on="failure")
        engine.submit([spec])
        rig.finish(tenure, rig.claim_one(tenure), **how)
        return engine.look_up([spec.id])[0]

    assert run(mine, keeps=True).state == "succeeded"
    assert run(other, kind="failed").state == "failed"
    assert run(rig.engine, kind="failed").state == "failed"
    assert run(mine, kind="failed").stale


def test_a_submitter_reads_what_nodes_declare(ruled: Cluster, rig: Rig) -> None:
    found = ruled.engine("u_submit").cards()
    assert found is not None
    assert [pool.name for card in found.cards for pool in card.pools] == ["p"]


def test_nodes_administrators_and_the_owner_see_all(ruled: Cluster, rig: Rig) -> None:
    spec = rig.task()
    ruled.engine("u_submit").submit([spec])
    for user in ("u_node", "u_admin", OWNER):
        assert ruled.engine(user).view(spec.id) is not None, user
        assert len(ruled.engine(user).find(TaskFilter())) == 1


def test_a_submitter_reads_no_policy_no_state_and_no_list_and_puts_no_schedule(
    ruled: Cluster, rig: Rig
) -> None:
    engine = ruled.engine("u_submit")
    for call in (
        engine.policy,
        engine.nodes,
        engine.counts,
        lambda: engine.state_load("x"),
        lambda: engine.find(TaskFilter()),
        lambda: engine.history("kites"),
        engine.changed,
        engine.watched,
        engine.schedules,
        lambda: engine.put([]),
        lambda: engine.delete(["kites"]),
        lambda: engine.pause("kites", paused=True),
    ):
        with pytest.raises(EngineError, match="permission denied"):
            call()


# -- nothing gets past the checks of a submit -----------------------------------------------------


def raw(cluster: Cluster, **columns: str) -> str:
    """Submit one task as a program of one's own would; return the code of its refusal."""
    given = {"ids": "ARRAY['x']", "names": "ARRAY['p.extract']", "args": r"ARRAY['\x80'::bytea]"}
    given |= columns
    arguments = ", ".join(f"p_{name} => {value}" for name, value in given.items())
    names = (
        *("priorities", "targets", "keys", "timeouts", "retries", "delays", "expires", "caches"),
        *("debounces", "fallbacks", "fallback_ons", "policies", "on_opens", "watches"),
        "sessions",
    )
    rest = "".join(f", p_{name} => NULL" for name in names if name not in columns)
    query = (
        f"SELECT code FROM musterd.submit_1({arguments}{rest}, p_waiter => 0, p_resend => false)"
    )
    with psycopg.connect(cluster.server.url(cluster.name, "u_submit")) as connection:
        rows = connection.execute(query).fetchall()  # type: ignore[arg-type]
        return str(rows[0][0])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("ids", "ARRAY[NULL]::text[]"),
        ("names", "ARRAY[NULL]::text[]"),
        ("args", "ARRAY[NULL]::bytea[]"),
        ("ids", "ARRAY[repeat('x', 65)]"),
        ("args", "ARRAY[convert_to(repeat('x', 4194305), 'UTF8')]"),
        ("priorities", "ARRAY[9]::smallint[]"),
        ("retries", "ARRAY[-2]"),
        ("delays", "ARRAY[-1]::bigint[]"),
        ("timeouts", "ARRAY[9223372036854775807]::bigint[]"),
        ("fallback_ons", "ARRAY['never']"),
        ("on_opens", "ARRAY['never']"),
        ("policies", "ARRAY['gold']"),
        ("watches", "ARRAY[convert_to(repeat('x', 8193), 'UTF8')]"),
        ("sessions", "ARRAY['acme']"),  # not even to use it
        ("sessions", "ARRAY['']"),
    ],
)
def test_a_program_that_calls_the_function_itself_gets_past_no_check(
    ruled: Cluster, rig: Rig, column: str, value: str
) -> None:
    assert raw(ruled, **{column: value}) == INVALID_TASK
    assert rig.engine.find(TaskFilter()) == []


def test_who_submits_neither_reads_nor_uses_a_session(ruled: Cluster, rig: Rig) -> None:
    rig.engine.state_save("session:acme", b"sealed")
    engine: PostgresEngine = ruled.engine("u_submit")
    with pytest.raises(EngineError, match="permission denied"):
        engine.state_load("session:acme")
    with pytest.raises(EngineError, match="permission denied"):
        engine.state_save("session:acme", None)
    [verdict] = engine.submit([rig.task(session="acme")])
    assert verdict.rejection is not None
    assert "session 'acme' is for programs on a node" in verdict.rejection.message
    rig.submit(rig.task(session="acme"))  # of a node
    assert rig.engine.state_load("session:acme") == b"sealed"


def test_people_see_and_forget_sessions_and_no_other_state(ruled: Cluster, rig: Rig) -> None:
    rig.engine.state_save("session:acme", b"sealed")
    rig.engine.state_save("page", b"3")
    engine: PostgresEngine = ruled.engine("u_admin")
    assert engine.session("acme") == b"sealed"
    assert engine.session("no\0such") is None
    for key in ("session:acme", "page"):
        with pytest.raises(EngineError, match="permission denied"):
            engine.state_load(key)
    with pytest.raises(EngineError, match="permission denied"):
        engine.state_save("page", b"4")
    assert engine.forget_session("acme")
    assert not engine.forget_session("acme")
    assert rig.engine.state_load("page") == b"3"


def test_a_submit_has_so_many_tasks(ruled: Cluster, rig: Rig) -> None:
    many = "ARRAY(SELECT 'x' || g FROM generate_series(1, 1001) g)"
    with pytest.raises(psycopg.Error, match="1000"):
        raw(ruled, ids=many)


def test_an_engine_says_what_its_user_may_not(ruled: Cluster, rig: Rig) -> None:
    engine: PostgresEngine = ruled.engine("u_submit")
    with pytest.raises(EngineError, match="musterd_node"):
        engine.check("claim_1")
    assert ruled.engine("u_node").check("claim_1") != []
    assert engine.check("submit_1") != []
