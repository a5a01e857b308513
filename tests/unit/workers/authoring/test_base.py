"""Declarations, signatures, arguments, results and failures of handlers, without a process."""

import gc
import math
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.ipc.wire.messages import (
    CANCEL,
    ERROR,
    INVALID,
    NESTING_MAX,
    NOT_GIVEN,
    PERMANENT,
    RESULT_BYTES_MAX,
    TIMEOUT,
    Arguments,
    Completion,
    Failure,
    Lease,
    TaskDeclaration,
)
from musterd.workers.authoring import outcome
from musterd.workers.authoring.base import (
    Context,
    Permanent,
    Retry,
    TaskInterrupted,
    TaskOptions,
    TaskTimeout,
    Worker,
    task,
)
from musterd.workers.runtime.handlers import Loaded, WorkerLoadError, load

Write = Callable[[str], str]
QUIET = "@bulkhead('few', 1)\n def a(self, ctx): ..."  # a task with a decorator below

CONTRACT = """
    from musterd import Worker, task, Retry, Permanent

    class Promos(Worker):                           # one instance per worker process
        def open(self): ...                         # own the expensive thing
        def healthy(self) -> bool: ...              # asked while idle
        def close(self): ...

        @task(timeout=30, max_retries=3, retry_on=(TimeoutError,), target="url")
        def extract(self, ctx, url: str, select: dict[str, str]) -> dict: ...
        @task
        async def render(self, ctx, url: str) -> dict: ...
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module that can be imported during the test; return its name."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write_module(source: str) -> str:
        name = f"sample_{abs(hash(tmp_path))}_{len(names)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        names.append(name)
        return name

    yield write_module
    for name in names:
        sys.modules.pop(name, None)


def decode(loaded: Loaded, method: str, arguments: object) -> dict[str, Any]:
    handler = next(each for each in loaded.handlers if each.method == method)
    return handler.decode(msgspec.msgpack.encode(arguments))


def failure_of(
    error: BaseException, options: TaskOptions | None = None, *, was_cancelled: bool = False
) -> Failure:
    completion = completion_of(error, options, was_cancelled=was_cancelled)
    assert completion.failure is not None
    return completion.failure


def completion_of(
    error: BaseException, options: TaskOptions | None = None, *, was_cancelled: bool = False
) -> Completion:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - as the runtime does
        lease, context = Lease(7, "t", "x", b"", 1, 0), Context("t")
        context.cancelled = was_cancelled
        return outcome.failed(
            outcome.FailedAttempt(lease, options or TaskOptions(), context, caught), 5
        )


# -- @task ------------------------------------------------------------------------------------


def test_the_example_of_the_contract_loads_with_its_declarations(write: Write) -> None:
    module = write(CONTRACT)
    loaded = load(f"{module}:Promos")
    places = [f"{module}:Promos.{name}" for name in ("extract", "render")]
    extract, render = Arguments(("url", "select"), ("url", "select")), Arguments(("url",), ("url",))
    assert loaded.declarations == (
        TaskDeclaration("extract", 30 * 10**9, 3, "url", place=places[0], arguments=extract),
        TaskDeclaration("render", 0, NOT_GIVEN, "", place=places[1], arguments=render),
    )
    assert [handler.is_async for handler in loaded.handlers] == [False, True]
    assert loaded.handlers[0].options.retry_on == (TimeoutError,)


def test_plain_functions_of_a_module_are_tasks_but_only_the_marked_ones(write: Write) -> None:
    name = write(
        """
        from musterd import task
        @task
        def count(ctx, text: str = ""): return len(text)
        @task(timeout=0.5)
        async def wait(ctx): ...
        def helper(ctx): ...
        """
    )
    loaded = load(name)
    assert loaded.factory is None
    assert [each.method for each in loaded.declarations] == ["count", "wait"]
    assert loaded.declarations[1].timeout_ns == 500_000_000


def test_a_task_stays_a_callable_method() -> None:
    class Sample(Worker):
        @task
        def double(self, ctx: Context, number: int) -> int:
            return number * 2

    assert Sample().double(Context("t"), number=4) == 8


def test_tasks_are_inherited_and_an_override_without_the_mark_is_none(write: Write) -> None:
    name = write(
        """
        from musterd import Worker, task
        class Base(Worker):
            @task
            def kept(self, ctx): ...
            @task
            def hidden(self, ctx): ...
        class Derived(Base):
            def hidden(self, ctx): ...
        """
    )
    assert [each.method for each in load(f"{name}:Derived").declarations] == ["kept"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"timeout": 0}, ValueError, "more than 0"),
        ({"timeout": math.inf}, ValueError, "at most"),
        ({"timeout": "30"}, TypeError, "as a number"),
        ({"max_retries": -1}, ValueError, "0 to 1000"),
        ({"max_retries": 1.5}, TypeError, "whole number"),
        ({"retry_on": ("TimeoutError",)}, TypeError, "not an exception class"),
    ],
)
def test_a_wrong_option_of_task_says_what_is_expected(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        task(**options)


def test_task_refuses_what_is_not_a_function() -> None:
    with pytest.raises(TypeError, match="directly on a method or function"):
        task(staticmethod(lambda ctx: None))


def test_a_worker_has_options_even_outside_of_a_pool() -> None:
    assert Worker().options == {}
    assert Worker().options is not Worker().options


def test_the_log_of_a_context_carries_the_task() -> None:
    extra = Context("abc", attempt=2).log.extra
    assert extra == {"MUSTERD_TASK": "abc", "MUSTERD_ATTEMPT": 2}


# -- load -------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["", "a:", ":A", "a:B:C", "a b", "a..b", "a/b.py:C"])
def test_a_malformed_worker_name_is_refused(worker: str) -> None:
    with pytest.raises(WorkerLoadError, match=r"write 'package.module:Class'"):
        load(worker)


def test_a_missing_module_is_named() -> None:
    with pytest.raises(WorkerLoadError, match="there is no module 'no_such_module_here'"):
        load("no_such_module_here.deeper:Worker")


def test_a_failing_import_inside_the_module_is_told_from_a_missing_module(write: Write) -> None:
    name = write("\nimport no_such_dependency\n")
    with pytest.raises(WorkerLoadError, match=r"import failed with ModuleNotFoundError.*\.py:2;"):
        load(f"{name}:Anything")


OWN = {*(each for each in dir(Worker) if not each.startswith("_")), *Worker.__annotations__}


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_task_cannot_take_the_place_of_what_every_worker_has(write: Write, name: str) -> None:
    source = f"""
        from musterd import Worker, task
        class W(Worker):
            @task
            def {name}(self, ctx): ...
    """
    with pytest.raises(WorkerLoadError, match=f"a task cannot be called '{name}'.*rename"):
        load(write(source) + ":W")
    functions = f"""
        from musterd import task
        @task
        def {name}(ctx): ...
    """
    assert [each.method for each in load(write(functions)).handlers] == [name]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_generator_is_no_handler(write: Write, kind: str) -> None:
    source = f"""
        from musterd import Worker, task
        class W(Worker):
            @task
            {kind} pages(self, ctx): yield 1
    """
    with pytest.raises(WorkerLoadError, match=r"task 'pages'.*`yield`.*return a list"):
        load(write(source) + ":W")


@pytest.mark.parametrize("name", ["open", "healthy", "close"])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_the_runtime_calls_is_no_generator(write: Write, kind: str, name: str) -> None:
    source = f"""
        from musterd import Worker, task
        class W(Worker):
            {kind} {name}(self): yield
            @task
            def x(self, ctx): ...
    """
    with pytest.raises(WorkerLoadError, match=rf"{name}\(\) contains `yield`"):
        load(write(source) + ":W")


@pytest.mark.parametrize("statement", ["1 / 0", "raise SystemExit(3)", "def broken(:"])
def test_a_module_that_breaks_is_reported_and_not_fatal(write: Write, statement: str) -> None:
    with pytest.raises(WorkerLoadError, match="import failed with"):
        load(write(statement))


@pytest.mark.parametrize(
    ("source", "worker", "words"),
    [
        (CONTRACT, ":Promo", r"no class 'Promo'; did you mean \w+:Promos\?"),
        (CONTRACT, "", r"no tasks.*did you mean \w+:Promos\?"),
        ("class A: ...", ":A", "A is not a subclass of musterd.Worker"),
        ("A = 3", ":A", "A is not a subclass"),
        ("from musterd import Worker\nclass A(Worker): ...", ":A", "has no tasks; put @task"),
    ],
)
def test_what_is_not_a_worker_is_refused(
    write: Write, source: str, worker: str, words: str
) -> None:
    with pytest.raises(WorkerLoadError, match=words):
        load(write(source) + worker)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("@task\n def a(self): ...", "first parameter after self must be ctx"),
        ("@task\n def a(self, url): ...", "must be ctx"),
        ("@task\n def a(self, ctx, *urls): ...", r"\*urls is positional"),
        ("@task\n def a(self, ctx, url, /): ...", "url is positional"),
        ("@task(target='uri')\n def a(self, ctx, url): ...", "names no argument of it; it has url"),
        ("@task\n def a(self, ctx, url: Missing): ...", "Missing"),
        ("@task\n def a(self, ctx, x: 'list[int] | set[int]'): ...", "cannot be checked"),
        ("@staticmethod\n @task\n def a(ctx): ...", "'a' is a staticmethod"),
        ("@task\n def a(self, ctx): ...\n @task\n def a(self, ctx): ...", "two tasks are named"),
        (f"@task\n {QUIET}\n @task\n {QUIET}", r"two tasks are named 'a' \(lines 5 and 8\)"),
        ("def __init__(self, size): ...\n @task\n def a(self, ctx): ...", "without arguments"),
    ],
)
def test_a_handler_that_cannot_work_is_refused(write: Write, body: str, words: str) -> None:
    source = "from __future__ import annotations\nfrom musterd import Worker, task\n"
    source += "from musterd.workers.toolkit import bulkhead\n"
    name = write(f"{source}class A(Worker):\n {body}\n")
    with pytest.raises(WorkerLoadError, match=words):
        load(f"{name}:A")


def test_only_the_annotations_of_arguments_must_exist_at_run_time(write: Write) -> None:
    name = write(
        """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        from musterd import task
        if TYPE_CHECKING:
            from musterd import Context
        @task
        def a(ctx: Context, number: int) -> Nowhere: ...
        """
    )
    assert decode(load(name), "a", {"number": 1}) == {"number": 1}


# -- arguments --------------------------------------------------------------------------------

ARGUMENTS = """
    import dataclasses
    from musterd import task

    @dataclasses.dataclass
    class Point:
        x: int

    @task
    def plain(ctx, url: str, select: dict[str, str], depth: int = 2, anything=None): ...
    @task
    def rich(ctx, point: Point, *, tags: list[str] = ["a"]): ...
    @task
    def open(ctx, url: str, depth: int = 2, **more): ...
    @task
    def none(ctx): ...
