"""Declarations of @task that a submit leaves out: sites, keys, and ages of results."""

from typing import Any

import msgspec
import pytest
from msgspec import structs

from musterd.ipc.client.taskspec import make_spec
from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.secrets.reference import Secret
from musterd.ipc.wire.messages import (
    ARGUMENTS_MAX,
    AS_CONFIGURED,
    NEVER_NS,
    Arguments,
    TaskDeclaration,
    TaskSpec,
)
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import CachePolicy, PoolPolicy
from musterd.supervisor.core.model.task import same_task
from musterd.supervisor.sockets.declarations import Declarations
from musterd.workers.authoring.base import Worker, task, task_options
from musterd.workers.runtime.handlers import make_handler
from support.core import Muster


def filled(spec: TaskSpec, **declared: Any) -> TaskSpec:
    declarations = Declarations()
    declarations.declare("p", [TaskDeclaration("x", **declared)])
    (found,) = declarations.fill_in([spec])
    return found


# -- in the shell -----------------------------------------------------------------------------


def test_a_submit_that_says_nothing_asks_as_its_task_declares() -> None:
    spec = filled(make_spec("p.x", {"b": 1, "a": 2}), cache_ns=5, debounce_ns=AS_CONFIGURED)
    assert (spec.cache_ns, spec.debounce_ns) == (AS_CONFIGURED, AS_CONFIGURED)
    for args in ({"b": 1, "a": 2}, {"a": 2, "b": 1}):
        same = filled(make_spec("p.x", args), cache_ns=5)
        assert same.key == spec.key == make_spec("p.x", args, cache=True).key


def test_what_the_submit_says_stays() -> None:
    asked = make_spec("p.x", {"a": 1}, key="mine", cache=30)
    spec = filled(asked, cache_ns=5, debounce_ns=7)
    assert (spec.key, spec.cache_ns) == ("mine", 30 * SECOND_NS)
    assert filled(make_spec("p.y"), cache_ns=5).key == ""


def test_a_submit_that_wants_a_run_gets_no_key() -> None:
    spec = filled(make_spec("p.x", {"a": 1}, cache=False), cache_ns=5)
    assert (spec.key, spec.cache_ns) == ("", NEVER_NS)


def test_secrets_make_the_same_key_here_and_there() -> None:
    args = {"password": Secret("SHOP"), "a": 1}
    assert filled(make_spec("p.x", args), cache_ns=5).key == make_spec("p.x", args, cache=1).key


@pytest.mark.parametrize("args", [b"", b"\xc1", b"\x81\xa1", b"\x81\x81\x01\x02\x03"])
def test_arguments_that_cannot_be_read_are_left_to_the_worker(args: bytes) -> None:
    spec = TaskSpec("a", "p.x", args)
    assert filled(spec, cache_ns=5) == spec


def test_a_pool_that_declares_anew_forgets_what_it_declared() -> None:
    declarations = Declarations()
    declarations.declare("p", [TaskDeclaration("x", cache_ns=5)])
    declarations.declare("q", [TaskDeclaration("x", cache_ns=5)])
    declarations.declare("p", [TaskDeclaration("x")])
    p, q = declarations.fill_in([make_spec("p.x"), make_spec("q.x")])
    assert (p.cache_ns, q.cache_ns) == (0, AS_CONFIGURED)


# -- the same task, sent twice ------------------------------------------------------------------


def test_a_submit_that_is_repeated_is_the_same_task_whatever_was_known_at_the_first() -> None:
    sent = make_spec("p.x", {"url": "https://site.example/a"})
    once = filled(sent, target="url", cache_ns=5)
    assert once != sent
    assert same_task(sent, once)
    assert same_task(once, sent)
    assert same_task(once, filled(sent, target="url"))
    assert not same_task(once, structs.replace(once, target="elsewhere"))
    assert not same_task(once, structs.replace(once, args=b"\x80"))
    assert not same_task(sent, structs.replace(sent, priority=0))


def test_a_task_sent_again_after_its_class_was_loaded_is_not_refused(muster: type[Muster]) -> None:
    m = muster(1)
    m.start()
    sent = make_spec("p.x", {"url": "https://site.example/a"})
    m.submit(sent)
    m.submit(filled(sent, target="url"), resend=True)
    asked = [filled(sent, target="url")]
    answer = m.tell(
        events.ResendChecked(events.TasksSubmitted(b"peer", 9, asked, 10**18, True), frozenset())
    )
    assert [each.rejected for each in answer if isinstance(each, actions.Acknowledge)] == [[]]


# -- which age holds --------------------------------------------------------------------------


class Ages:
    """A fleet with one result of the key `k`, made now."""

    def __init__(self, muster: type[Muster], *, declared_ns: int = 0, **cache: Any) -> None:
        pool = {"cache_ns": 40 * SECOND_NS, "debounce_ns": 4 * SECOND_NS}
        self.m = muster(1, max_retries=0, **pool)
        self.m.policy = structs.replace(self.m.policy, cache=CachePolicy(**cache))
        self.m.fleet = type(self.m.fleet)(self.m.policy, self.m.fleet._state.rng)
        self.m.start()
        declared = TaskDeclaration("x", cache_ns=declared_ns, debounce_ns=declared_ns)
        self.m.fleet.pools["p"].declare((declared,))
        lease = self.lease(TaskSpec("first", "p.x", b"", key="k"))
        assert lease is not None
        self.m.complete(1, lease)

    def lease(self, spec: TaskSpec) -> int | None:
        """Submit a task; return its lease, or None if the task need not run."""
        answer = self.m.submit(spec)
        leases = [each.leases for each in answer if isinstance(each, actions.AssignLeases)]
        return leases[0][0].lease if leases else None

    def answers(self, seconds: float, **asked: int) -> bool:
        """Tell whether a submit so many seconds after the result is answered with that result."""
        self.m.wait(int(seconds * SECOND_NS))
        return self.lease(TaskSpec("second", "p.x", b"", key="k", **asked)) is None


