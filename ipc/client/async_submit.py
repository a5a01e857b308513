"""Submit tasks with an AsyncClient: one, many, or one for each set of arguments; their handles."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
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
from musterd.ipc.client.record import Make, Question, TaskRecord
from musterd.ipc.client.session import Session
from musterd.ipc.client.taskspec import TaskOptions, make_spec
from musterd.ipc.wire.messages import Outcome, ProgressNote, TaskSpec
from musterd.ipc.wire.resolving import Resolved

if TYPE_CHECKING:
    from musterd.ipc.client.async_client import AsyncClient
    from musterd.ipc.client.calls import AsyncHandler, Handler

P = ParamSpec("P")
R = TypeVar("R")

OnDone = Callable[["AsyncTaskHandle[Any]"], object]


class AsyncTaskHandle(BaseHandle[R_co]):
    """One task: await its result, its state, or its end."""

    __slots__ = ()

    _owner: "AsyncClient"

    async def result(self, timeout: float | None = None) -> R_co:
        """Return the task's value; raise TaskFailed, TaskCancelled, TaskExpired or a rejection.

        What a typed call returns is of the type that its handler is annotated with; if it is not,
        InvalidResult is raised.
        """
        await self._wait_for_end(timeout)
        return cast(R_co, self._value(self._owner._session))

    async def outcome(self, timeout: float | None = None) -> Outcome:
        """Return how the task ended, whether well or not; raise only for a rejection."""
        await self._wait_for_end(timeout)
        return self._outcome(self._owner._session)

    async def ack(self, timeout: float | None = None) -> None:
        """Return when the task is safely stored; raise if it was rejected."""
        if not self._acknowledged and self._ending is None:
            what = f"the acknowledgement of task {self.id}"
            await self._owner._wait(self._answered, timeout, what, self)
        if not self._acknowledged:
            self._outcome(self._owner._session)

    async def status(self, timeout: float | None = None) -> TaskStatus:
        """Return the task as the supervisor sees it now."""
        client = self._owner
        inspection = client._session.inspect(client._now_ns(), self.id)
        await client._wait_for_answer(inspection, timeout, f"the status of task {self.id}")
        return self._seen(inspection.view)

    async def cancel(self) -> None:
        """Cancel the task; result() raises TaskCancelled unless the task ended before."""
        if self._ending is None:
            self._owner._session.cancel(self._owner._now_ns(), self.id)
            self._owner._pump()

    async def progress(self, timeout: float | None = None) -> AsyncIterator[ProgressNote]:
        """Yield the handler's newest ctx.progress() until the task ends; TimeoutError if the next
        report takes longer than `timeout`."""
        seen: ProgressNote | None = None

        def news() -> bool:
            return self._note is not seen or self._ending is not None

        while True:
            if not news():
                what = f"the progress of task {self.id}"
                await self._owner._wait_for_tasks(news, timeout, what, [self.id], self)
            note = self._note
            if note is None or note is seen:
                return
            seen = note
            yield note

    async def _wait_for_end(self, timeout: float | None) -> None:
        if self._ending is None:
            what = f"the end of task {self.id} ({self.name})"
            await self._owner._wait_for_tasks(self.done, timeout, what, [self.id], self)


class AsyncSubmitting:
    """The part of an AsyncClient that submits tasks."""

    _names: Names
    _session: Session
    _connect_timeout: float

    if TYPE_CHECKING:  # what the client does

        async def _send(self, handle: "AsyncTaskHandle[Any]") -> None: ...
        async def _send_all(self, handles: "list[AsyncTaskHandle[Any]]") -> None: ...
        def _new_handle(self, spec: TaskSpec, returns: Decode | None) -> "AsyncTaskHandle[Any]": ...
        def _call_soon(self, on_done: OnDone, record: TaskRecord) -> None: ...
        async def _wait_for_tasks(
            self,
            done: Callable[[], bool],
            timeout: float | None,
            what: str,
            ids: list[str],
            record: TaskRecord | None = None,
        ) -> None: ...
        async def _wait(
            self,
            done: Callable[[], bool],
            timeout: float | None,
            what: str,
            record: TaskRecord | None = None,
        ) -> None: ...
        def _now_ns(self) -> int: ...

    @overload
    async def submit(
        self,
        name: str,
        args: Args = None,
        *,
        wait: bool = False,
        on_done: OnDone | None = None,
        **options: Unpack[TaskOptions],
    ) -> "AsyncTaskHandle[Any]": ...
    @overload
    async def submit(
        self,
        call: Call[R],
        /,
        *,
        fallback: Fallback,
        wait: bool = False,
        on_done: Callable[["AsyncTaskHandle[R]"], object] | None = None,
        **options: Unpack[CallOptions],
    ) -> "AsyncTaskHandle[R | Fallback]": ...
    @overload
    async def submit(
        self,
        call: Call[R],
        /,
        *,
        wait: bool = False,
        on_done: Callable[["AsyncTaskHandle[R]"], object] | None = None,
        **options: Unpack[CallOptions],
    ) -> "AsyncTaskHandle[R]": ...
    @overload
    async def submit(
        self, handler: "AsyncHandler[P, R]", /, *args: P.args, **kwargs: P.kwargs
    ) -> "AsyncTaskHandle[R]": ...
    @overload
    async def submit(
        self, handler: "Handler[P, R]", /, *args: P.args, **kwargs: P.kwargs
    ) -> "AsyncTaskHandle[R]": ...
    # Positional-only, because a handler may have arguments of any name.
    async def submit(  # type: ignore[misc]
        self,
        task: Any = UNSET,
        args: Any = UNSET,
        /,
        *more: Any,
        wait: Any = UNSET,
        on_done: Any = UNSET,
        **options: Any,
    ) -> "AsyncTaskHandle[Any]":
        """Submit without waiting; with `wait`, return once accepted, however full the queue is.

        Takes what Client.submit() takes, and may wait for a daemon to say, the first time, which
        task a handler is.
        """
        if type(task) is str and not more:
            spec = make_spec(task, None if args is UNSET else args, **options)
            handle = self._handle(spec, bool(wait), None if on_done is UNSET else on_done)
        else:
            given = {**options, "wait": wait, "on_done": on_done}
            handle = await self._other_handle(task, (args, *more), given)
        await self._send(handle)
        if handle._patient:
            await handle.ack()
        return handle

    async def _other_handle(
        self, task: Any, positional: tuple[Any, ...], options: dict[str, Any]
    ) -> "AsyncTaskHandle[Any]":
        """Return the handle of a call or a handler; or of a task by its name, in the rarer ways to
        write that."""
        task, args, options = understood(task, positional, options)
        if isinstance(task, Call):
            return await self._call_handle(task, options)
        on_done, wait = options.pop("on_done", None), options.pop("wait", False)
        return self._handle(make_spec(task, args, **options), wait, on_done)

    async def _call_handle(
        self, call: Call[Any], options: Mapping[str, Any]
    ) -> "AsyncTaskHandle[Any]":
        task = made(call, await self._name_of(call, options), options)
        return self._handle(task.spec, task.wait, task.on_done, task.returns)

    @overload
    async def submit_many(self, requests: Iterable[Call[R]]) -> "list[AsyncTaskHandle[R]]": ...
    @overload
    async def submit_many(
        self, requests: Iterable[Request | Call[Any]]
    ) -> "list[AsyncTaskHandle[Any]]": ...
    async def submit_many(
        self, requests: Iterable[Request | Call[Any]]
    ) -> "list[AsyncTaskHandle[Any]]":
        """Submit each (name, args), (name, args, options) or call in one go; check all first."""
        handles: list[AsyncTaskHandle[Any]] = []
        for name, args, wait, on_done, options in taken_apart(requests):
            if isinstance(name, Call):
                handles.append(await self._call_handle(name, options))
            else:
                handles.append(self._handle(make_spec(name, args, **options), wait, on_done))
        await self._send_all(handles)
        for handle in handles:
            if handle._patient:
                await handle.ack()
        return handles

    @overload
    def map(
        self, name: str, iterable: Iterable[Args], **options: Unpack[TaskOptions]
    ) -> "AsyncIterator[AsyncTaskHandle[Any]]": ...
    @overload
    def map(
        self, calls: Iterable[Call[R]], /, *, fallback: Fallback, **options: Unpack[CallOptions]
    ) -> "AsyncIterator[AsyncTaskHandle[R | Fallback]]": ...
    @overload
    def map(
        self, calls: Iterable[Call[R]], /, **options: Unpack[CallOptions]
    ) -> "AsyncIterator[AsyncTaskHandle[R]]": ...
    @overload
    def map(
        self,
        handler: "AsyncHandler[..., R]",
        iterable: Iterable[Args],
        /,
        **options: Unpack[CallOptions],
    ) -> "AsyncIterator[AsyncTaskHandle[R]]": ...
    @overload
    def map(
        self,
        handler: "Handler[..., R]",
        iterable: Iterable[Args],
        /,
        **options: Unpack[CallOptions],
    ) -> "AsyncIterator[AsyncTaskHandle[R]]": ...
    async def map(  # type: ignore[misc]
        self, task: Any = UNSET, iterable: Any = UNSET, /, **options: Any
    ) -> "AsyncIterator[AsyncTaskHandle[Any]]":
        """Run each of these calls, or a task for each set of arguments; yield the handles as they
        finish.

        Reads the iterable lazily, with at most MAP_WINDOW tasks under way, and waits while the
        queue is full.
        """
        tasks = Gathering[AsyncTaskHandle[Any]]()
        async for handle in self._mapped(task, iterable, options):
            tasks.add(handle)
            await self._send(handle)
            if len(tasks.under_way) >= MAP_WINDOW:
                await self._wait_for_any(tasks, None)
            for ended in tasks.take():
                yield ended
        while tasks.under_way:
            await self._wait_for_any(tasks, None)
            for ended in tasks.take():
                yield ended

    async def _mapped(
        self, task: Any, iterable: Any, options: dict[str, Any]
    ) -> "AsyncIterator[AsyncTaskHandle[Any]]":
        """Yield a handle for each task of map(), not submitted yet."""
        if are_calls(task, iterable):
            for call in calls_of(task, iterable):
                handle = await self._call_handle(call, options)
                handle._patient = True
                yield handle
            return
        given = () if iterable is UNSET else (iterable,)
        name, iterable = named_task("map", "iterable", task, given, options)
        for args in checked_arguments(name, iterable):
            yield self._handle(make_spec(name, args, **options), True, None)

    async def as_completed(
        self, handles: "Iterable[AsyncTaskHandle[R]]", timeout: float | None = None
    ) -> "AsyncIterator[AsyncTaskHandle[R]]":
        """Yield the handles as they finish; TimeoutError if one takes longer than `timeout`."""
        tasks = Gathering[AsyncTaskHandle[R]]()
        for handle in checked_handles(handles):
            tasks.add(handle)
        while tasks.under_way:
            await self._wait_for_any(tasks, timeout)
            for ended in tasks.take():
                yield ended

    async def _wait_for_any(
        self, tasks: "Gathering[AsyncTaskHandle[R]]", timeout: float | None
    ) -> None:
        if not tasks.any_ended():
            ids, what = [handle.id for handle in tasks.under_way], "the end of a task"
            await self._wait_for_tasks(tasks.any_ended, timeout, what, ids)

    def _handle(
        self, spec: TaskSpec, wait: bool, on_done: OnDone | None, returns: Decode | None = None
    ) -> "AsyncTaskHandle[Any]":
        handle = self._new_handle(spec, returns)
        handle._patient = wait
        if on_done is not None:
            checked_callback(on_done)
            handle._listen(partial(self._call_soon, on_done))
        return handle

    # -- the names of functions -----------------------------------------------------------------

    async def _name_of(self, call: Call[Any], options: Mapping[str, Any]) -> str:
        """Return the name of a call's task; ask the daemon, the first time.

        While pools load their workers the answer is not final. It is waited for as long as for a
        daemon; then what is known counts.
        """
        name = self._names.find(call, options.get("pool"))
        if name:
            return name
        seconds = self._connect_timeout
        give_up = time.monotonic() + seconds
        told: Resolved | None = None
        while told is None or told.loading:
            left = give_up - time.monotonic()
            if told is not None:
                if left <= 0:
                    break
                await asyncio.sleep(LOADING_SECONDS)
            told = await self._ask_for_name(call, max(left, 0)) or told
            if told is None:
                raise self._names.unknown(call, seconds)
        return self._names.learn(call, told)

    async def _ask_for_name(self, call: Call[Any], seconds: float) -> Resolved | None:
        try:
            [question] = await self._ask_all([asking_for(call)], seconds, call.place)
        except TimeoutError:
            return None
        assert isinstance(question.answer, Resolved)
        return question.answer

    async def _ask_all(self, made: list[Make], timeout: float | None, what: str) -> list[Question]:
        """Ask about schedules or functions; return when all is answered."""
        now_ns, session = self._now_ns(), self._session
        questions = [session.ask(now_ns, Question(make)) for make in made]
        try:
            await self._wait(lambda: all(each.answered for each in questions), timeout, what)
        finally:
            for each in questions:
                if not each.answered:
                    session.drop(each)
        return questions
