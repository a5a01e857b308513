"""The contract of engines: logins that fail, counted over all nodes."""

from rig import Rig, end

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.node_messages import LoginVerdict
from musterd.supervisor.cluster.engine import Grant
from musterd.supervisor.cluster.logging_in import LoginView, SessionView

PAUSE_NS = 60 * SECOND_NS
MOST_NS = 200 * SECOND_NS


def said(said: str, session: str = "acme", problem: str = "wrong password") -> LoginVerdict:
    return LoginVerdict(session, said, 2, PAUSE_NS, MOST_NS, problem)  # type: ignore[arg-type]


def use(rig: Rig, tenure: int, session: str = "acme") -> Grant:
    """Run a task of a session; return its grant."""
    rig.submit(rig.task(session=session))
    (grant,) = rig.claim(tenure, 10)
    return grant


def fail(rig: Rig, tenure: int, session: str = "acme") -> None:
    grant = use(rig, tenure, session)
    assert grant.held is None
    rig.finish(tenure, grant, kind="failed", login=said("failed", session))


def held(rig: Rig, tenure: int, session: str = "acme") -> LoginView | None:
    """Let a task of a session be granted, and end for nothing."""
    grant = use(rig, tenure, session)
    rig.finish(tenure, grant, kind="failed")
    return grant.held


def left_seconds(rig: Rig) -> float:
    [view] = rig.engine.logins()
    return round(view.left_ns / SECOND_NS)


def test_failed_logins_are_counted_over_all_nodes_and_hold_the_session_everywhere(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    fail(rig, a)
    assert held(rig, b) is None
    [view] = rig.engine.logins()
    assert view == LoginView("acme", 1, 0, "wrong password", "a")
    fail(rig, b)
    for tenure in (a, b):
        hold = held(rig, tenure)
        assert hold is not None
        assert (hold.session, hold.failures, hold.node) == ("acme", 2, "b")
        assert 0 < hold.left_ns <= PAUSE_NS
        assert [each.session for each in rig.engine.beat(tenure).logins] == ["acme"]
    assert held(rig, a, "shop") is None


def test_after_the_pause_one_may_try_and_each_failure_makes_it_twice_as_long(rig: Rig) -> None:
    a = rig.join(lease=3600)
    fail(rig, a)
    fail(rig, a)
    for seconds in (60, 120, 200, 200):
        assert left_seconds(rig) == seconds
        rig.pass_time(seconds + 1)
        assert rig.engine.logins()[0].left_ns == 0
        assert held(rig, a) is None  # it found somebody logged in, and says nothing
        fail(rig, a)
    assert rig.engine.logins()[0].failures == 6


def test_a_login_that_works_begins_anew(rig: Rig) -> None:
    a = rig.join(lease=3600)
    for _ in range(2):
        fail(rig, a)
        rig.finish(a, use(rig, a), login=said("worked"))
        assert rig.engine.logins() == []
    fail(rig, a)
    fail(rig, a)
    rig.pass_time(61)
    rig.finish(a, use(rig, a), login=said("worked"))
    assert rig.engine.logins() == []
    fail(rig, a)
    assert held(rig, a) is None


def test_what_is_said_counts_with_the_end_and_no_more_often(rig: Rig) -> None:
    a, b = rig.join("a", lease=30), rig.join("b", lease=3600)
    grant = use(rig, a)
    rig.pass_time(31)
    rig.engine.reap()
    (again,) = rig.claim(b, 10)
    rig.finish(b, again, kind="failed", login=said("failed"))
    rig.finish(b, again, kind="failed", login=said("failed"))  # told twice
    c = rig.join("c")
    rig.finish(c, grant, kind="failed", login=said("failed"))  # it was another node's
    assert [each.failures for each in rig.engine.logins()] == [1]


def test_one_batch_may_tell_of_several_sessions(rig: Rig) -> None:
    a = rig.join()
    rig.submit(rig.task(session="acme"), rig.task(session="shop"), rig.task())
    grants = rig.claim(a, 10)
    ends = []
    for grant in grants:
        session = grant.spec.session
        how = {"login": said("failed", session)} if session else {}
        ends.append(end(grant, "failed", **how))
    rig.engine.finish(a, ends)
    assert [(each.session, each.failures) for each in rig.engine.logins()] == [
        ("acme", 1),
        ("shop", 1),
    ]
    assert [each.session for each in rig.engine.logins(["shop", "none"])] == ["shop"]


def test_a_person_lets_a_session_log_in_again(rig: Rig) -> None:
    a = rig.join()
    assert not rig.engine.reset_login("acme")
    fail(rig, a)
    fail(rig, a)
    assert held(rig, a) is not None
    assert rig.engine.reset_login("acme")
    assert rig.engine.logins() == []
    assert held(rig, a) is None
    assert not rig.engine.reset_login("no\0such")


def test_people_see_sessions_that_are_kept_or_used(rig: Rig) -> None:
    a = rig.join()
    assert rig.engine.sessions() == []
    rig.engine.state_save("session:kept", b"sealed")
    rig.engine.state_save("sessionless", b"else")
    rig.submit(*rig.tasks(3, session="acme"))
    (grant,) = rig.claim(a, 10)
    assert rig.engine.sessions() == [SessionView("acme", 0, 1, 2), SessionView("kept", 6, 0, 0)]
    rig.finish(a, grant)
    rig.drained(a)
    assert [each.session for each in rig.engine.sessions()] == ["kept"]
    assert rig.engine.session("kept") == b"sealed"
    assert rig.engine.session("acme") is None
    assert rig.engine.forget_session("kept")
    assert not rig.engine.forget_session("kept")
    assert rig.engine.sessions() == []
    assert rig.engine.state_load("sessionless") == b"else"
    rig.engine.state_save("session:kept", b"sealed", ttl_ns=SECOND_NS)
    rig.pass_time(2)
    assert rig.engine.session("kept") is None
    assert not rig.engine.forget_session("kept")


def test_a_problem_may_be_any_text(rig: Rig) -> None:
    a = rig.join()
    odd = said("failed", problem="wrong \0 \u2028 passw\u00f6rd")
    rig.finish(a, use(rig, a), kind="failed", login=odd)
    [view] = rig.engine.logins()
    assert "passw\u00f6rd" in view.problem
