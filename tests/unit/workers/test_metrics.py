"""ctx.metrics: counted in the worker, added up for the pool, always bounded."""

import threading
from typing import Any

import pytest

from musterd.ipc.wire.messages import (
    CANCEL,
    CRASH,
    SAMPLE_CHARS_MAX,
    SAMPLES_MAX,
    Completion,
    Failure,
    Sample,
    TaskSpec,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.counters import FAILURE_KINDS_MAX, OTHER, SERIES_MAX, Tally
from musterd.workers.authoring.base import Context
from musterd.workers.metrics import PENDING_MAX, Metrics, metrics
from support.core import Muster

# -- in the worker ------------------------------------------------------------------------------


def test_what_was_counted_is_told_once_and_added_up() -> None:
    mine = Metrics()
    mine.counter("found").inc()
    mine.counter("found").inc(2)
    mine.counter("pages", site="a").inc()
    mine.gauge("tabs").set(5)
    mine.gauge("tabs").set(3)
    assert mine.take() == [
        Sample("found", {}, 3),
        Sample("pages", {"site": "a"}, 1),
        Sample("tabs", {}, 3, gauge=True),
    ]
    assert mine.take() == []


def test_a_context_has_the_metrics_of_its_process() -> None:
    assert Context("t").metrics is metrics


@pytest.mark.parametrize("name", ["", "Found", "1st", "a-b", "x" * (SAMPLE_CHARS_MAX + 1), None])
def test_a_name_that_no_metrics_page_can_show_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="a metric is named by"):
        Metrics().counter(name)


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf")])
def test_a_counter_only_grows(amount: float) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Metrics().counter("found").inc(amount)


def test_labels_are_few_and_short() -> None:
    mine = Metrics()
    with pytest.raises(ValueError, match="5 labels"):
        mine.counter("found", a=1, b=2, c=3, d=4, e=5)
    mine.counter("found", site="x" * 1000).inc()
    assert mine.take() == [Sample("found", {"site": "x" * SAMPLE_CHARS_MAX}, 1)]


def test_counting_without_end_piles_nothing_up_and_loses_nothing() -> None:
    mine = Metrics()
    for number in range(5 * PENDING_MAX):
        mine.counter("found").inc()
        mine.counter("many", number=number).inc()
    assert len(mine._pending) <= PENDING_MAX + SAMPLES_MAX
    samples = mine.take()
    assert len(samples) <= SAMPLES_MAX
    assert samples[0] == Sample("found", {}, 5 * PENDING_MAX)


def test_threads_count_together() -> None:
    mine = Metrics()

    def count() -> None:
        for _ in range(5000):
            mine.counter("found").inc()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    told = 0.0
    while any(thread.is_alive() for thread in threads):
        told += sum(sample.value for sample in mine.take())
    for thread in threads:
        thread.join()
    assert told + sum(sample.value for sample in mine.take()) == 20_000


# -- in the supervisor --------------------------------------------------------------------------


def test_a_pool_adds_up_what_its_workers_say(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.submit(TaskSpec("a", "p.x", b""), TaskSpec("b", "p.x", b""))
    for worker in (1, 2):
        samples = [Sample("found", {"site": "a"}, 2), Sample("tabs", {}, worker, gauge=True)]
        m.tell(events.LeasesCompleted(worker, [Completion(worker, 5)], samples))
    series = m.fleet.pools["p"].tally.series
    assert series["found", (("site", "a"),)].value == 4
    assert series["tabs", ()].value == 2


def test_names_without_end_are_dropped_and_counted() -> None:
    tally = Tally()
    tally.add([Sample(f"n{number}", {}, 1) for number in range(SERIES_MAX + 7)])
    tally.add([Sample("n0", {}, 1), Sample("n0", {}, 1, gauge=True)])
    assert len(tally.series) == SERIES_MAX
    assert tally.series["n0", ()].value == 2
    assert tally.dropped == 8


def test_what_is_too_long_is_dropped() -> None:
    tally = Tally()
    long = "x" * (SAMPLE_CHARS_MAX + 1)
    tally.add([Sample(long, {}, 1), Sample("a", {"b": long}, 1), Sample("a", {long: "b"}, 1)])
    assert (tally.series, tally.dropped) == ({}, 3)


def test_failed_attempts_are_counted_by_the_type_of_their_error(muster: type[Muster]) -> None:
    m = muster(max_retries=0)
    m.start()
    for number, failure in enumerate(
        (
            {"kind": "error", "type": "musterd.workers.browser.errors.PageCrashed"},
            {"kind": "error", "type": "musterd.workers.browser.errors.PageCrashed"},
            {"kind": "timeout", "type": "TaskTimeout"},
            {"kind": CANCEL, "type": "CancelledError"},
        ),
        start=1,
    ):
        m.submit(TaskSpec(f"t{number}", "p.x", b""))
        (lease,) = m.slots[0].leases
        m.fail(1, lease, **failure)
        m.wait(10**9)
    for task in list(m.fleet.tasks):
        m.tell(events.CancelRequested([task]))
    assert m.fleet.pools["p"].tally.failures == {"PageCrashed": 2, "TaskTimeout": 1}


def test_a_crash_of_a_worker_is_a_failure_of_its_task(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    m.exit(1, next(iter(m.slots[0].leases)))
    assert m.fleet.pools["p"].tally.failures == {CRASH: 1}


def test_more_kinds_of_errors_than_can_be_shown_are_one() -> None:
    tally = Tally()
    for number in range(FAILURE_KINDS_MAX + 5):
        tally.failed(Failure("error", f"module.Error{number}"))
    assert len(tally.failures) == FAILURE_KINDS_MAX + 1
    assert tally.failures[OTHER] == 5
