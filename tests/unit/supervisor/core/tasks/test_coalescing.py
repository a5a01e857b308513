"""Tasks that share a key: joining, debounce, cache, last good results."""

from random import Random
from typing import Any

import msgspec
import pytest

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.keys import derived_key
from musterd.ipc.wire.messages import (
    CRITICAL,
    HIGH,
    KEY_LENGTH_MAX,
    LOW,
    Completion,
    Outcome,
    Rejection,
    TaskSpec,
)
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events, ledger
from musterd.supervisor.core.model.lru import ENTRY_BYTES, Lru
from musterd.supervisor.core.model.policy import CachePolicy
from musterd.supervisor.core.tasks import coalescing
from support.core import Muster, of

PEER = b"client"


def spec(id_: str = "a", name: str = "p.x", key: str = "k", **fields: Any) -> TaskSpec:
    return TaskSpec(id_, name, b"", key=key, **fields)


def rejections(answer: list[Any]) -> list[Rejection]:
    return [each for ack in of(actions.Acknowledge, answer) for each in ack.rejected]


def leased(answer: list[Any]) -> list[str]:
    return [lease.id for each in of(actions.AssignLeases, answer) for lease in each.leases]


def outcomes(answer: list[Any]) -> dict[str, Outcome]:
    told = [one for each in of(actions.Deliver, answer) for one in each.outcomes]
    assert len({one.id for one in told}) == len(told)
    return {one.id: one for one in told}


def facts(answer: list[Any]) -> list[actions.Fact]:
    return [fact for page in of(actions.Persist, answer) for fact in page.facts]


def complete(m: Any, lease: int, value: bytes) -> list[Any]:
    done = [Completion(lease, MILLISECOND_NS, value)]
    return m.tell(events.LeasesCompleted(1, done))  # type: ignore[no-any-return]


def with_cache(m: Any, **fields: Any) -> Any:
    m.policy = msgspec.structs.replace(m.policy, cache=CachePolicy(**fields))
    m.fleet = Fleet(m.policy, Random(1))
    return m


def recovered(seq: int, task: TaskSpec, **fields: Any) -> events.Recovered:
    plain = events.Recovered(seq, task, 0, 0, 0, 0, 0, 0, begun=False)
    return msgspec.structs.replace(plain, **fields)


# -- joining ----------------------------------------------------------------------------------


