"""The contract of engines: login tasks. One login over all nodes while the session's tasks wait."""

import pytest
from rig import Rig, end, pool

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import HIGH
from musterd.ipc.wire.node_messages import LoginVerdict
from musterd.supervisor.cluster.engine import Grant, Held
from musterd.supervisor.cluster.logging_in import SessionView
from musterd.supervisor.core.model.held import LOGIN_WAIT_NS

ARGS = b"\x81\xa4user\xa3ada"
WAIT_SECONDS = LOGIN_WAIT_NS // SECOND_NS


def wanted(session: str = "acme", task: str = "p.fetch") -> LoginVerdict:
    rules = (2, 60 * SECOND_NS, 60 * SECOND_NS)
    return LoginVerdict(session, "wanted", *rules, task=task, args=ARGS)


def failed(session: str = "acme") -> LoginVerdict:
    return LoginVerdict(session, "failed", 2, 60 * SECOND_NS, 60 * SECOND_NS, "wrong password")


def used(rig: Rig, *tenures: int) -> list[Grant]:
    """Claim as much as there is, on each of these nodes."""
    return [grant for tenure in tenures for grant in rig.claim(tenure, 10)]


def want(rig: Rig, tenure: int, grant: Grant, **how: str) -> None:
    """End an attempt that has found nobody logged in."""
    told = rig.engine.finish(tenure, [end(grant, "untouched", login=wanted(**how))])
    assert [each.state for each in told] == [""]


def log_in(rig: Rig, tenure: int, count: int = 1) -> tuple[list[str], Grant]:
    """Submit tasks of which the first finds nobody logged in; return them, and the login."""
    ids = rig.submit(*rig.tasks(count, session="acme"))
    (grant,) = used(rig, tenure)
    want(rig, tenure, grant)
    (login,) = used(rig, tenure)
    assert login.id not in ids
    return ids, login


def pass_a_tick(rig: Rig, seconds: float = 1) -> None:
    rig.pass_time(seconds)
    rig.engine.tick()