@pytest.mark.parametrize(
    ("declared_ns", "asked", "seconds", "answered"),
    [
        (0, {"cache_ns": AS_CONFIGURED}, 39, True),
        (0, {"cache_ns": AS_CONFIGURED}, 41, False),
        (AS_CONFIGURED, {"cache_ns": AS_CONFIGURED}, 39, True),
        (50 * SECOND_NS, {"cache_ns": AS_CONFIGURED}, 49, True),
        (50 * SECOND_NS, {"cache_ns": AS_CONFIGURED}, 51, False),
        (50 * SECOND_NS, {"cache_ns": 60 * SECOND_NS}, 59, True),
        (50 * SECOND_NS, {"cache_ns": NEVER_NS}, 1, False),
        (0, {"debounce_ns": AS_CONFIGURED}, 3, True),
        (0, {"debounce_ns": AS_CONFIGURED}, 5, False),
        (50 * SECOND_NS, {"debounce_ns": AS_CONFIGURED}, 49, True),
        (0, {}, 1, False),
    ],
)
def test_the_submit_then_the_task_then_the_pool_says_how_old(
    muster: type[Muster], declared_ns: int, asked: dict[str, int], seconds: float, answered: bool
) -> None:
    assert Ages(muster, declared_ns=declared_ns).answers(seconds, **asked) is answered


def test_debounce_can_be_switched_off_alone(muster: type[Muster]) -> None:
    debounce = {"debounce_ns": AS_CONFIGURED}
    assert not Ages(muster, debounce=False).answers(1, **debounce)
    assert Ages(muster, debounce=False).answers(1, cache_ns=AS_CONFIGURED)
    assert not Ages(muster, enabled=False).answers(1, cache_ns=AS_CONFIGURED)


def test_the_usual_ages_are_those_that_were_promised() -> None:
    pool = PoolPolicy("p", 1)
    assert (pool.cache_ns, pool.debounce_ns) == (30 * SECOND_NS, SECOND_NS // 2)


# -- what @task takes -------------------------------------------------------------------------


def test_a_task_says_how_old_in_seconds_a_timedelta_or_as_configured() -> None:
    from datetime import timedelta

    @task(cache=1.5, debounce=timedelta(milliseconds=20), timeout=timedelta(minutes=1))
    def one(ctx: Any) -> None: ...

    @task(cache=True, debounce=False)
    def other(ctx: Any) -> None: ...

    found = task_options(one)
    assert found is not None
    assert (found.cache_ns, found.debounce_ns) == (1_500_000_000, 20_000_000)
    assert found.timeout_ns == 60 * SECOND_NS
    found = task_options(other)
    assert found is not None
    assert (found.cache_ns, found.debounce_ns) == (AS_CONFIGURED, 0)


@pytest.mark.parametrize("age", [0, -1, float("nan"), "30"])
def test_an_age_that_is_none_is_refused_by_name(age: Any) -> None:
    with pytest.raises(ValueError, match=r"@task\(cache="):
        task(cache=age)


def test_a_declaration_fits_on_the_wire() -> None:
    encoded = msgspec.msgpack.encode(TaskDeclaration("x", cache_ns=AS_CONFIGURED))
    assert msgspec.msgpack.decode(encoded, type=TaskDeclaration).cache_ns == AS_CONFIGURED


def test_the_daemon_is_told_all_that_a_task_declares() -> None:
    class Shop(Worker):
        @task(
            cache=1.5,
            debounce=True,
            fallback_on="failure",
            target="url",
            timeout=2,
            max_retries=4,
        )
        def price(self, ctx: Any, url: str) -> None: ...

    options = task_options(Shop.price)
    assert options is not None
    handler = make_handler("price", Shop.price, options, bound=True)
    assert handler.declaration == TaskDeclaration(
        "price",
        timeout_ns=2 * SECOND_NS,
        max_retries=4,
        target="url",
        fallback_on="failure",
        cache_ns=1_500_000_000,
        debounce_ns=AS_CONFIGURED,
        place=f"{__name__}:{Shop.price.__qualname__}",
        arguments=Arguments(("url",), ("url",)),
    )


@pytest.mark.parametrize("names", [[f"a{n}" for n in range(ARGUMENTS_MAX + 1)], ["a" * 201]])
def test_a_task_with_too_many_arguments_does_not_say_which(names: list[str]) -> None:
    found: dict[str, Any] = {"task": task}
    exec(f"@task\ndef wide(ctx, {', '.join(names)}): ...", found)
    options = task_options(found["wide"])
    assert options is not None
    declared = make_handler("wide", found["wide"], options, bound=False).declaration
    assert declared.arguments is None
    encoded = msgspec.msgpack.encode(declared)
    assert msgspec.msgpack.decode(encoded, type=TaskDeclaration) == declared


def test_a_fallback_of_a_task_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"@task\(fallback_on='ever'\): give \"open\" or"):
        task(fallback_on="ever")  # type: ignore[call-overload]