"""


def test_arguments_are_checked_converted_and_completed(write: Write) -> None:
    loaded = load(write(ARGUMENTS))
    assert decode(loaded, "plain", {"url": "u", "select": {"a": "b"}}) == {
        "url": "u",
        "select": {"a": "b"},
        "depth": 2,
        "anything": None,
    }
    arguments = decode(loaded, "rich", {"point": {"x": 1}})
    assert arguments["point"].x == 1
    assert arguments["tags"] == ["a"]
    assert decode(loaded, "none", {}) == {}
    assert decode(loaded, "open", {"url": "u", "colour": "red"}) == {
        "url": "u",
        "depth": 2,
        "colour": "red",
    }


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("plain", {"url": "u"}, "the argument 'select' is missing"),
        ("plain", {"url": 1, "select": {}}, "url must be str, not int"),
        ("plain", {"url": "u", "select": {"a": 1}}, r"select\[\.\.\.\] must be str, not int"),
        (
            "plain",
            {"url": "u", "select": {}, "dept": 1},
            "no argument 'dept': did you mean 'depth'",
        ),
        ("plain", ["u", {}], "the arguments must be dict, not list"),
        ("none", {"a": 1}, "there is no argument 'a'"),
        ("open", {}, "the argument 'url' is missing"),
        ("open", {"url": "u", "depth": "2"}, "depth must be int, not str"),
        ("open", {"url": "u", "ctx": 1}, "there is no argument 'ctx'"),
        ("open", {1: 2}, "a key of the arguments must be str"),
    ],
)
def test_arguments_that_do_not_fit_are_a_validation_error(
    write: Write, method: str, arguments: object, words: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        decode(load(write(ARGUMENTS)), method, arguments)


def test_an_invalid_task_is_told_the_signature(write: Write) -> None:
    handler = next(each for each in load(write(ARGUMENTS)).handlers if each.method == "plain")
    failure = outcome.invalid(handler.signature, msgspec.ValidationError("no url"))
    assert failure.kind == INVALID
    assert failure.message == (
        "the arguments do not fit plain(url, select, depth=..., anything=...): no url"
    )


# -- results ----------------------------------------------------------------------------------


def test_plain_results_are_encoded() -> None:
    value = {"a": [1, 2.5, None, b"x", True], "b": ("c",)}
    assert msgspec.msgpack.decode(outcome.encode_result("m", value)) == {
        "a": [1, 2.5, None, b"x", True],
        "b": ["c"],
    }


def cycle() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "value of type object at result;"),
        ({"items": [1, {"x": object()}]}, r"type object at result\['items'\]\[1\]\['x'\];"),
        ({"big": 2**70}, r"at result\['big'\];"),
        (["\ud800"], r"surrogates not allowed at result\[0\];"),
        ({object(): 1}, r"at result\[key "),
        (cycle(), "result is nested too deeply, or contains itself;"),
    ],
)
def test_a_result_that_cannot_be_sent_says_where(value: object, words: str) -> None:
    with pytest.raises(outcome.Unserialisable, match=words):
        outcome.encode_result("extract", value)


def test_a_result_that_is_too_deep_is_refused_on_every_python() -> None:
    value: list[Any] = []
    for _ in range(NESTING_MAX):
        value = [value]
    with pytest.raises(outcome.Unserialisable, match=r"result is nested (too deeply|deeper than)"):
        outcome.encode_result("extract", value)


def test_a_result_over_the_limit_says_its_size_and_the_limit() -> None:
    with pytest.raises(
        outcome.Unserialisable, match=rf"{RESULT_BYTES_MAX + 5} bytes.*{RESULT_BYTES_MAX}"
    ):
        outcome.encode_result("extract", b"x" * RESULT_BYTES_MAX)


# -- failures ---------------------------------------------------------------------------------


class SiteError(Exception):
    def __init__(self, status: object, retry_after: object) -> None:
        super().__init__("site")
        self.status = status
        self.retry_after = retry_after


def test_an_error_keeps_its_type_message_traceback_status_and_retry_after() -> None:
    failure = failure_of(SiteError(503, 1.5))
    assert failure.kind == ERROR
    assert failure.type.endswith(".SiteError")
    assert failure.message == "site"
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert "in completion_of" in failure.traceback
    assert (failure.status, failure.retry_after_ns) == (503, 1_500_000_000)


@pytest.mark.parametrize(
    ("status", "retry_after"), [("503", "2"), (None, None), (-1, -1), (10**6, math.nan)]
)
def test_a_status_that_is_none_is_left_out(status: object, retry_after: object) -> None:
    failure = failure_of(SiteError(status, retry_after))
    assert (failure.status, failure.retry_after_ns) == (0, 0)


def test_retry_and_permanent_decide_for_themselves() -> None:
    only_timeouts = TaskOptions(retry_on=(TimeoutError,))
    retry = completion_of(Retry(after=10), only_timeouts)
    assert retry.retry_delay_ns == 10 * 10**9
    assert retry.failure is not None
    assert retry.failure.kind == ERROR
    assert completion_of(Retry("later")).retry_delay_ns == NOT_GIVEN
    assert failure_of(Permanent("gone")).kind == PERMANENT
    with pytest.raises(ValueError, match="0 or more"):
        Retry(after=-1)


def test_retry_on_makes_every_other_error_permanent() -> None:
    options = TaskOptions(retry_on=(TimeoutError, ConnectionError))
    assert failure_of(ConnectionResetError("x"), options).kind == ERROR
    assert failure_of(TaskTimeout("x"), options).kind == TIMEOUT
    refused = failure_of(ValueError("x"), options)
    assert (refused.kind, refused.type, refused.message) == (PERMANENT, "ValueError", "x")
    assert failure_of(TaskTimeout("x"), TaskOptions(retry_on=(KeyError,))).kind == PERMANENT


def test_a_timeout_that_a_library_wrapped_is_still_a_timeout() -> None:
    error = RuntimeError("request failed")
    error.__context__ = TaskTimeout("too long")
    failure = failure_of(error)
    assert (failure.kind, failure.message) == (TIMEOUT, "too long")
    assert "request failed" in failure.traceback


def test_whatever_a_cancelled_handler_raises_is_its_cancel() -> None:
    assert failure_of(TaskInterrupted("stop"), was_cancelled=True).kind == CANCEL
    assert failure_of(ValueError("torn"), was_cancelled=True).kind == CANCEL


def test_messages_and_tracebacks_are_bounded_and_can_be_encoded() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    failure = failure_of(ValueError("\ud800" + "x" * 100_000))
    assert len(failure.message) < outcome.MESSAGE_CHARS_MAX + 10
    assert len(failure.traceback) <= outcome.TRACEBACK_CHARS_MAX
    assert msgspec.msgpack.encode(failure)
    assert "cannot be shown" in failure_of(Broken()).message


def test_a_forgotten_error_lets_go_of_the_objects_of_its_attempt() -> None:
    class Page:
        pass

    kept = ValueError("a global that is raised again and again")
    alive: list[weakref.ref[Page]] = []

    def handler() -> None:
        page = Page()
        alive.append(weakref.ref(page))
        try:
            raise KeyError(page)
        except KeyError:
            raise kept from None

    gc.disable()
    try:
        try:
            handler()
        except ValueError as error:
            kept.__context__ = None  # the KeyError's own argument is not part of the traceback
            assert alive[0]() is not None
            outcome.forget(error)
        assert alive[0]() is None
    finally:
        gc.enable()