def test_a_login_task_runs_once_and_the_tasks_of_the_session_wait_for_it(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    ids, login = log_in(rig, a, 3)
    spec = login.spec
    assert (spec.name, spec.args, spec.session) == ("p.fetch", ARGS, "acme")
    assert (spec.priority, spec.max_retries, spec.expires_ns) == (HIGH, 0, LOGIN_WAIT_NS)
    assert (login.attempt, login.again, login.login_error) == (1, False, "")
    rig.submit(rig.task(session="shop"), rig.task(session="acme", priority=0))
    pass_a_tick(rig)
    assert [each.spec.session for each in used(rig, a, b)] == ["shop"]
    assert rig.engine.sessions()[0] == SessionView("acme", 0, 1, 4, login.id)
    rig.finish(a, login)
    pass_a_tick(rig)
    order = []
    for tenure in (b, a, b, a):
        (grant,) = used(rig, tenure)
        assert (grant.attempt, grant.again) == (1, grant.id == ids[0])
        rig.finish(tenure, grant)
        order.append(grant.id)
    assert order[1:] == ids  # the urgent one goes first, and needs no login of its own
    assert rig.ended(ids[0]).attempts == 1
    assert rig.engine.sessions() == [SessionView("shop", 0, 1, 0)]


def test_the_login_may_run_in_another_pool_of_another_node(rig: Rig) -> None:
    a, b = rig.join("a", pool("p")), rig.join("b", pool("q"))
    (id_,) = rig.submit(rig.task(session="acme"))
    (grant,) = used(rig, a)
    want(rig, a, grant, task="q.fetch")
    assert used(rig, a) == []
    (login,) = rig.claim(b, 5, "q")
    rig.finish(b, login)
    pass_a_tick(rig)
    (grant,) = used(rig, a)
    assert (grant.id, grant.again) == (id_, True)


def test_a_login_that_fails_has_failed_what_waited_for_it_and_others_try_again(rig: Rig) -> None:
    a = rig.join()
    (first, second), login = log_in(rig, a, 2)
    rig.finish(a, login, kind="failed", login=failed())
    pass_a_tick(rig)
    (grant,) = used(rig, a)
    assert (grant.id, grant.again, grant.held) == (first, False, None)
    assert grant.login_error == (
        f"nobody is logged in: login task {login.id} of session 'acme' did not work: "
        "ValueError: no price"
    )
    rig.finish(a, grant, kind="failed", retry_ns=10 * SECOND_NS)
    (grant,) = used(rig, a)
    assert (grant.id, grant.login_error) == (second, "")
    rig.finish(a, grant)
    pass_a_tick(rig, 11)
    (grant,) = used(rig, a)
    assert (grant.id, grant.attempt, grant.login_error) == (first, 2, "")  # it may want one anew
    want(rig, a, grant)
    (again,) = used(rig, a)
    assert again.id != login.id


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_login_task_that_never_runs_holds_nobody(rig: Rig, how: str) -> None:
    a = rig.join("a", lease=3600)
    (id_,) = rig.submit(rig.task(session="acme"))
    (grant,) = used(rig, a)
    want(rig, a, grant)
    [view] = [each for each in rig.engine.sessions() if each.login]
    if how == "cancelled":
        rig.engine.cancel([view.login])
        pass_a_tick(rig)
    else:
        pass_a_tick(rig, WAIT_SECONDS + 1)
        pass_a_tick(rig)
    (grant,) = used(rig, a)
    assert grant.id == id_
    assert grant.login_error.endswith(f"did not work: {how}")


def test_a_login_task_whose_node_is_lost_begins_anew(rig: Rig) -> None:
    a, b = rig.join("a", lease=30), rig.join("b", lease=3600)
    (id_,), login = log_in(rig, a)
    rig.pass_time(31)
    rig.engine.reap()
    (again,) = used(rig, b)
    assert again.id == login.id
    assert rig.engine.finish(b, [end(again)])
    pass_a_tick(rig)
    (grant,) = used(rig, b)
    assert (grant.id, grant.again) == (id_, True)


def test_a_login_task_that_is_not_accepted_fails_who_wanted_it(rig: Rig) -> None:
    a = rig.join()
    (id_,) = rig.submit(rig.task(session="acme"))
    (grant,) = used(rig, a)
    want(rig, a, grant, task="p.nothing")
    pass_a_tick(rig)
    (grant,) = used(rig, a)
    assert grant.id == id_
    assert "did not work: it is not accepted: " in grant.login_error


def test_a_login_task_waits_for_room_in_its_queue_for_a_while(rig: Rig) -> None:
    a = rig.join("a", pool("p"), pool("q", queue_size=1), lease=3600)
    (full,) = rig.submit(rig.task(pool="q", priority=0))
    rig.engine.tick()
    for seconds in (1, WAIT_SECONDS):
        (id_,) = rig.submit(rig.task(session="acme"))
        (grant,) = used(rig, a)
        want(rig, a, grant, task="q.fetch")
        pass_a_tick(rig, seconds)
        if seconds == 1:
            (other,) = rig.claim(a, 5, "q")
            assert other.id == full
            rig.finish(a, other)
            pass_a_tick(rig)
            pass_a_tick(rig)
            (login,) = rig.claim(a, 5, "q")
            rig.finish(a, login)
            pass_a_tick(rig)
            (grant,) = used(rig, a)
            assert (grant.id, grant.again) == (id_, True)
            rig.finish(a, grant)
            (full,) = rig.submit(rig.task(pool="q", priority=0))
            rig.engine.tick()
    pass_a_tick(rig)
    (grant,) = used(rig, a)
    assert grant.login_error.endswith("did not work: nobody has run it")


def test_who_is_cancelled_meanwhile_wants_no_login(rig: Rig) -> None:
    a = rig.join()
    (id_,) = rig.submit(rig.task(session="acme"))
    (grant,) = used(rig, a)
    rig.engine.cancel([id_])
    rig.engine.finish(a, [end(grant, "untouched", login=wanted())])
    assert rig.ended(id_).state == "cancelled"
    assert rig.engine.sessions() == []
    rig.submit(rig.task(session="acme"))
    assert len(used(rig, a)) == 1


def test_a_wish_counts_with_the_end_and_once(rig: Rig) -> None:
    a = rig.join()
    (id_,) = rig.submit(rig.task(session="acme"))
    (grant,) = used(rig, a)
    want(rig, a, grant)
    (login,) = used(rig, a)
    assert rig.engine.finish(a, [end(grant, "untouched", login=wanted())]) == []
    rig.finish(a, login)
    assert rig.engine.finish(a, [end(grant, "untouched", login=wanted())]) == []
    pass_a_tick(rig)
    (grant,) = used(rig, a)
    assert (grant.id, grant.again) == (id_, True)


def test_a_task_with_the_id_of_a_login_task_is_no_login(rig: Rig) -> None:
    a = rig.join()
    _, login = log_in(rig, a)
    rig.submit(rig.task(session="acme", id="login-0123456789abcdef", priority=0))
    rig.finish(a, login)
    pass_a_tick(rig)
    (grant,) = used(rig, a)
    want(rig, a, grant)
    (again,) = used(rig, a)
    assert again.id not in (grant.id, login.id)


def test_a_login_task_that_a_person_runs_again_is_a_task_like_others(rig: Rig) -> None:
    a = rig.join()
    _, login = log_in(rig, a)
    rig.finish(a, login, kind="failed")
    pass_a_tick(rig)
    assert rig.engine.retry([login.id]) == []
    (grant,) = used(rig, a)
    assert (grant.id, grant.login_error, grant.spec.session) == (login.id, "", "acme")
    rig.finish(a, grant)
    assert rig.ended(login.id).state == "succeeded"
    (grant,) = used(rig, a)
    assert grant.login_error, "the login that it has waited for had failed"


def test_a_crash_of_the_server_forgets_no_login(rig: Rig) -> None:
    a = rig.join()
    (id_,), login = log_in(rig, a)
    rig.restart([])
    assert rig.engine.rejoin(a, [Held(login.id, login.claim)]) == []
    pass_a_tick(rig)
    assert used(rig, a) == []
    rig.finish(a, login)
    pass_a_tick(rig)
    assert [(each.id, each.again) for each in used(rig, a)] == [(id_, True)]
