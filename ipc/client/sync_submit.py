"""Submit tasks with a Client: one, many, or one for each set of arguments; and their handles."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast, overload

from msgspec import UNSET

from musterd.ipc.client.calls import (
    LOADING_SECONDS,
    Call,
    CallOptions,
    Decode,
    Fallback,
    Names,
    R_co,
    asking_for,
    made,
)
from musterd.ipc.client.driver import Driver
from musterd.ipc.client.handle import (
    MAP_WINDOW,
    Args,
    BaseHandle,
    Gathering,
    Request,
    TaskStatus,
    are_calls,
    calls_of,
    checked_arguments,
    checked_callback,
    checked_handles,
    named_task,
    taken_apart,
    understood,
)
from musterd.ipc.client.record import Inspection, Make, Question, TaskRecord
from musterd.ipc.client.taskspec import TaskOptions, make_spec, shown
from musterd.ipc.errors import InvalidTask
from musterd.ipc.wire import waits
from musterd.ipc.wire.messages import Outcome, ProgressNote, TaskSpec
from musterd.ipc.wire.resolving import Resolved

if TYPE_CHECKING:
    from musterd.ipc.client.calls import AsyncHandler, Handler

P = ParamSpec("P")
R = TypeVar("R")

OnDone = Callable[["TaskHandle[Any]"], object]


class TaskHandle(BaseHandle[R_co]):
    """One task: ask for its result, its state, or its end."""

    __slots__ = ()

    _owner: Driver

    def result(self, timeout: float | None = None) -> R_co:
        """Return the task's value; raise TaskFailed, TaskCancelled, TaskExpired or a rejection.

        What a typed call returns is of the type that its handler is annotated with; if it is not,
        InvalidResult is raised.
        """
        self._wait_for_end(timeout)
        return cast(R_co, self._value(self._owner.session))

    def outcome(self, timeout: float | None = None) -> Outcome:
        """Return how the task ended, whether well or not; raise only for a rejection."""
        self._wait_for_end(timeout)
        return self._outcome(self._owner.session)

    def ack(self, timeout: float | None = None) -> None:
        """Return when the task is safely stored; raise if it was rejected."""
        if not self._acknowledged and self._ending is None:
            self._owner.wait(self._answered, timeout, f"the acknowledgement of task {self.id}")
        if not self._acknowledged:
            self._outcome(self._owner.session)

    def status(self, timeout: float | None = None) -> TaskStatus:
        """Return the task as the supervisor sees it now."""
        driver = self._owner
        inspection = driver.tell(lambda now_ns: driver.session.inspect(now_ns, self.id))
        wait_for_answer(driver, inspection, timeout, f"the status of task {self.id}")
        return self._seen(inspection.view)

    def cancel(self) -> None:
        """Cancel the task; result() raises TaskCancelled unless the task ended before."""
        if self._ending is None:
            self._owner.tell(lambda now_ns: self._owner.session.cancel(now_ns, self.id))

    def progress(self, timeout: float | None = None) -> Iterator[ProgressNote]:
        """Yield the handler's newest ctx.progress() until the task ends; TimeoutError if the next
        report takes longer than `timeout`."""
        seen: ProgressNote | None = None

        def news() -> bool:
            return self._note is not seen or self._ending is not None

        while True:
            what = f"the progress of task {self.id}"
            _wait_for_tasks(self._owner, news, timeout, what, [self.id])
            note = self._note
            if note is None or note is seen:
                return
            seen = note
            yield note

    def _wait_for_end(self, timeout: float | None) -> None:
        if self._ending is None:
            what = f"the end of task {self.id} ({self.name})"
            _wait_for_tasks(self._owner, self.done, timeout, what, [self.id])


def _wait_for_tasks(
    driver: Driver, done: Callable[[], bool], timeout: float | None, what: str, ids: list[str]
) -> None:
    """Wait until done() holds, which the end of one of these tasks causes."""
    with waits.reported(ids, done) as over:
        driver.wait(over, timeout, what)


def wait_for_answer(
    driver: Driver, inspection: Inspection, timeout: float | None, what: str
) -> None:
    try:
        driver.wait(lambda: inspection.answered, timeout, what)
    finally:
        if not inspection.answered:
            with driver.lock:
                driver.session.drop(inspection)


class Submitting:
    """The part of a Client that submits tasks."""

    _driver: Driver
    _names: Names

    @overload
    def submit(
        self,
        name: str,
        args: Args = None,
        *,
        wait: bool = False,
        on_done: OnDone | None = None,
        **options: Unpack[TaskOptions],
    ) -> "TaskHandle[Any]": ...
    @overload
    def submit(
        self,
        call: Call[R],
        /,
        *,
        fallback: Fallback,
        wait: bool = False,
        on_done: Callable[["TaskHandle[R]"], object] | None = None,
        **options: Unpack[CallOptions],
    ) -> "TaskHandle[R | Fallback]": ...
    @overload
    def submit(
        self,
        call: Call[R],
        /,
        *,
        wait: bool = False,
        on_done: Callable[["TaskHandle[R]"], object] | None = None,
        **options: Unpack[CallOptions],
    ) -> "TaskHandle[R]": ...
    @overload
    def submit(
        self, handler: "AsyncHandler[P, R]", /, *args: P.args, **kwargs: P.kwargs
    ) -> "TaskHandle[R]": ...
    @overload
    def submit(
        self, handler: "Handler[P, R]", /, *args: P.args, **kwargs: P.kwargs
    ) -> "TaskHandle[R]": ...
    # Positional-only, because a handler may have arguments of any name.
    def submit(  # type: ignore[misc]
        self,
        task: Any = UNSET,
        args: Any = UNSET,
        /,
        *more: Any,
        wait: Any = UNSET,
        on_done: Any = UNSET,
        **options: Any,
    ) -> "TaskHandle[Any]":
        """Submit without waiting; with `wait`, return once accepted, however full the queue is.

            submit("promos.check", {"shop": "aurora"}, priority="high")     by name
            submit(Promos.check, shop="aurora")                             typed
            submit(call(Promos.check, shop="aurora"), priority="high")      typed, with options

        Options: priority, target, timeout, max_retries, delay, expires, key, cache, debounce,
        policy, on_open, fallback, fallback_on, session; of a call also `pool`; see TaskOptions.
        Raises InvalidTask where an option or an argument cannot be sent, or does not fit a handler.
        """
        if type(task) is not str or more:
            given = {**options, "wait": wait, "on_done": on_done}
            return self._submit_other(task, (args, *more), given)
        spec = make_spec(task, None if args is UNSET else args, **options)
        return self._add(spec, bool(wait), None if on_done is UNSET else on_done)

    def _submit_other(
        self, task: Any, positional: tuple[Any, ...], options: dict[str, Any]
    ) -> "TaskHandle[Any]":
        """Submit a call or a handler; or a task by its name, in the rarer ways to write that."""
        task, args, options = understood(task, positional, options)
        if isinstance(task, Call):
            return self._submit_call(task, options)
        on_done, wait = options.pop("on_done", None), options.pop("wait", False)
        return self._add(make_spec(task, args, **options), wait, on_done)

    def _submit_call(self, call: Call[Any], options: Mapping[str, Any]) -> "TaskHandle[Any]":
        task = made(call, self._name_of(call, options), options)
        return self._add(task.spec, task.wait, task.on_done, task.returns)

    def _add(
        self, spec: TaskSpec, wait: bool, on_done: OnDone | None, returns: Decode | None = None
    ) -> "TaskHandle[Any]":
        handle = self._handle(spec, wait, on_done, returns)
        self._driver.add(handle, on_done)
        if wait:
            handle.ack()
        return handle

    @overload
    def submit_many(self, requests: Iterable[Call[R]]) -> "list[TaskHandle[R]]": ...
    @overload
    def submit_many(self, requests: Iterable[Request | Call[Any]]) -> "list[TaskHandle[Any]]": ...
    def submit_many(self, requests: Iterable[Request | Call[Any]]) -> "list[TaskHandle[Any]]":
        """Submit each (name, args), (name, args, options) or call in one go; check all first."""
        tasks: list[tuple[TaskRecord, OnDone | None]] = []
        handles: list[TaskHandle[Any]] = []
        for name, args, wait, on_done, options in taken_apart(requests):
            if isinstance(name, Call):
                task = made(name, self._name_of(name, options), options)
                handles.append(self._handle(task.spec, task.wait, task.on_done, task.returns))
                tasks.append((handles[-1], task.on_done))
                continue
            handles.append(self._handle(make_spec(name, args, **options), wait, on_done))
            tasks.append((handles[-1], on_done))
        self._driver.add_all(tasks)
        for handle in handles:
            if handle._patient:
                handle.ack()
        return handles

    @overload
    def map(
        self, name: str, iterable: Iterable[Args], **options: Unpack[TaskOptions]
    ) -> "Iterator[TaskHandle[Any]]": ...
    @overload
    def map(
        self, calls: Iterable[Call[R]], /, *, fallback: Fallback, **options: Unpack[CallOptions]
    ) -> "Iterator[TaskHandle[R | Fallback]]": ...
    @overload
    def map(
        self, calls: Iterable[Call[R]], /, **options: Unpack[CallOptions]
    ) -> "Iterator[TaskHandle[R]]": ...
    @overload
    def map(
        self,
        handler: "AsyncHandler[..., R]",
        iterable: Iterable[Args],
        /,
        **options: Unpack[CallOptions],
    ) -> "Iterator[TaskHandle[R]]": ...
    @overload
    def map(
        self,
        handler: "Handler[..., R]",
        iterable: Iterable[Args],
        /,
        **options: Unpack[CallOptions],
    ) -> "Iterator[TaskHandle[R]]": ...
    def map(  # type: ignore[misc]
        self, task: Any = UNSET, iterable: Any = UNSET, /, **options: Any
    ) -> "Iterator[TaskHandle[Any]]":
        """Run each of these calls, or a task for each set of arguments; yield the handles as they
        finish.

            map(call(Promos.check, shop=shop) for shop in shops)
            map("promos.check", [{"shop": shop} for shop in shops])

        Reads the iterable lazily, with at most MAP_WINDOW tasks under way, and waits while the
        queue is full.
        """
        tasks = Gathering[TaskHandle[Any]]()
        for handle, on_done in self._mapped(task, iterable, options):
            tasks.add(handle)
            self._driver.add(handle, on_done)
            if len(tasks.under_way) >= MAP_WINDOW:
                self._wait_for_any(tasks, None)
            yield from tasks.take()
        while tasks.under_way:
            self._wait_for_any(tasks, None)
            yield from tasks.take()

    def _mapped(
        self, task: Any, iterable: Any, options: dict[str, Any]
    ) -> "Iterator[tuple[TaskHandle[Any], OnDone | None]]":
        """Yield a handle for each task of map(), not submitted yet, and its on_done."""
        if are_calls(task, iterable):
            for call in calls_of(task, iterable):
                new = made(call, self._name_of(call, options), options)
                yield self._handle(new.spec, True, new.on_done, new.returns), new.on_done
            return
        given = () if iterable is UNSET else (iterable,)
        name, iterable = named_task("map", "iterable", task, given, options)
        for args in checked_arguments(name, iterable):
            yield self._handle(make_spec(name, args, **options), True, None), None

    def as_completed(
        self, handles: "Iterable[TaskHandle[R]]", timeout: float | None = None
    ) -> "Iterator[TaskHandle[R]]":
        """Yield the handles as they finish; TimeoutError if one takes longer than `timeout`."""
        tasks = Gathering[TaskHandle[R]]()
        unique = checked_handles(handles)
        self._driver.check()
        with self._driver.lock:
            for handle in unique:
                tasks.add(handle)
        while tasks.under_way:
            self._wait_for_any(tasks, timeout)
            yield from tasks.take()

    def _wait_for_any(self, tasks: "Gathering[TaskHandle[R]]", timeout: float | None) -> None:
        if not tasks.any_ended():
            ids, what = [handle.id for handle in tasks.under_way], "the end of a task"
            _wait_for_tasks(self._driver, tasks.any_ended, timeout, what, ids)

    def _handle(
        self, spec: TaskSpec, wait: bool, on_done: OnDone | None, returns: Decode | None = None
    ) -> "TaskHandle[Any]":
        if on_done is not None:
            checked_callback(on_done)
            if iscoroutinefunction(on_done) or iscoroutinefunction(type(on_done).__call__):
                raise InvalidTask(
                    f"on_done={shown(on_done)} is a coroutine function, and Client has no event "
                    "loop to run it on: use AsyncClient, or give a function that calls "
                    "asyncio.run()"
                )
        handle: TaskHandle[Any] = TaskHandle(spec.id, spec.name, spec, self._driver, returns)
        handle._patient = wait
        return handle

    # -- the names of functions -----------------------------------------------------------------

    def _name_of(self, call: Call[Any], options: Mapping[str, Any]) -> str:
        """Return the name of a call's task; ask the daemon, the first time.

        While pools load their workers the answer is not final. It is waited for as long as for a
        daemon; then what is known counts.
        """
        name = self._names.find(call, options.get("pool"))
        if name:
            return name
        seconds = self._driver.connect_timeout
        give_up = time.monotonic() + seconds
        told: Resolved | None = None
        while told is None or told.loading:
            left = give_up - time.monotonic()
            if told is not None:
                if left <= 0:
                    break
                time.sleep(LOADING_SECONDS)
            told = self._ask_for_name(call, max(left, 0)) or told
            if told is None:
                raise self._names.unknown(call, seconds)
        return self._names.learn(call, told)

    def _ask_for_name(self, call: Call[Any], seconds: float) -> Resolved | None:
        try:
            [question] = self._ask_all([asking_for(call)], seconds, call.place)
        except TimeoutError:
            return None
        assert isinstance(question.answer, Resolved)
        return question.answer

    def _ask_all(self, made: list[Make], timeout: float | None, what: str) -> list[Question]:
        """Ask about schedules or functions; return when all is answered."""
        driver, session = self._driver, self._driver.session
        questions = driver.tell(
            lambda now_ns: [session.ask(now_ns, Question(make)) for make in made]
        )
        try:
            driver.wait(lambda: all(each.answered for each in questions), timeout, what)
        finally:
            with driver.lock:
                for each in questions:
                    if not each.answered:
                        session.drop(each)
        return questions
