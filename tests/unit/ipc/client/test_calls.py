"""Typed calls: what is refused before anything is sent, and how the pool of a handler is found."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from musterd import Call, InvalidTask, NotConnected, Secret, UnknownTask, Worker, call, task
from musterd.ipc.client.calls import FUNCTIONS_MAX, Names, made
from musterd.ipc.client.handle import are_calls, calls_of, taken_apart, understood
from musterd.ipc.client.session import Session
from musterd.ipc.client.taskspec import TASK_BYTES_MAX
from musterd.ipc.signatures import INVALID_ARGUMENTS
from musterd.ipc.wire.messages import PROTOCOL, Accepted, Rejection, Welcome
from musterd.ipc.wire.resolving import Resolved
from musterd.workers.authoring.base import task_options
from musterd.workers.runtime.handlers import make_handler

decode = msgspec.msgpack.decode
NOW = 5


@dataclass
class Offer:
    shop: str
    price: float


class Promos(Worker):
    @task
    def check(self, ctx: Any, shop: str, price: float = 1.0) -> bool: ...

    @task
    def best(self, ctx: Any, offers: list[Offer]) -> Offer | None: ...

    @task
    def log_in(
        self, ctx: Any, user: str, password: Annotated[str, Meta(min_length=8)], tries: int = 1
    ) -> bool: ...

    @task
    def loose(self, ctx: Any, *, limit: int = 1, **others: Any) -> None: ...

    @task
    def stream(self, ctx: Any) -> Iterator[int]:
        yield 1

    def helper(self, ctx: Any) -> None: ...


@task
def double(ctx: Any, number: int) -> int: ...


def sent(made_of: Call[Any]) -> Any:
    return decode(made(made_of, "p.x", {}).spec.args)


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(InvalidTask) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# -- arguments ----------------------------------------------------------------------------------


def test_arguments_are_sent_by_their_names_and_defaults_are_not_sent() -> None:
    assert sent(call(Promos.check, shop="aurora")) == {"shop": "aurora"}
    assert sent(call(Promos.check, "aurora", 14.9)) == {"shop": "aurora", "price": 14.9}
    assert sent(call(double, 2)) == {"number": 2}
    assert sent(call(Promos.best, [Offer("a", 1)])) == {"offers": [{"shop": "a", "price": 1}]}
    assert sent(call(Promos.loose, other=[1])) == {"other": [1]}


def test_what_is_wrong_is_said_with_the_place_and_the_signature() -> None:
    where = f"{__name__}:Promos.check: the arguments do not fit check(shop, price=...)"
    assert refusal(Promos.check) == f"{where}: the argument 'shop' is missing"
    told = refusal(Promos.check, shop=1)
    assert told == f"{where}: shop must be str, not int"
    told = refusal(Promos.check, prize=1)
    assert told == f"{where}: there is no argument 'prize': did you mean 'price'?"
    told = refusal(Promos.check, "a", 1.0, 2)
    assert told == f"{where}: it takes 2 arguments without a name, not 3"
    assert "offers[0] must be dict, not int" in refusal(Promos.best, offers=[1])
    assert "of type object" in refusal(Promos.loose, other=object())
    assert "over the limit" in refusal(Promos.check, "a" * TASK_BYTES_MAX)


def test_an_option_among_the_arguments_is_shown_its_place() -> None:
    told = refusal(Promos.check, shop="a", priority="high")
    assert told.endswith("submit(call(Promos.check, ...), priority=...)")
    assert "call(double, ...), pool=...)" in refusal(double, number=1, pool="eu")
    assert sent(call(Promos.loose, priority="high")) == {"priority": "high"}


def test_what_is_no_task_is_refused() -> None:
    for wrong in (Promos.helper, Promos, print, "promos.check", None):
        assert "is no task: put @task on it" in refusal(wrong)
    assert "contains `yield`" in refusal(Promos.stream)


HANDLERS = (Promos.check, Promos.best, Promos.loose)
NAMES = ("shop", "price", "offers", "limit", "other", "self", "ctx")
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.lists(
        st.fixed_dictionaries({"shop": st.text(max_size=1), "price": st.integers(0, 9)}), max_size=2
    ),
)


@given(
    st.sampled_from(HANDLERS),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
)
def test_a_client_refuses_exactly_what_the_worker_would(
    function: Any, arguments: dict[str, Any]
) -> None:
    options = task_options(function)
    assert options is not None
    handler = make_handler(function.__name__, function, options, bound=True)
    try:
        handler.decode(msgspec.msgpack.encode(arguments))
    except INVALID_ARGUMENTS:
        assert refusal(function, **arguments)
    else:
        assert sent(call(function, **arguments)) == decode(msgspec.msgpack.encode(arguments))


def test_a_secret_stands_for_a_text_that_only_the_worker_knows() -> None:
    secret = Secret("PASSWORD")
    login = call(Promos.log_in, "me", secret)  # shorter than min_length, as far as is known here
    assert b"$secret:PASSWORD" in made(login, "p.log_in", {}).spec.args
    told = refusal(Promos.log_in, user="me", password=secret, tries="x")
    assert "tries must be int, not str" in told
    assert "the argument 'user' is missing" in refusal(Promos.log_in, password=secret)
    assert "user must be str, not int" in refusal(Promos.log_in, 3, secret)
    assert "password must be str of length >= 8" in refusal(Promos.log_in, "me", "short")


# -- options ------------------------------------------------------------------------------------


def test_options_of_the_submit_count_before_those_of_the_call() -> None:
    check = call(Promos.check, shop="a").options(key="k", priority="low", wait=True)
    spec, wait, on_done, _ = made(check, "p.check", {"priority": "high", "pool": "p"})
    assert (spec.key, spec.priority, wait, on_done) == ("k", 1, True, None)
    again = made(check.options(priority="critical"), "p.check", {})
    assert (again.spec.key, again.spec.priority) == ("k", 0)
    with pytest.raises(InvalidTask, match="no option 'prio': did you mean 'priority'"):
        made(check, "p.check", {"prio": "high"})
    with pytest.raises(InvalidTask, match="pool must be the name of a pool, not 3"):
        check.options(pool=3)  # type: ignore[call-overload]


def test_a_key_that_is_made_of_arguments_is_that_of_the_same_task_by_name() -> None:
    from musterd.ipc.client.taskspec import make_spec

    typed = made(call(Promos.check, shop="a", price=2.0), "p.check", {"cache": 5}).spec
    named = make_spec("p.check", {"price": 2.0, "shop": "a"}, cache=5)
    assert typed.key == named.key != ""
    assert msgspec.structs.replace(typed, id="", args=b"") == msgspec.structs.replace(
        named, id="", args=b""
    )


def test_a_call_shows_what_it_is() -> None:
    check = call(Promos.check, shop="aurora").options(key="k")
    assert repr(check) == f"<Call {__name__}:Promos.check shop='aurora' key='k'>"
    assert [name for name in dir(check) if not name.startswith("_")] == ["options", "place"]


# -- what the methods of a client are given -------------------------------------------------------


def test_submit_tells_handlers_calls_and_names_apart() -> None:
    unset = msgspec.UNSET
    check, args, options = understood(
        Promos.check, (unset,), {"wait": unset, "on_done": unset, "shop": "a"}
    )
    assert (check.place, args, options) == (f"{__name__}:Promos.check", None, {})
    assert understood(check, (unset,), {"wait": True}) == (check, None, {"wait": True})
    told = understood(unset, (unset,), {"name": "p.x", "args": {"a": 1}, "key": "k"})
    assert told == ("p.x", {"a": 1}, {"key": "k"})
    with pytest.raises(InvalidTask, match="give options beside a call by their names, not 'high'"):
        understood(check, ("high",), {})
    with pytest.raises(TypeError, match="takes the name of a task, a handler or a call"):
        understood(unset, (unset,), {"args": {}})
    with pytest.raises(TypeError, match="takes a name and args"):
        understood("p.x", ({}, "high"), {})


def test_arguments_of_a_handler_may_be_called_like_those_of_submit() -> None:
    @task
    def named(ctx: Any, *, wait: int, on_done: str, name: str, args: int, task: str) -> None: ...

    given = {"wait": 1, "on_done": "o", "name": "n", "args": 2, "task": "t"}
    typed, _, options = understood(named, (), given)
    assert (sent(typed), options) == (given, {})


def test_map_tells_calls_and_sets_of_arguments_apart() -> None:
    calls = [call(double, 1), call(double, 2)]
    assert are_calls(iter(calls), msgspec.UNSET)
    assert [sent(each) for each in calls_of(iter(calls), msgspec.UNSET)] == [
        {"number": 1},
        {"number": 2},
    ]
    assert are_calls(double, [{"number": 3}])
    assert [sent(each) for each in calls_of(double, [{"number": 3}])] == [{"number": 3}]
    assert not are_calls("p.x", [{}])
    assert not are_calls(msgspec.UNSET, msgspec.UNSET)
    for wrong, why in (
        ([3], "call 0 of map must be a call"),
        (3, "map takes calls, or a name or a handler"),
    ):
        with pytest.raises(InvalidTask, match=why):
            list(calls_of(wrong, msgspec.UNSET))
    with pytest.raises(InvalidTask, match="the arguments do not fit double"):
        list(calls_of(double, [{"number": "x"}]))
    with pytest.raises(InvalidTask, match="arguments must be a mapping of names to values, not 3"):
        list(calls_of(double, [3]))


def test_submit_many_takes_calls_beside_tuples() -> None:
    check = call(Promos.check, shop="a")
    apart = list(taken_apart([check, ("p.x", {}, {"wait": True})]))
    assert apart == [(check, None, False, None, {}), ("p.x", {}, True, None, {})]
    with pytest.raises(InvalidTask, match=r"request 0 of submit_many must be .* or a call\(\)"):
        list(taken_apart([Promos.check]))  # type: ignore[list-item]


# -- names of functions ---------------------------------------------------------------------------


@pytest.fixture
def session() -> Session:
    session = Session()
    session.connected(NOW)
    session.receive(NOW, Welcome(PROTOCOL, "epoch"))
    return session


def test_a_name_that_the_daemon_has_told_is_remembered(session: Session) -> None:
    names, check = Names(session), call(Promos.check, shop="a")
    assert names.find(check, None) == ""
    assert names.learn(check, Resolved(1, ["promos.check"])) == "promos.check"
    assert names.find(call(Promos.check, shop="b"), None) == "promos.check"
    assert names.find(call(double, 1), None) == ""


def test_names_are_asked_for_again_from_another_daemon_or_when_one_is_unknown(
    session: Session,
) -> None:
    names, check = Names(session), call(Promos.check, shop="a")
    names.learn(check, Resolved(1, ["promos.check"]))
    session.receive(NOW, Welcome(PROTOCOL, "another"))
    assert names.find(check, None) == ""
    names.learn(check, Resolved(2, ["promos.check"]))
    spec = made(check, "promos.check", {}).spec
    from musterd.ipc.client.record import TaskRecord

    session.add(TaskRecord(spec.id, spec.name, spec))
    session.seal(NOW)
    session.receive(NOW, Accepted(1, [Rejection(spec.id, "UnknownTask", "renamed")]))
    assert names.find(check, None) == ""


def test_a_pool_that_is_given_is_not_asked_for(session: Session) -> None:
    names, check = Names(session), call(Promos.check, shop="a")
    assert names.find(check, "eu") == "eu.check"
    assert names.find(check.options(pool="eu"), None) == "eu.check"
    assert names.find(check.options(pool="eu"), "us") == "us.check"
    with pytest.raises(InvalidTask, match="pool must be the name of a pool, not 3"):
        names.find(check, 3)


def test_the_method_of_a_workers_instance_is_run_by_its_pool(session: Session) -> None:
    worker = Promos()
    assert Names(session).find(call(worker.check, shop="a"), None) == ""
    worker.pool = "eu"
    assert Names(session).find(call(worker.check, shop="a"), None) == "eu.check"
    assert Names(session).find(call(worker.check, shop="a"), "us") == "us.check"


def test_where_no_pool_runs_it_or_several_do_the_error_says_what_to_do(session: Session) -> None:
    names, check = Names(session), call(Promos.check, shop="a")
    with pytest.raises(UnknownTask) as unknown:
        names.learn(check, Resolved(1, [], ["slow"], ["broken"], ["broken", "slow"]))
    assert str(unknown.value) == (
        f"no pool runs {__name__}:Promos.check (pools: broken, slow; broken cannot load its "
        f"worker, see musterctl status; slow has not loaded its worker yet): give one the worker "
        f"'{__name__}:Promos', and musterctl reload; or submit the task by its name"
    )
    with pytest.raises(UnknownTask, match=f"give one the worker '{__name__}', and"):
        names.learn(call(double, 1), Resolved(1))
    with pytest.raises(InvalidTask) as several:
        names.learn(check, Resolved(1, ["us.check", "eu.check"]))
    assert str(several.value) == (
        f"{__name__}:Promos.check is a task of several pools (eu, us): say which one, as in "
        "submit(call(Promos.check, ...), pool='eu')"
    )
    with pytest.raises(InvalidTask, match=r"several tasks \(eu\.a, eu\.b\): give the name of one"):
        names.learn(check, Resolved(1, ["eu.a", "eu.b"]))
    with pytest.raises(NotConnected, match="is not known: the database is away"):
        names.learn(check, Resolved(1, error="the database is away"))
    assert names.find(check, None) == ""


def test_a_client_remembers_a_bounded_number_of_functions(session: Session) -> None:
    names = Names(session)
    for number in range(FUNCTIONS_MAX + 10):
        foreign: Any = SimpleNamespace(place=f"m:f{number}")
        names.learn(foreign, Resolved(1, [f"p.f{number}"]))
    assert len(names._names) <= FUNCTIONS_MAX


def test_a_function_of_the_main_file_has_the_name_that_a_daemon_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @task
    def here(ctx: Any) -> None: ...

    def there(ctx: Any) -> None: ...

    here.__module__ = there.__module__ = "__main__"
    here.__qualname__ = there.__qualname__ = "here"
    main = SimpleNamespace(__file__="/home/me/bot/promos.py", __spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert call(here).place == "promos:here"
    main.__spec__ = SimpleNamespace(name="bot.promos")
    assert call(task(there)).place == "bot.promos:here"
