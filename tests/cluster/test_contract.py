"""The contract of engines: submits, claims, ends, nodes. Every test is run with each engine."""

import pytest
from msgspec import structs
from rig import SICK, Rig, end, pool, want

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    CANCEL,
    CANCELLED,
    CRASH,
    CRITICAL,
    EXPIRED,
    FAILED,
    HIGH,
    INVALID_TASK,
    LOW,
    NORMAL,
    POISON,
    QUEUE_FULL,
    RUNNING,
    SUCCEEDED,
    UNKNOWN_TASK,
    Failure,
)
from musterd.supervisor.cluster.engine import (
    INTERRUPTIONS_MAX,
    ClusterPolicy,
    End,
    Ended,
    Fenced,
    Held,
    NameTaken,
    NodeCard,
    Want,
)
from musterd.supervisor.core.model.policy import TargetPolicy

# -- submit, claim, finish ----------------------------------------------------------------------


def test_a_task_is_claimed_once_and_ends_once(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    [id_] = rig.submit(rig.task(args=b"\x81\xa1x\x01"))
    [grant] = rig.claim(a, 5)
    assert (grant.id, grant.attempt, grant.spec.args) == (id_, 1, b"\x81\xa1x\x01")
    assert rig.claim(b, 5) == []
    assert rig.view(id_).state == RUNNING
    assert rig.view(id_).worker == "a"
    [told] = rig.finish(a, grant, value=b"\x2a", run_ns=7)
    assert (told.id, told.state) == (id_, SUCCEEDED)
    outcome = rig.ended(id_)
    assert (outcome.state, outcome.value, outcome.attempts, outcome.run_ns) == (
        SUCCEEDED,
        b"\x2a",
        1,
        7,
    )
    assert rig.finish(a, grant, value=b"\x2b") == []
    assert rig.ended(id_).value == b"\x2a"


def test_the_spec_comes_back_as_it_was_submitted(rig: Rig) -> None:
    a = rig.join()
    spec = rig.task(
        priority=HIGH,
        target="site.example",
        timeout_ns=5 * SECOND_NS,
        max_retries=7,
        expires_ns=3600 * SECOND_NS,
        key="k",
        cache_ns=1,
        debounce_ns=2,
        on_open="wait",
        fallback=b"\xc0",
        fallback_on="failure",
    )
    rig.submit(spec)
    assert rig.claim_one(a).spec == spec


def test_each_claim_has_another_number(rig: Rig) -> None:
    a = rig.join()
    rig.submit(*rig.tasks(3))
    numbers = {rig.claim_one(a).claim for _ in range(3)}
    assert len(numbers) == 3
    assert all(0 < number < 2**63 for number in numbers)


def test_an_end_with_another_claim_or_tenure_does_not_count(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    [id_] = rig.submit(rig.task())
    grant = rig.claim_one(a)
    assert rig.engine.finish(a, [End(id_, grant.claim + 1, "succeeded")]) == []
    assert rig.engine.finish(b, [end(grant)]) == []
    assert rig.view(id_).state == RUNNING


def test_tasks_of_a_site_come_in_the_order_of_their_submits(rig: Rig) -> None:
    a = rig.join()
    ids = rig.submit(*rig.tasks(25))
    assert rig.drained(a) == ids


def test_more_urgent_levels_come_first(rig: Rig) -> None:
    a = rig.join()
    levels = (LOW, NORMAL, CRITICAL, HIGH)
    by_level = {level: rig.submit(*rig.tasks(3, priority=level)) for level in levels}
    wanted = [id_ for level in (CRITICAL, HIGH, NORMAL, LOW) for id_ in by_level[level]]
    assert rig.drained(a) == wanted


def test_sites_take_turns_however_many_tasks_one_has(rig: Rig) -> None:
    a = rig.join()
    many = set(rig.submit(*rig.tasks(40, target="many.example")))
    few = rig.submit(*rig.tasks(3, target="few.example"))
    order = [rig.claim_one(a).id for _ in range(6)]
    assert set(few) <= set(order)
    assert len(many & set(order)) == 3


def test_one_claim_is_shared_between_sites(rig: Rig) -> None:
    a = rig.join()
    for site in ("one", "two", "three", "four"):
        rig.submit(*rig.tasks(30, target=site))
    grants = rig.claim(a, 40)
    sites = [grant.spec.target for grant in grants]
    assert {site: sites.count(site) for site in set(sites)} == dict.fromkeys(
        ("one", "two", "three", "four"), 10
    )


def test_a_claim_takes_all_that_is_wanted_from_lanes_of_any_length(rig: Rig) -> None:
    a = rig.join()
    rig.submit(*rig.tasks(1, target="one"), *rig.tasks(50, target="two"))
    assert len(rig.claim(a, 40)) == 40


def test_a_task_behind_hundreds_of_empty_lanes_is_found(rig: Rig) -> None:
    a = rig.join()
    ids = []
    for start in range(0, 600, 100):
        tasks = [rig.task(target=f"s{number}") for number in range(start, start + 100)]
        ids += rig.submit(*tasks)
    rig.engine.cancel(ids)
    [urgent] = rig.submit(rig.task(target="s599"))
    rig.submit(rig.task(priority=LOW))
    assert rig.claim_one(a).id == urgent


def test_low_levels_do_not_starve(rig: Rig) -> None:
    a = rig.join("a", pool(aging_ns=10 * SECOND_NS))
    [low] = rig.submit(rig.task(priority=LOW))
    rig.pass_time(11)
    rig.engine.tick()
    rig.submit(*rig.tasks(60))
    order = [rig.claim_one(a).id for _ in range(20)]
    assert low in order
    assert order.index(low) <= 16


def test_a_young_task_of_a_low_level_waits(rig: Rig) -> None:
    a = rig.join("a", pool(aging_ns=10 * SECOND_NS))
    [low] = rig.submit(rig.task(priority=LOW))
    rig.submit(*rig.tasks(40))
    rig.engine.tick()
    assert low not in [rig.claim_one(a).id for _ in range(30)]


def test_pools_have_queues_of_their_own(rig: Rig) -> None:
    a = rig.join("a", pool("p"), pool("q"))
    b = rig.join("b", pool("q"))
    [in_p] = rig.submit(rig.task(pool="p", target="s"))
    [in_q] = rig.submit(rig.task(pool="q", target="s"))
    assert [each.id for each in rig.claim(b, 5, "q")] == [in_q]
    assert rig.claim(b, 5, "q") == []
    wants = [want(5, "q"), want(5, "p")]
    assert [each.id for each in rig.engine.claim(a, wants)] == [in_p]


def test_a_node_gets_only_tasks_that_its_code_has(rig: Rig) -> None:
    a, old = rig.join("a"), rig.join("old", pool(tasks=("fetch",)))
    [new] = rig.submit(rig.task("extract"))
    [known] = rig.submit(rig.task("fetch"))
    grants = rig.engine.claim(old, [Want("p", 5, ("p.fetch",))])
    assert [each.id for each in grants] == [known]
    assert [each.id for each in rig.claim(a, 5)] == [new]


def test_what_a_node_passed_over_is_still_there_for_others(rig: Rig) -> None:
    a = rig.join("a")
    old = rig.join("old", pool(tasks=("fetch",)))
    for _ in range(3):
        rig.submit(*rig.tasks(5, method="extract"), *rig.tasks(70, method="fetch"))
        while grants := rig.engine.claim(old, [Want("p", 50, ("p.fetch",))]):
            rig.finish(old, *grants)
    assert len(rig.drained(a)) == 15


@pytest.mark.parametrize("name", ["q.extract", "p.nothing", "p", "nothing"])
def test_a_task_that_no_node_has_is_refused(rig: Rig, name: str) -> None:
    rig.join()
    [verdict] = rig.engine.submit([rig.task(name=name)])
    assert verdict.rejection is not None
    assert verdict.rejection.code == UNKNOWN_TASK


def test_a_task_whose_nodes_are_all_gone_waits(rig: Rig) -> None:
    rig.engine.leave(rig.join("a"))
    [id_] = rig.submit(rig.task())
    assert [each.id for each in rig.claim(rig.join("b"), 5)] == [id_]


BAD = {
    "id": ["", "x" * 65],
    "name": ["p." + "x" * 200],
    "priority": [-1, 4],
    "target": ["x" * 254],
    "key": ["x" * 201],
    "policy": ["x" * 33],
    "max_retries": [-2, 1001],
    "timeout_ns": [-1, 2**62 + 1],
    "delay_ns": [-1],
    "expires_ns": [-1],
    "cache_ns": [-2],
    "debounce_ns": [-2],
    "on_open": ["never"],
    "fallback_on": ["never"],
    "args": [b"x" * (4 * 1024 * 1024 + 1)],
    "fallback": [b"x" * (4 * 1024 * 1024 + 1)],
}


@pytest.mark.parametrize("field", BAD)
def test_what_is_out_of_bounds_is_refused_and_the_rest_is_not(rig: Rig, field: str) -> None:
    a = rig.join()
    bad = [rig.task(**{field: value}) for value in BAD[field]]
    good = rig.task()
    verdicts = rig.engine.submit([*bad, good])
    assert [each.state for each in verdicts] == ["rejected"] * len(bad) + ["accepted"]
    for verdict in verdicts[:-1]:
        assert verdict.rejection is not None
        assert verdict.rejection.code == INVALID_TASK
    assert [each.id for each in rig.claim(a, 5)] == [good.id]


def test_an_unknown_class_is_refused(rig: Rig) -> None:
    rig.join()
    [verdict] = rig.engine.submit([rig.task(policy="gold")])
    assert verdict.rejection is not None
    assert verdict.rejection.code == INVALID_TASK


def test_a_full_queue_refuses_and_keeps_room_for_urgent_tasks(rig: Rig) -> None:
    rig.join("a", pool(queue_size=100))
    rig.submit(*rig.tasks(95))
    rig.engine.tick()
    normal, high, critical = rig.engine.submit(
        [rig.task(), rig.task(priority=HIGH), rig.task(priority=CRITICAL)]
    )
    assert normal.rejection is not None
    assert normal.rejection.code == QUEUE_FULL
    assert normal.rejection.retry_after_ns > 0
    assert (high.state, critical.state) == ("accepted", "accepted")
    rig.submit(rig.task(priority=HIGH))
    rig.engine.tick()
    high, critical = rig.engine.submit([rig.task(priority=HIGH), rig.task(priority=CRITICAL)])
    assert (high.state, critical.state) == ("rejected", "accepted")


def test_a_queue_has_room_again_when_tasks_have_ended(rig: Rig) -> None:
    a = rig.join("a", pool(queue_size=10))
    rig.submit(*rig.tasks(10))
    rig.engine.tick()
    assert rig.engine.submit([rig.task()])[0].state == "rejected"
    rig.drained(a)
    rig.engine.tick()
    assert rig.engine.submit([rig.task()])[0].state == "accepted"


# -- the same submit again ------------------------------------------------------------------------


def test_a_live_id_is_the_same_task(rig: Rig) -> None:
    a = rig.join()
    spec = rig.task()
    rig.submit(spec)
    for resend in (False, True):
        assert rig.engine.submit([spec], resend=resend)[0].state == "known"
    grant = rig.claim_one(a)
    assert rig.engine.submit([spec], resend=True)[0].state == "known"
    assert rig.claim(a, 5) == []
    rig.finish(a, grant)


def test_a_resend_of_a_finished_id_does_not_run_it_again(rig: Rig) -> None:
    a = rig.join()
    spec = rig.task()
    rig.submit(spec)
    rig.finish(a, rig.claim_one(a), value=b"\x05")
    [verdict] = rig.engine.submit([spec], resend=True)
    assert verdict.state == "known"
    assert verdict.outcome is not None
    assert verdict.outcome.value == b"\x05"
    assert rig.claim(a, 5) == []


def test_an_id_with_another_body_is_refused(rig: Rig) -> None:
    a = rig.join()
    spec = rig.task()
    rig.submit(spec)
    other = rig.task(id=spec.id, args=b"\x81\xa1x\x02")
    assert rig.engine.submit([other])[0].state == "rejected"
    rig.finish(a, rig.claim_one(a))
    assert rig.engine.submit([other], resend=True)[0].state == "rejected"


def test_one_submit_may_have_an_id_twice(rig: Rig) -> None:
    a = rig.join()
    spec = rig.task()
    assert [each.state for each in rig.engine.submit([spec, spec])] == ["accepted", "known"]
    assert len(rig.claim(a, 5)) == 1


@pytest.mark.parametrize("id_", ["login-1", "@", "@a", "-", "é" * 64, "x" * 64])
def test_a_task_ends_whatever_its_id(rig: Rig, id_: str) -> None:
    a = rig.join()
    rig.submit(rig.task(id=id_))
    rig.drained(a)
    assert rig.ended(id_).state == SUCCEEDED
    assert rig.engine.counts() == []


# -- those who wait -----------------------------------------------------------------------------


def test_a_waiter_hears_of_each_end_once(rig: Rig) -> None:
    a = rig.join()
    first = rig.submit(*rig.tasks(3), waiter=7)
    rig.submit(*rig.tasks(2), waiter=8)
    rig.finish(a, *rig.claim(a, 2))
    told = rig.engine.ended(7)
    assert set(told.ids) == set(first[:2])
    assert rig.engine.ended(7, told.after).ids == ()
    rig.drained(a)
    assert rig.engine.ended(7, told.after).ids == (first[2],)
    assert len(rig.engine.ended(8).ids) == 2


def test_who_finishes_is_told_who_waits(rig: Rig) -> None:
    a = rig.join()
    rig.submit(rig.task(), waiter=9)
    [told] = rig.finish(a, rig.claim_one(a))
    assert told.waiter == 9


def test_a_resend_waits_where_nobody_waited(rig: Rig) -> None:
    a = rig.join()
    spec = rig.task()
    rig.submit(spec)
    rig.engine.submit([spec], waiter=5, resend=True)
    rig.drained(a)
    assert rig.engine.ended(5).ids == (spec.id,)


def test_what_became_of_tasks_is_fetched_as_far_as_it_fits(rig: Rig) -> None:
    tenure = rig.join()
    first, second, third, alive = rig.submit(*rig.tasks(4))
    for id_, value in ((first, b"1234"), (second, b"567890"), (third, b"")):
        grant = rig.claim_one(tenure)
        assert grant.id == id_
        rig.finish(tenure, grant, value=value)
    ids = [third, "nothing", first, alive, second]
    whole = rig.engine.fetch(ids, 10)
    assert [each.value for each in whole.outcomes] == [b"", b"1234", b"567890"]
    assert (whole.alive, whole.absent) == ((alive,), ("nothing",))
    assert (whole.unread, whole.next_bytes) == ((), 0)
    part = rig.engine.fetch(ids, 9)
    assert [each.id for each in part.outcomes] == [third, first]
    assert (part.unread, part.next_bytes) == ((second,), 6)
    assert rig.engine.fetch([second, third], 5).unread == (second, third)
    nothing_read = rig.engine.fetch(ids, -1)
    assert (nothing_read.outcomes, nothing_read.alive) == ((), (alive,))
    assert nothing_read.unread == (third, first, second)


def test_a_task_that_runs_again_by_hand_is_alive(rig: Rig) -> None:
    tenure = rig.join()
    (id_,) = rig.submit(rig.task())
    rig.finish(tenure, rig.claim_one(tenure), kind="failed")
    assert [each.id for each in rig.engine.fetch([id_], 100).outcomes] == [id_]
    rig.engine.retry([id_])
    assert rig.engine.fetch([id_], 100).alive == (id_,)


def test_an_id_that_no_task_can_have_is_unknown_and_others_are_not(rig: Rig) -> None:
    """A client may ask for anything."""
    rig.join()
    [id_] = rig.submit(rig.task())
    found = rig.engine.fetch([id_, "\0"], 100)
    assert (found.alive, found.absent) == ((id_,), ("\0",))
    assert rig.engine.view("\0") is None
    assert rig.engine.look_up(["\0"]) == []
    rig.engine.invalidate("\0", prefix=True)
    assert rig.engine.cancel(["\0", id_]) == [id_]


def test_an_unknown_id_has_no_outcome_and_no_view(rig: Rig) -> None:
    assert rig.engine.look_up(["nothing"]) == []
    assert rig.engine.view("nothing") is None


# -- failures, retries, interruptions, crashes ----------------------------------------------------


def test_a_failure_without_a_retry_ends_the_task(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task())
    rig.finish(a, rig.claim_one(a), kind="failed", run_ns=5)
    outcome = rig.ended(id_)
    assert (outcome.state, outcome.failure, outcome.attempts) == (FAILED, SICK, 1)
    [shown] = rig.view(id_).attempts
    assert (shown.attempt, shown.worker, shown.failure) == (1, "a", SICK)


def test_a_retry_waits_and_comes_back_with_the_next_attempt(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task())
    [told] = rig.finish(a, rig.claim_one(a), kind="failed", retry_ns=5 * SECOND_NS)
    assert told.state == ""
    rig.engine.tick()
    assert rig.claim(a, 5) == []
    assert rig.view(id_).state == "waiting"
    rig.pass_time(6)
    assert rig.engine.tick().ready == 1
    grant = rig.claim_one(a)
    assert (grant.id, grant.attempt) == (id_, 2)
    rig.finish(a, grant)
    assert rig.ended(id_).attempts == 2


def test_failed_attempts_are_remembered_the_last_ones(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task())
    for number in range(12):
        failure = Failure("error", "E", f"number {number}")
        rig.finish(a, rig.claim_one(a), kind="failed", failure=failure, retry_ns=0)
        rig.engine.tick()
    messages = [each.failure.message for each in rig.view(id_).attempts]
    assert messages == [f"number {number}" for number in range(2, 12)]


def test_an_untouched_task_goes_back_to_its_place(rig: Rig) -> None:
    a = rig.join()
    first, second = rig.submit(*rig.tasks(2))
    rig.finish(a, rig.claim_one(a), kind="untouched")
    grants = rig.claim(a, 5)
    assert [each.id for each in grants] == [first, second]
    assert [each.attempt for each in grants] == [1, 1]


def test_an_interruption_is_no_attempt(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task())
    for number in range(INTERRUPTIONS_MAX):
        grant = rig.claim_one(a)
        assert (grant.attempt, grant.interruptions) == (1, number)
        rig.finish(a, grant, kind="interrupted")
    rig.finish(a, rig.claim_one(a), kind="interrupted")
    outcome = rig.ended(id_)
    assert outcome.state == FAILED
    assert outcome.failure is not None
    assert outcome.failure.kind == CRASH


def test_a_task_that_crashes_its_workers_is_quarantined(rig: Rig) -> None:
    a = rig.join("a", pool(max_crashes=2))
    [id_] = rig.submit(rig.task())
    crash = Failure(CRASH, message="its worker was killed")
    rig.finish(a, rig.claim_one(a), kind="crashed", failure=crash)
    grant = rig.claim_one(a)
    assert (grant.attempt, grant.crashes) == (1, 1)
    rig.finish(a, grant, kind="crashed", failure=crash)
    outcome = rig.ended(id_)
    assert outcome.state == FAILED
    assert outcome.failure is not None
    assert outcome.failure.type == POISON
    assert outcome.attempts == 2
    assert [each.failure for each in rig.view(id_).attempts] == [crash, crash]


# -- delays and expiry --------------------------------------------------------------------------


def test_a_delayed_task_waits(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task(delay_ns=5 * SECOND_NS))
    rig.engine.tick()
    assert rig.claim(a) == []
    rig.pass_time(5.5)
    rig.engine.tick()
    assert rig.claim_one(a).id == id_


def test_a_task_never_begins_after_it_has_expired(rig: Rig) -> None:
    a = rig.join()
    late, other = rig.submit(rig.task(expires_ns=5 * SECOND_NS), rig.task())
    rig.pass_time(6)
    assert [each.id for each in rig.claim(a, 5)] == [other]
    assert rig.engine.tick().expired == 1
    assert rig.ended(late).state == EXPIRED


def test_a_grant_says_how_long_it_may_wait(rig: Rig) -> None:
    a = rig.join()
    rig.submit(rig.task(expires_ns=100 * SECOND_NS), rig.task())
    first, second = rig.claim(a, 2)
    assert 0 < first.expires_in_ns <= 100 * SECOND_NS
    assert second.expires_in_ns == 0


@pytest.mark.parametrize("kind", ["untouched", "interrupted", "failed"])
def test_what_comes_back_after_its_expiry_has_expired(rig: Rig, kind: str) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task(expires_ns=5 * SECOND_NS))
    grant = rig.claim_one(a)
    rig.pass_time(6)
    how: dict[str, object] = {"retry_ns": 0} if kind == "failed" else {}
    rig.finish(a, grant, kind=kind, **how)
    assert rig.ended(id_).state == EXPIRED


def test_a_running_task_does_not_expire(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task(expires_ns=5 * SECOND_NS))
    grant = rig.claim_one(a)
    rig.pass_time(6)
    assert rig.engine.tick().expired == 0
    rig.finish(a, grant)
    assert rig.ended(id_).state == SUCCEEDED


def test_a_waiting_retry_expires(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task(expires_ns=5 * SECOND_NS))
    rig.finish(a, rig.claim_one(a), kind="failed", retry_ns=60 * SECOND_NS)
    rig.pass_time(6)
    rig.engine.tick()
    assert rig.ended(id_).state == EXPIRED


# -- cancel and retry by hand ---------------------------------------------------------------------


def test_a_queued_task_is_cancelled_at_once(rig: Rig) -> None:
    a = rig.join()
    queued, delayed = rig.submit(rig.task(), rig.task(delay_ns=SECOND_NS))
    assert set(rig.engine.cancel([queued, delayed, "nothing"])) == {queued, delayed}
    assert rig.claim(a, 5) == []
    assert {rig.ended(queued).state, rig.ended(delayed).state} == {CANCELLED}
    assert rig.engine.cancel([queued]) == []


def test_a_running_task_is_cancelled_by_its_node(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    [id_] = rig.submit(rig.task())
    grant = rig.claim_one(a)
    assert rig.engine.cancel([id_]) == [id_]
    assert rig.engine.beat(b).cancel == ()
    assert rig.engine.beat(a).cancel == (id_,)
    rig.finish(a, grant, kind="failed", failure=Failure(CANCEL), retry_ns=0)
    assert rig.ended(id_).state == CANCELLED


@pytest.mark.parametrize("kind", ["untouched", "interrupted", "crashed"])
def test_a_cancelled_task_that_comes_back_is_cancelled(rig: Rig, kind: str) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task())
    grant = rig.claim_one(a)
    rig.engine.cancel([id_])
    rig.finish(a, grant, kind=kind)
    assert rig.ended(id_).state == CANCELLED


def test_a_result_beats_a_cancel(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task())
    grant = rig.claim_one(a)
    rig.engine.cancel([id_])
    rig.finish(a, grant)
    assert rig.ended(id_).state == SUCCEEDED


def test_a_failed_task_runs_again_by_hand(rig: Rig) -> None:
    a = rig.join()
    spec = rig.task(args=b"\x81\xa1x\x07", target="s", max_retries=2)
    rig.submit(spec, waiter=3)
    rig.finish(a, rig.claim_one(a), kind="failed")
    assert rig.engine.retry([spec.id]) == []
    assert rig.outcome(spec.id) is None
    grant = rig.claim_one(a)
    assert (grant.spec, grant.attempt) == (spec, 1)
    rig.finish(a, grant)
    assert rig.ended(spec.id).state == SUCCEEDED


def test_many_failed_tasks_run_again_by_hand(rig: Rig) -> None:
    """Each for who waited for it; those that are refused keep nobody else from running."""
    a = rig.join()
    first = rig.tasks(120, target="s")
    second = [*rig.tasks(3, key="k"), rig.task(key="own", priority=0)]
    for specs, waiter in ((first, 3), (second, 4)):
        for at in range(0, len(specs), 100):
            rig.submit(*specs[at : at + 100], waiter=waiter)
    while grants := rig.claim(a, 50):
        rig.finish(a, *grants, kind="failed")
    [good] = rig.submit(rig.task())
    rig.finish(a, rig.claim_one(a))
    ids = [spec.id for spec in (*first, *second)]
    rejected = rig.engine.retry([*ids[:60], "nothing", *ids[60:], good, ids[0]])
    assert [(each.id, each.code) for each in rejected] == [
        ("nothing", "NoSuchTask"),
        (good, "NotFailed"),
    ]
    assert [each.code for each in rig.engine.retry(ids[:2])] == ["NotEnded", "NotEnded"]
    again = rig.engine.ended(0).after
    claimed = []
    while grants := rig.claim(a, 50):
        claimed += [grant.spec for grant in grants]
        rig.finish(a, *grants)
    joined = {spec.id for spec in second[1:3]}  # the first of its key runs for all of them
    assert sorted(spec.id for spec in claimed) == sorted(set(ids) - joined)
    assert claimed[0] == second[-1]
    assert {rig.ended(id_).state for id_ in ids} == {SUCCEEDED}
    told = [rig.engine.ended(waiter, again).ids for waiter in (3, 4)]
    assert [sorted(each) for each in told] == [
        sorted(spec.id for spec in specs) for specs in (first, second)
    ]


def test_what_cannot_run_again_is_said(rig: Rig) -> None:
    a = rig.join()
    good, alive = rig.submit(*rig.tasks(2))
    rig.finish(a, rig.claim_one(a))
    rejected = rig.engine.retry([good, alive, "nothing"])
    codes = {each.id: each.code for each in rejected}
    assert codes == {good: "NotFailed", alive: "NotEnded", "nothing": "NoSuchTask"}


# -- nodes --------------------------------------------------------------------------------------


def test_a_tenure_is_never_given_twice(rig: Rig) -> None:
    tenures = [rig.join("a") for _ in range(3)]
    assert len(set(tenures)) == 3


def test_a_second_live_node_of_a_name_is_refused(rig: Rig) -> None:
    rig.join("a", identity="one", lease=10)
    with pytest.raises(NameTaken, match="'a'"):
        rig.join("a", identity="two", lease=10)
    rig.pass_time(11)
    with pytest.raises(NameTaken) as taken:  # its lease is over, and it may be back
        rig.join("a", identity="two", lease=10)
    assert 11 * SECOND_NS <= taken.value.beat_age_ns < 60 * SECOND_NS
    rig.engine.reap()
    rig.join("a", identity="two", lease=10)


def test_a_copy_of_a_live_node_under_another_name_is_refused(rig: Rig) -> None:
    """A machine that was cloned with its state_dir: the two would end each other for ever."""
    a = rig.join("a", identity="one", lease=10)
    with pytest.raises(NameTaken, match=r"identity in node\.id is taken by node 'a'") as taken:
        rig.join("b", identity="one")
    assert taken.value.beat_age_ns < 10 * SECOND_NS
    rig.engine.beat(a)
    rig.engine.leave(a)
    rig.join("b", identity="one")  # it was renamed
    assert [each.name for each in rig.engine.nodes()] == ["b"]


def test_a_node_cannot_take_the_name_of_another(rig: Rig) -> None:
    a, _ = rig.join("a"), rig.join("b")
    with pytest.raises(NameTaken):
        rig.engine.redeclare(a, NodeCard("id-a", "b", 30 * SECOND_NS))
    rig.engine.redeclare(a, NodeCard("id-a", "c", 30 * SECOND_NS))
    assert [each.name for each in rig.engine.nodes()] == ["b", "c"]


def test_a_node_that_joins_again_gives_its_claims_back_at_once(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    begun, untouched = rig.submit(*rig.tasks(2))
    grants = rig.claim(a, 2)
    rig.engine.begun(a, [Held(grants[0].id, grants[0].claim)])
    rig.join("a")
    back = {each.id: each for each in rig.claim(b, 5)}
    assert (back[begun].crashes, back[untouched].crashes) == (1, 0)
    assert {each.attempt for each in back.values()} == {1}
    assert rig.finish(a, *grants) == []
    with pytest.raises(Fenced):
        rig.engine.beat(a)
    with pytest.raises(Fenced):
        rig.claim(a)


def test_a_node_whose_lease_is_over_is_reaped(rig: Rig) -> None:
    a, b = rig.join("a", lease=10), rig.join("b", lease=10)
    [id_] = rig.submit(rig.task())
    grant = rig.claim_one(a)
    rig.pass_time(8)
    rig.engine.beat(b)
    assert rig.engine.reap() == []
    rig.pass_time(5)
    [reaped] = rig.engine.reap()
    assert (reaped.name, reaped.tenure, reaped.claims) == ("a", a, 1)
    assert rig.finish(a, grant) == []
    with pytest.raises(Fenced):
        rig.engine.beat(a)
    again = rig.claim_one(b)
    assert again.id == id_
    assert again.claim != grant.claim
    rig.finish(b, again)
    assert rig.engine.reap() == []


def test_a_late_result_of_a_reaped_node_does_not_count_while_the_task_runs_elsewhere(
    rig: Rig,
) -> None:
    a, b = rig.join("a", lease=10), rig.join("b", lease=100)
    [id_] = rig.submit(rig.task())
    late = rig.claim_one(a)
    rig.pass_time(11)
    rig.engine.reap()
    grant = rig.claim_one(b)
    assert rig.finish(a, late, value=b"\x01") == []
    rig.finish(b, grant, value=b"\x02")
    assert rig.ended(id_).value == b"\x02"


def test_a_task_that_takes_nodes_along_is_quarantined(rig: Rig) -> None:
    id_ = ""
    for number in range(3):
        tenure = rig.join(f"n{number}", lease=10)
        if not number:
            [id_] = rig.submit(rig.task())
        grant = rig.claim_one(tenure)
        rig.engine.begun(tenure, [Held(grant.id, grant.claim)])
        rig.pass_time(11)
        rig.engine.reap()
    outcome = rig.ended(id_)
    assert outcome.failure is not None
    assert outcome.failure.type == POISON


def test_a_cancelled_task_of_a_lost_node_is_cancelled(rig: Rig) -> None:
    a = rig.join("a", lease=10)
    [id_] = rig.submit(rig.task())
    rig.claim_one(a)
    rig.engine.cancel([id_])
    rig.pass_time(11)
    rig.engine.reap()
    assert rig.ended(id_).state == CANCELLED


def test_claims_that_a_node_does_not_know_of_go_back_untouched(rig: Rig) -> None:
    tenure, other = rig.join(), rig.join("b")
    ids = rig.submit(*rig.tasks(3))
    known, lost = rig.claim_one(tenure), rig.claim_one(tenure)
    beside = rig.claim_one(other)
    rig.engine.begun(tenure, [Held(lost.id, lost.claim)])
    assert rig.engine.release(tenure, [Held(known.id, known.claim), Held(lost.id, 1)]) == 1
    again = rig.claim_one(other)
    assert (again.id, again.attempt, again.crashes) == (ids[1], 1, 0)
    assert rig.finish(tenure, lost) == []
    assert len(rig.finish(tenure, known)) == 1
    assert len(rig.finish(other, beside, again)) == 2
    assert rig.engine.release(tenure, []) == 0
    rig.engine.leave(tenure)
    with pytest.raises(Fenced):
        rig.engine.release(tenure, [])


def test_a_node_that_leaves_gives_its_claims_back(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    [id_] = rig.submit(rig.task())
    rig.claim_one(a)
    rig.engine.leave(a)
    rig.engine.leave(a)
    assert rig.claim_one(b).id == id_


def test_a_daemon_that_begins_gives_back_what_its_node_had(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    rig.engine.give_back("id-a")
    ids = rig.submit(*rig.tasks(3))
    begun, untouched = rig.claim_one(a), rig.claim_one(a)
    beside = rig.claim_one(b)
    rig.engine.begun(a, [Held(begun.id, begun.claim)])
    rig.engine.give_back("nobody")
    assert rig.claim(b, 5) == []
    rig.engine.give_back("id-a")
    again = {each.id: (each.attempt, each.crashes) for each in rig.claim(b, 5)}
    assert again == {ids[0]: (1, 1), ids[1]: (1, 0)}
    assert rig.finish(a, begun, untouched) == []
    assert len(rig.finish(b, beside)) == 1
    rig.engine.beat(a)  # its tenure lasts, and with it its name
    with pytest.raises(NameTaken):
        rig.engine.join(NodeCard("id-other", "a", 30 * SECOND_NS))


def test_nodes_are_shown(rig: Rig) -> None:
    a = rig.join("a", lease=10)
    rig.join("b", pool("q"), lease=100)
    rig.submit(rig.task())
    rig.claim_one(a)
    one, two = rig.engine.nodes()
    assert (one.name, one.alive, one.claims, one.draining) == ("a", True, 1, False)
    assert [each.name for each in two.pools] == ["q"]
    assert two.pools[0].tasks == pool("q").tasks
    rig.pass_time(11)
    assert [each.alive for each in rig.engine.nodes()] == [False, True]
    assert rig.engine.nodes()[0].beat_age_ns >= 11 * SECOND_NS


def test_a_draining_node_gets_nothing(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    rig.submit(*rig.tasks(2))
    assert rig.engine.drain("a", draining=True)
    assert rig.claim(a) == []
    assert rig.engine.beat(a).draining
    assert not rig.engine.beat(b).draining
    a = rig.join("a")  # a restart does not end it
    assert rig.claim(a) == []
    assert rig.engine.drain("a", draining=False)
    assert len(rig.claim(a)) == 1
    assert not rig.engine.drain("nobody", draining=True)


def test_a_forgotten_node_is_fenced_and_its_tasks_are_unknown(rig: Rig) -> None:
    a = rig.join("a")
    [id_] = rig.submit(rig.task())
    grant = rig.claim_one(a)
    assert rig.engine.forget("a")
    assert not rig.engine.forget("a")
    assert rig.engine.nodes() == []
    assert rig.finish(a, grant) == []
    assert rig.engine.submit([rig.task()])[0].state == "rejected"
    assert rig.claim_one(rig.join("b")).id == id_


def test_what_nodes_declare_is_told_when_it_has_changed(rig: Rig) -> None:
    nothing = rig.engine.cards()
    assert nothing is not None
    assert nothing.cards == ()
    assert rig.engine.cards(nothing.stamp) is None
    a = rig.join("a", redact=("password",))
    one = rig.engine.cards(nothing.stamp)
    assert one is not None
    assert [(card.name, card.pools, card.redact) for card in one.cards] == [
        ("a", (pool(),), ("password",))
    ]
    rig.engine.beat(a)
    assert rig.engine.cards(one.stamp) is None
    rig.join("b")
    two = rig.engine.cards(one.stamp)
    assert two is not None
    assert [card.name for card in two.cards] == ["a", "b"]
    rig.join("a", redact=("token",))
    again = rig.engine.cards(two.stamp)
    assert again is not None
    assert [card.redact for card in again.cards] == [("token",), ()]
    rig.engine.forget("b")
    last = rig.engine.cards(again.stamp)
    assert last is not None
    assert len(last.cards) == 1


# -- a restart of the server ----------------------------------------------------------------------


def test_after_a_restart_nothing_is_granted_before_each_node_has_registered(rig: Rig) -> None:
    a, b = rig.join("a", lease=10), rig.join("b", lease=10)
    epoch = rig.engine.beat(a).epoch
    first, second = rig.submit(*rig.tasks(2))
    grant = rig.claim_one(a)
    rig.restart([first])
    assert rig.engine.beat(b).epoch != epoch
    assert rig.engine.rejoin(b, []) == []
    assert rig.claim(b, 5) == []
    assert rig.engine.rejoin(a, [Held(first, grant.claim)]) == []
    assert [each.id for each in rig.claim(b, 5)] == [second]
    [told] = rig.finish(a, grant)
    assert told.state == SUCCEEDED


def test_after_a_restart_silent_nodes_hold_everybody_up_until_their_lease_ends(rig: Rig) -> None:
    a, b = rig.join("a", lease=10), rig.join("b", lease=10)
    [lost] = rig.submit(rig.task())
    grant = rig.claim_one(a)
    rig.restart([lost])
    rig.engine.rejoin(b, [])
    assert rig.claim(b) == []
    rig.pass_time(11)
    rig.engine.rejoin(b, [])
    rig.engine.reap()
    assert rig.claim_one(b).id == lost
    assert rig.finish(a, grant) == []


def test_after_a_restart_a_node_that_has_not_registered_gets_nothing(rig: Rig) -> None:
    """Its lease is over by the server's clock, which may have forgotten a heartbeat."""
    a = rig.join("a", lease=10)
    [lost] = rig.submit(rig.task())
    grant = rig.claim_one(a)
    rig.restart([lost])
    rig.pass_time(11)
    assert rig.claim(a) == [], "it runs that task"
    assert rig.engine.rejoin(a, [Held(lost, grant.claim)]) == []
    assert len(rig.finish(a, grant)) == 1


def test_a_claim_that_somebody_else_has_is_lost(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    first, ended = rig.submit(*rig.tasks(2))
    grants = rig.claim(a, 2)
    rig.finish(a, grants[1])
    held = [Held(grant.id, grant.claim) for grant in grants]
    assert rig.engine.rejoin(a, held) == [ended]
    assert rig.engine.rejoin(b, held) == [first, ended]
    with pytest.raises(Fenced):
        rig.engine.rejoin(999, held)


def test_what_a_node_does_not_run_goes_back_when_it_registers(rig: Rig) -> None:
    a = rig.join("a")
    ids = rig.submit(*rig.tasks(3))
    known, unheard, begun = rig.claim(a, 3)
    rig.engine.begun(a, [Held(begun.id, begun.claim)])
    assert rig.engine.rejoin(a, [Held(known.id, known.claim)]) == []
    assert [each.claims for each in rig.engine.nodes()] == [1]
    again = {grant.id: grant for grant in rig.claim(a, 3)}
    assert list(again) == ids[1:]
    assert (again[unheard.id].attempt, again[unheard.id].crashes) == (1, 0)
    assert (again[begun.id].attempt, again[begun.id].crashes) == (1, 1)  # it was lost as it ran
    assert rig.finish(a, unheard, begun) == []
    assert [told.id for told in rig.finish(a, known)] == [known.id]


def test_an_end_that_was_heard_of_before_a_restart_does_not_come_back(rig: Rig) -> None:
    a = rig.join("a")
    ended, waits = rig.submit(*rig.tasks(2))
    first, second = rig.claim(a, 2)
    rig.finish(a, first)
    rig.finish(a, second, kind="failed", retry_ns=SECOND_NS)
    rig.restart([])
    assert rig.engine.rejoin(a, [Held(ended, first.claim), Held(waits, second.claim)]) == [
        ended,
        waits,
    ]
    rig.pass_time(2)
    rig.engine.tick()
    assert rig.claim_one(a).attempt == 2


# -- other pools ------------------------------------------------------------------------------


def test_a_node_declares_other_pools_within_its_tenure(rig: Rig) -> None:
    a = rig.join("a", pool(tasks=["extract"], queue_size=5))
    rig.submit(rig.task("extract"))
    grant = rig.claim_one(a)
    card = NodeCard(
        "id-a", "a", 30 * SECOND_NS, "0.2", (pool(tasks=["fetch"], queue_size=50), pool("q"))
    )
    rig.engine.redeclare(a, card)
    [view] = rig.engine.nodes()
    assert (view.tenure, view.claims, view.software, view.pools) == (a, 1, "0.2", card.pools)
    [gone] = rig.engine.submit([rig.task("extract")])
    assert gone.rejection is not None
    assert gone.rejection.code == UNKNOWN_TASK
    rig.submit(*rig.tasks(10, method="fetch"), *rig.tasks(2, pool="q"))
    assert len(rig.engine.claim(a, [want(20, tasks=["fetch"]), want(20, "q")])) == 12
    assert [told.state for told in rig.finish(a, grant)] == [SUCCEEDED]
    with pytest.raises(Fenced):
        rig.engine.redeclare(999, card)


def test_a_redeclaration_keeps_the_life_of_a_node(rig: Rig) -> None:
    a, b = rig.join("a", lease=10), rig.join("b")
    rig.engine.drain("a", draining=True)
    rig.pass_time(6)
    rig.engine.redeclare(a, NodeCard("id-a", "a", 10 * SECOND_NS, "", (pool(),)))
    rig.pass_time(6)
    rig.engine.beat(b)
    assert [each.draining for each in rig.engine.nodes()] == [True, False]
    assert [each.name for each in rig.engine.reap()] == ["a"]  # it is no heartbeat


# -- many ends --------------------------------------------------------------------------------


def test_ends_are_told_in_portions_and_each_once(rig: Rig) -> None:
    a = rig.join("a")
    after = rig.engine.ended(0).after
    ids = rig.submit(*rig.tasks(23), waiter=7)
    heard: list[str] = []
    for _ in range(3):
        grants = rig.claim(a, 8)
        for grant in grants:
            rig.finish(a, grant)
        ended = rig.engine.ended(7, after, limit=5)
        assert len(ended.ids) <= 5
        heard += ended.ids
        after = ended.after
    while True:
        ended = rig.engine.ended(7, after, limit=5)
        heard += ended.ids
        after = ended.after
        if not ended.more:
            break
    assert sorted(heard) == sorted(ids)
    assert rig.engine.ended(7, after) == Ended((), rig.engine.ended(0).after)


# -- code that differs ------------------------------------------------------------------------


def test_a_task_that_no_node_has_any_more_waits(rig: Rig) -> None:
    a = rig.join("a")
    fetch, extract = rig.submit(rig.task("fetch"), rig.task("extract"))
    rig.engine.redeclare(a, NodeCard("id-a", "a", 30 * SECOND_NS, "", (pool(tasks=["extract"]),)))
    assert [grant.id for grant in rig.engine.claim(a, [want(5, tasks=["extract"])])] == [extract]
    assert [grant.id for grant in rig.engine.claim(rig.join("b"), [want(5)])] == [fetch]


@pytest.mark.parametrize("target", ["", "narrow"])
def test_a_task_far_behind_those_that_a_node_lacks_is_found(rig: Rig, target: str) -> None:
    rig.apply(ClusterPolicy(targets={"narrow": TargetPolicy(max_concurrent=5)}))
    a, b = rig.join("a"), rig.join("b", pool(tasks=["extract"]))
    lacks = rig.submit(*rig.tasks(150, method="fetch", target=target))
    wanted = rig.submit(*rig.tasks(4, target=target), rig.task(target=target, priority=LOW))
    more = rig.submit(*rig.tasks(70, method="fetch", target=target), rig.task(target=target))
    names = want(3, tasks=["extract"])
    first = rig.engine.claim(b, [names])
    assert [grant.id for grant in first] == wanted[:3]
    second = rig.engine.claim(b, [structs.replace(names, count=2)])
    assert [grant.id for grant in second] == [wanted[3], more[-1]]
    rig.finish(b, *first, *second)
    assert [grant.id for grant in rig.engine.claim(b, [names])] == [wanted[4]]
    assert [grant.id for grant in rig.claim(a, 4)] == lacks[:4]


def test_lanes_without_anything_for_a_node_hold_it_up_nowhere(rig: Rig) -> None:
    rig.join("a")
    b = rig.join("b", pool(tasks=["extract"]))
    rig.submit(*[rig.task("fetch", target=f"s{n}") for n in range(100)])
    ids = rig.submit(*[rig.task(target=f"s{n}") for n in (3, 70, 99)])
    granted = rig.engine.claim(b, [want(10, tasks=["extract"])])
    assert sorted(grant.id for grant in granted) == ids
    rig.finish(b, *granted, kind="untouched")
    rig.engine.tick()
    assert len(rig.engine.claim(b, [want(10, tasks=["extract"])])) == 3