def test_a_second_submit_of_a_key_does_not_run_and_ends_as_the_first(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    assert leased(m.submit(spec("a"))) == ["a"]
    answer = m.submit(spec("b"))
    assert leased(answer) == []
    assert [new.spec.id for page in of(actions.Persist, answer) for new in page.added] == ["b"]
    assert of(actions.Acknowledge, answer) == [actions.Acknowledge(PEER, 2, [])]
    answer = m.complete(1, 1)
    (page,) = of(actions.Persist, answer)
    assert [final.spec.id for final in page.finished] == ["a", "b"]  # in one transaction
    told = outcomes(answer)
    assert told["a"] == Outcome("a", "succeeded", b"value", None, 1, MILLISECOND_NS)
    assert told["b"] == msgspec.structs.replace(told["a"], id="b", cached=True)
    assert m.fleet.tasks == {}
    assert (m.fleet.pools["p"].live, m.fleet.pools["p"].waiting) == (0, 0)


def test_what_joined_fails_with_the_first(muster: type[Muster]) -> None:
    m = muster(max_retries=0)
    m.start()
    m.submit(spec("a"), spec("b"))
    told = outcomes(m.fail(1, 1, message="no"))
    assert told["b"].state == "failed"
    assert told["b"].failure == told["a"].failure is not None


def test_a_retry_of_the_first_keeps_the_others_waiting(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"), spec("b"))
    assert outcomes(m.fail(1, 1)) == {}
    assert leased(m.wait(SECOND_NS)) == ["a"]
    assert list(outcomes(m.complete(1, 2))) == ["a", "b"]


def test_keys_that_differ_and_no_key_at_all_run_side_by_side(muster: type[Muster]) -> None:
    m = muster(size=4)
    m.start()
    answer = m.submit(spec("a", key="k"), spec("b", key="l"), spec("c", key=""), spec("d", key=""))
    assert leased(answer) == ["a", "b", "c", "d"]


def test_a_key_is_free_again_when_its_task_has_ended(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"))
    m.complete(1, 1)
    assert leased(m.submit(spec("b"))) == ["b"]


def test_a_living_key_cannot_be_used_by_another_kind_of_task(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"))
    (refused,) = rejections(m.submit(spec("b", name="p.y")))
    assert refused.code == "InvalidTask"
    assert "key 'k' is in use by task 'a' (p.x)" in refused.message
    m.complete(1, 1)
    assert leased(m.submit(spec("c", name="p.y"))) == ["c"]


def test_a_result_that_comes_before_the_second_is_on_disk_is_for_it_too(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"))
    m.disk_works = False
    m.submit(spec("b"))
    m.complete(1, 1)
    answer = m.commit()
    assert [type(each) for each in answer] == [actions.Acknowledge, actions.Deliver]
    assert list(outcomes(answer)) == ["a", "b"]


@pytest.mark.parametrize("how", ["queued", "running", "new", "waiting"])
def test_when_the_first_is_cancelled_the_next_takes_its_place(
    muster: type[Muster], how: str
) -> None:
    m = muster()
    if how == "running":
        m.start()
    m.disk_works = how != "new"
    first = spec("a", delay_ns=SECOND_NS if how == "waiting" else 0)
    m.submit(first)
    m.submit(spec("b"), spec("c"))
    answer = m.tell(events.CancelRequested(["a"]))
    if how == "running":
        answer += m.fail(1, 1, "cancel")
    if how == "new":
        m.disk_works = True
        answer += m.commit()
    assert {one.id: one.state for one in outcomes(answer).values()} == {"a": "cancelled"}
    if how != "running":
        answer += m.start()
    assert leased(answer) == ["b"]
    assert m.fleet.tasks["c"].follows == "b"
    assert list(outcomes(m.complete(1, 2 if how == "running" else 1))) == ["b", "c"]


def test_when_the_first_expires_the_next_takes_its_place(muster: type[Muster]) -> None:
    m = muster()
    m.submit(spec("a", expires_ns=SECOND_NS))
    m.submit(spec("b"))
    assert outcomes(m.wait(SECOND_NS))["a"].state == "expired"
    assert leased(m.start()) == ["b"]


def test_the_next_in_line_keeps_its_own_delay(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("busy", key=""))
    m.submit(spec("a"))
    m.submit(spec("b", delay_ns=5 * SECOND_NS))
    m.tell(events.CancelRequested(["a"]))
    assert leased(m.complete(1, 1)) == []
    assert leased(m.wait(5 * SECOND_NS)) == ["b"]


def test_one_that_joined_is_cancelled_or_expires_alone(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"), spec("b"), spec("c", expires_ns=SECOND_NS), spec("d"))
    assert {one.state for one in outcomes(m.tell(events.CancelRequested(["b"]))).values()} == {
        "cancelled"
    }
    assert outcomes(m.wait(SECOND_NS))["c"].state == "expired"
    assert list(outcomes(m.complete(1, 1))) == ["a", "d"]


def test_joined_tasks_count_against_the_queue(muster: type[Muster]) -> None:
    m = muster(queue_size=10)
    m.start()
    m.submit(spec("first"))
    answer = m.submit(*[spec(f"t{number}") for number in range(11)])
    assert [each.code for each in rejections(answer)] == ["QueueFull"]  # 1 runs, 10 wait
    assert m.fleet.pools["p"].held == 10
    assert m.fleet.pools["p"].waiting == 10


def test_no_more_than_so_many_wait_for_one_result(
    muster: type[Muster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalescing, "JOINED_MAX", 2)
    m = muster()
    m.start()
    (refused,) = rejections(m.submit(*[spec(f"t{number}") for number in range(4)]))
    assert (refused.id, refused.code) == ("t3", "QueueFull")
    assert refused.retry_after_ns > 0
    assert "key 'k'" in refused.message


def test_the_urgent_is_not_held_up_by_the_task_it_joins(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("busy", key=""))
    m.submit(spec("low", priority=LOW))
    m.submit(spec("high", key="", priority=HIGH))
    m.submit(spec("urgent", priority=CRITICAL))
    assert m.fleet.pools["p"].queue.levels[LOW].size == 0
    assert leased(m.complete(1, 1, run_ns=SECOND_NS)) == ["low"]
    assert list(outcomes(m.complete(1, 2))) == ["low", "urgent"]


def test_the_next_in_line_is_as_urgent_as_those_behind_it(muster: type[Muster]) -> None:
    m = muster()
    m.submit(spec("a", priority=LOW))
    m.submit(spec("b", priority=LOW), spec("c", priority=CRITICAL))
    m.submit(spec("high", key="", priority=HIGH))
    m.tell(events.CancelRequested(["a"]))
    assert leased(m.start()) == ["b"]


def test_a_hastened_task_is_queued_once(muster: type[Muster]) -> None:
    m = muster()
    m.submit(spec("a", priority=LOW), spec("b", priority=HIGH), spec("c", priority=CRITICAL))
    m.submit(spec("other", key="", priority=LOW))
    assert [level.size for level in m.fleet.pools["p"].queue.levels] == [1, 0, 0, 1]
    assert leased(m.start()) == ["a"]
    assert leased(m.complete(1, 1)) == ["other"]
    assert leased(m.complete(1, 2)) == []


def test_a_large_result_for_many_is_written_in_several_pages(
    muster: type[Muster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "PAGE_BYTES_MAX", 25)
    m = muster()
    m.start()
    m.submit(*[spec(f"t{number}") for number in range(8)])
    m.disk_works = False
    answer = complete(m, 1, b"x" * 10)
    assert [len(page.finished) for page in of(actions.Persist, answer)] == [3, 3, 2]
    assert len(outcomes(m.commit())) == 8


# -- over a restart ---------------------------------------------------------------------------


def test_those_that_joined_join_again_after_a_restart(muster: type[Muster]) -> None:
    m = muster(size=2)
    rows = [recovered(1, spec("a"), begun=True, attempt=1), recovered(2, spec("b", priority=HIGH))]
    m.tell(events.TasksRecovered(rows))
    assert m.fleet.tasks["a"].priority == HIGH
    assert leased(m.start()) == ["a"]
    assert list(outcomes(m.submit(spec("c")))) == []
    m.tell(events.TasksWatched(PEER, ["a", "b"]))
    assert list(outcomes(m.complete(1, 1))) == ["a", "b", "c"]


def test_a_task_quarantined_at_the_start_takes_those_that_joined_it_along(
    muster: type[Muster],
) -> None:
    m = muster()
    rows = [
        recovered(1, spec("a"), begun=True, attempt=1, crashes=2),
        recovered(2, spec("b")),
    ]
    (page,) = of(actions.Persist, m.tell(events.TasksRecovered(rows)))
    assert [(final.spec.id, final.outcome.state) for final in page.finished] == [
        ("a", "failed"),
        ("b", "failed"),
    ]
    assert leased(m.start()) == []


def test_a_task_that_expired_during_the_restart_is_replaced_by_the_next(
    muster: type[Muster],
) -> None:
    m = muster()
    rows = [recovered(1, spec("a"), expires_at_ns=m.now_ns), recovered(2, spec("b"))]
    m.tell(events.TasksRecovered(rows))
    assert leased(m.start()) == ["b"]


# -- debounce ---------------------------------------------------------------------------------

HALF_NS = SECOND_NS // 2


def test_a_submit_soon_after_the_first_gets_its_result_at_once(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"))
    m.complete(1, 1)
    m.wait(HALF_NS - 1)
    answer = m.submit(spec("b", debounce_ns=HALF_NS))
    assert leased(answer) == []
    (page,) = of(actions.Persist, answer)
    assert [new.spec.id for new in page.added] == [final.spec.id for final in page.finished]
    assert outcomes(answer)["b"].value == b"value"
    assert outcomes(answer)["b"].cached
    m.wait(1)  # the window is over: it began with the first submit, not with the second
    assert leased(m.submit(spec("c", debounce_ns=HALF_NS))) == ["c"]


def test_the_window_counts_from_the_submit_not_from_the_result(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"))
    m.wait(HALF_NS)
    m.complete(1, 1)
    assert leased(m.submit(spec("b", debounce_ns=HALF_NS))) == ["b"]


def test_a_failure_is_debounced_too(muster: type[Muster]) -> None:
    m = muster(max_retries=0)
    m.start()
    m.submit(spec("a"))
    m.fail(1, 1, message="no")
    told = outcomes(m.submit(spec("b", debounce_ns=HALF_NS)))["b"]
    assert (told.state, told.cached) == ("failed", True)


def test_a_cancelled_task_has_no_result_to_debounce_with(muster: type[Muster]) -> None:
    m = muster()
    m.submit(spec("a"))
    m.tell(events.CancelRequested(["a"]))
    m.submit(spec("b", debounce_ns=HALF_NS))
    assert leased(m.start()) == ["b"]


# -- cache ------------------------------------------------------------------------------------


def cached(m: Any, id_: str = "b", **fields: Any) -> Outcome | None:
    """Submit with a cache; return the outcome that is told at once, None if there is none."""
    m.disk_works = True
    fields = {"cache_ns": 10 * SECOND_NS, **fields}
    return outcomes(m.submit(spec(id_, **fields))).get(id_)


def test_a_result_young_enough_is_the_answer(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"))
    m.wait(5 * SECOND_NS)  # the task runs so long, but only the age of its result counts
    m.complete(1, 1)
    m.wait(10 * SECOND_NS - 1)
    answer = cached(m)
    assert answer == Outcome("b", "succeeded", b"value", None, 1, MILLISECOND_NS, cached=True)
    m.wait(1)
    assert cached(m, "c") is None
    assert m.fleet.tasks["c"].lease


def test_each_submit_says_itself_how_old_is_too_old(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.submit(spec("a"))
    m.complete(1, 1)
    m.wait(5 * SECOND_NS)
    assert cached(m, "b", cache_ns=4 * SECOND_NS) is None
    assert cached(m, "c", cache_ns=6 * SECOND_NS) is not None  # also while b runs


def test_failures_are_not_cached_and_do_not_hide_a_good_result(muster: type[Muster]) -> None:
    m = muster(max_retries=0)
    m.start()
    m.submit(spec("bad", key="other"))
    m.fail(1, 1)
    assert cached(m, "b", key="other") is None
    m.complete(1, 2)
    m.submit(spec("bad2", key="other"))
    m.fail(1, 3)
    answer = cached(m, "c", key="other")
    assert answer is not None
    assert answer.state == "succeeded"


def test_a_cached_answer_needs_no_room_in_the_queue(muster: type[Muster]) -> None:
    m = muster(queue_size=1)
    m.start()
    m.submit(spec("a", priority=CRITICAL))
    m.complete(1, 1, run_ns=SECOND_NS)
    m.submit(spec("busy", key="", priority=CRITICAL))
    m.submit(spec("waits", key="", priority=CRITICAL))
    assert [each.code for each in rejections(m.submit(spec("full", key="")))] == ["QueueFull"]
    assert cached(m) is not None


def test_nothing_is_answered_from_the_cache_during_a_shutdown(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"))
    m.complete(1, 1)
    m.submit(spec("busy", key=""))
    m.tell(events.ShutdownRequested("test"))
    answer = m.submit(spec("b", cache_ns=SECOND_NS))
    assert [each.code for each in rejections(answer)] == ["ShuttingDown"]


def test_the_result_of_another_kind_of_task_is_no_answer(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"))
    m.complete(1, 1)
    assert cached(m, "b", name="p.y") is None


@pytest.mark.parametrize(
    ("key", "prefix", "gone"),
    [
        ("promo:1", False, True),
        ("promo:", True, True),
        ("", True, True),
        ("promo:", False, False),
        ("promo:2", True, False),
    ],
)
def test_an_invalidated_result_is_forgotten(
    muster: type[Muster], key: str, prefix: bool, gone: bool
) -> None:
    m = muster()
    m.start()
    m.submit(spec("a", key="promo:1"))
    m.complete(1, 1)
    assert m.tell(events.InvalidateRequested(key, prefix)) == []
    assert (cached(m, key="promo:1") is None) == gone


def test_a_result_that_began_before_the_invalidation_is_not_remembered(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"), spec("b"))
    m.tell(events.InvalidateRequested("k"))
    assert list(outcomes(m.complete(1, 1))) == ["a", "b"]
    assert cached(m, "c") is None


def test_the_cache_is_bounded_by_entries_the_longest_unused_goes_first(
    muster: type[Muster],
) -> None:
    m = with_cache(muster(), entries=2)
    m.start()
    for number, key in enumerate(("one", "two"), 1):
        m.submit(spec(key, key=key))
        m.complete(1, number)
    assert cached(m, "again", key="one") is not None
    m.submit(spec("three", key="three"))
    m.complete(1, 3)
    assert cached(m, "b", key="one") is not None
    assert cached(m, "c", key="three") is not None
    assert cached(m, "d", key="two") is None


def test_the_cache_is_bounded_by_bytes() -> None:
    gone: list[str] = []
    lru: Lru[int] = Lru(100, 3 * (ENTRY_BYTES + 11), gone.append)
    for number in range(4):
        assert lru.put(str(number), number, 10)
    assert (lru.names(), gone) == (["1", "2", "3"], ["0"])
    assert not lru.put("1", 0, 10_000)  # too large, and the old value is out of date
    assert lru.get("1") is None
    assert lru.bytes == 2 * (ENTRY_BYTES + 11)
    lru.drop("2")
    lru.drop("3")
    assert (len(lru), lru.bytes) == (0, 0)


def test_switched_off_nothing_is_remembered_but_keys_still_coalesce(muster: type[Muster]) -> None:
    m = with_cache(muster(), enabled=False)
    m.start()
    m.submit(spec("a"))
    assert leased(m.submit(spec("b", cache_ns=SECOND_NS))) == []
    m.complete(1, 1)
    assert cached(m, "c") is None
    m.complete(1, 2)
    assert leased(m.submit(spec("d", debounce_ns=SECOND_NS))) == ["d"]


# -- last good results ------------------------------------------------------------------------


def good(m: Any, task: TaskSpec) -> bytes | None:
    return m.fleet._coalescing.good(task)  # type: ignore[no-any-return]


def test_the_last_good_result_is_known_beyond_every_age(muster: type[Muster]) -> None:
    m = muster(max_retries=0)
    m.start()
    assert good(m, spec()) is None
    m.submit(spec("a"))
    complete(m, 1, b"first")
    m.submit(spec("b"))
    complete(m, 2, b"second")
    m.submit(spec("c"))
    m.fail(1, 3)
    m.wait(1_000_000 * SECOND_NS)
    assert good(m, spec("d")) == b"second"
    assert good(m, spec("d", name="p.y")) is None


def test_those_that_want_a_fallback_are_kept_over_a_restart(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("plain", key="plain"))
    assert facts(m.complete(1, 1)) == []
    m.submit(spec("a", fallback=b"default"))
    kept = facts(m.complete(1, 2))
    assert kept == [actions.Fact("good", "p.x k", b"value", 7 * 86400 * SECOND_NS)]
    m.submit(spec("b", key="l", on_open="fallback"))
    kept += facts(m.complete(1, 3))
    m.fleet = Fleet(m.policy, Random(1))
    assert "good" in m.fleet.fact_kinds
    m.tell(events.FactsRecovered("good", [(fact.key, fact.value) for fact in kept]))
    assert good(m, spec(key="k")) == b"value"
    assert good(m, spec(key="l")) == b"value"
    assert good(m, spec(key="plain")) is None


def test_without_a_key_name_and_arguments_are_the_key(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    task = spec("a", key="", fallback=b"default")
    m.submit(task)
    (fact,) = facts(m.complete(1, 1))
    assert fact.key == f"p.x {derived_key('p.x', b'')}"
    assert good(m, msgspec.structs.replace(task, id="b")) == b"value"
    assert good(m, msgspec.structs.replace(task, id="b", args=b"others")) is None


def test_a_fallback_is_no_good_result(muster: type[Muster]) -> None:
    m = muster()
    for number, (state, value) in enumerate((("succeeded", b"default"), ("failed", b""))):
        m.submit(spec(f"t{number}", fallback=b"default"))
        task = m.fleet.tasks[f"t{number}"]
        task.route.pool.queue.discard(task)
        m.fleet._ledger.finish(task, state, value=value, fallback=bool(value))
        assert facts(m.tell(events.Ticked())) == []
        assert good(m, spec()) is None
        assert cached(m, f"c{number}", debounce_ns=SECOND_NS) is None
        m.tell(events.CancelRequested([f"c{number}"]))


def test_a_last_good_result_that_is_pushed_out_is_forgotten_on_disk_too(
    muster: type[Muster],
) -> None:
    m = with_cache(muster(), entries=1)
    m.start()
    m.submit(spec("a", key="k", fallback=b"default"))
    m.complete(1, 1)
    m.submit(spec("b", key="l", fallback=b"default"))
    assert [(fact.key, fact.value) for fact in facts(m.complete(1, 2))] == [
        ("p.x k", None),
        ("p.x l", b"value"),
    ]
    assert facts(m.tell(events.InvalidateRequested("l"))) == [actions.Fact("good", "p.x l", None)]


def test_a_derived_key_fits_however_long_the_name_is() -> None:
    key = derived_key("p." + "x" * 300, b"args")
    assert len(key) == KEY_LENGTH_MAX
    assert derived_key("p.x", b"args").startswith("p.x:")
    assert derived_key("p.x", b"args") != derived_key("p.x", b"other")
