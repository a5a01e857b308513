"""Client: submit tasks and get their results, from any thread."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, Self, Unpack

from musterd.ipc.client import history
from musterd.ipc.client.changes import ChangeReader, Following
from musterd.ipc.client.driver import Driver
from musterd.ipc.client.handle import (
    EXIT_FLUSH_SECONDS,
    MAP_WINDOW,
    BaseHandle,
    Gathering,
    Request,
    checked_arguments,
    checked_callback,
    checked_handles,
    checked_seconds,
    taken_apart,
    unreported_error,
)
from musterd.ipc.client.history import KeptResult
from musterd.ipc.client.link import Link
from musterd.ipc.client.record import Inspection, Question, TaskRecord
from musterd.ipc.client.schedules import Make, Schedules
from musterd.ipc.client.taskspec import (
    TaskOptions,
    checked_id,
    checked_invalidation,
    make_spec,
    shown,
)
from musterd.ipc.errors import HistoryUnavailable, InvalidTask, MusterdError, UnknownSchedule
from musterd.ipc.wire import waits
from musterd.ipc.wire.history import Entries, HistoryEntry
from musterd.ipc.wire.messages import Change, History, Outcome, ProgressNote, TaskSpec, TaskView

log = logging.getLogger("musterd.client")

OnDone = Callable[["TaskHandle"], object]


class TaskHandle(BaseHandle):
    """One task: ask for its result, its state, or its end."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver, task_id: str, name: str, spec: TaskSpec | None) -> None:
        super().__init__(task_id, name, spec)
        self._driver = driver

    def result(self, timeout: float | None = None) -> Any:
        """Return the task's value; raise TaskFailed, TaskCancelled, TaskExpired or a rejection."""
        self._wait_for_end(timeout)
        return self._value(self._driver.session)

    def outcome(self, timeout: float | None = None) -> Outcome:
        """Return how the task ended, whether well or not; raise only for a rejection."""
        self._wait_for_end(timeout)
        return self._outcome(self._driver.session)

    def ack(self, timeout: float | None = None) -> None:
        """Return when the task is safely stored; raise if it was rejected."""
        if not self.acknowledged and self.ending is None:
            self._driver.wait(self._answered, timeout, f"the acknowledgement of task {self.id}")
        if not self.acknowledged:
            self._outcome(self._driver.session)

    def status(self, timeout: float | None = None) -> TaskView:
        """Return the task as the supervisor sees it now."""
        driver = self._driver
        inspection = driver.tell(lambda now_ns: driver.session.inspect(now_ns, self.id))
        _wait_for_answer(driver, inspection, timeout, f"the status of task {self.id}")
        return self._known(inspection.view)

    def cancel(self) -> None:
        """Cancel the task; result() raises TaskCancelled unless the task ended before."""
        if self.ending is None:
            self._driver.tell(lambda now_ns: self._driver.session.cancel(now_ns, self.id))

    def progress(self, timeout: float | None = None) -> Iterator[ProgressNote]:
        """Yield the handler's newest ctx.progress() until the task ends; TimeoutError if the next
        report takes longer than `timeout`."""
        seen: ProgressNote | None = None

        def news() -> bool:
            return self.note is not seen or self.ending is not None

        while True:
            what = f"the progress of task {self.id}"
            _wait_for_tasks(self._driver, news, timeout, what, [self.id])
            note = self.note
            if note is None or note is seen:
                return
            seen = note
            yield note

    def _wait_for_end(self, timeout: float | None) -> None:
        if self.ending is None:
            what = f"the end of task {self.id} ({self.name})"
            _wait_for_tasks(self._driver, self.done, timeout, what, [self.id])


def _wait_for_tasks(
    driver: Driver, done: Callable[[], bool], timeout: float | None, what: str, ids: list[str]
) -> None:
    """Wait until done() holds, which the end of one of these tasks causes."""
    with waits.reported(ids, done) as over:
        driver.wait(over, timeout, what)


class Client:
    """Connection to the supervisor, made in the background; safe to share between threads."""

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, connect_timeout: float = 5.0
    ) -> None:
        self._closed = True  # until there is something to close
        seconds = checked_seconds("connect_timeout", connect_timeout)
        self._link = Link(socket)
        self._driver = Driver(self._link, seconds)
        self._closed = False
        self.schedules = Schedules(self)

    def __repr__(self) -> str:
        return f"<Client {self._link.path}>"

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        if not self._closed and self._driver.usable_here:
            warn(f"unclosed {self!r}: use `with` or close()", ResourceWarning, source=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:  # the first error matters more than a second one from close()
            self.close(timeout=EXIT_FLUSH_SECONDS)
        except (MusterdError, TimeoutError) as second:
            log.warning("leaving the client after an error: %s", second)

    def submit(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        *,
        wait: bool = False,
        on_done: OnDone | None = None,
        **options: Unpack[TaskOptions],
    ) -> TaskHandle:
        """Submit without waiting; with `wait`, return once accepted, however full the queue is.

        Options: priority, target, timeout, max_retries, delay, expires, key, cache, debounce,
        policy, on_open, fallback; see TaskOptions. Raises InvalidTask where an option or an
        argument cannot be sent.
        """
        handle = self._handle(make_spec(name, args, **options), wait, on_done)
        self._driver.add(handle, on_done)
        if wait:
            handle.ack()
        return handle

    def submit_many(self, requests: Iterable[Request]) -> list[TaskHandle]:
        """Submit each (name, args) or (name, args, options) in one go; check all first."""
        tasks: list[tuple[TaskRecord, OnDone | None]] = []
        handles: list[TaskHandle] = []
        for name, args, wait, on_done, options in taken_apart(requests):
            handles.append(self._handle(make_spec(name, args, **options), wait, on_done))
            tasks.append((handles[-1], on_done))
        self._driver.add_all(tasks)
        for handle in handles:
            if handle.patient:
                handle.ack()
        return handles

    def map(
        self,
        name: str,
        iterable: Iterable[Mapping[str, Any] | None],
        **options: Unpack[TaskOptions],
    ) -> Iterator[TaskHandle]:
        """Run a task for each set of arguments; yield the handles as they finish.

        Reads the iterable lazily, with at most MAP_WINDOW tasks under way, and waits while the
        queue is full.
        """
        tasks = Gathering[TaskHandle]()
        for args in checked_arguments(name, iterable):
            handle = self._handle(make_spec(name, args, **options), True, None)
            tasks.add(handle)
            self._driver.add(handle)
            if len(tasks.under_way) >= MAP_WINDOW:
                self._wait_for_any(tasks, None)
            yield from tasks.take()
        while tasks.under_way:
            self._wait_for_any(tasks, None)
            yield from tasks.take()

    def as_completed(
        self, handles: Iterable[TaskHandle], timeout: float | None = None
    ) -> Iterator[TaskHandle]:
        """Yield the handles as they finish; TimeoutError if one takes longer than `timeout`."""
        tasks = Gathering[TaskHandle]()
        unique = checked_handles(handles)
        self._driver.check()
        with self._driver.lock:
            for handle in unique:
                tasks.add(handle)
        while tasks.under_way:
            self._wait_for_any(tasks, timeout)
            yield from tasks.take()

    def _wait_for_any(self, tasks: Gathering[TaskHandle], timeout: float | None) -> None:
        if not tasks.any_ended():
            ids, what = [handle.id for handle in tasks.under_way], "the end of a task"
            _wait_for_tasks(self._driver, tasks.any_ended, timeout, what, ids)

    def _handle(self, spec: TaskSpec, wait: bool, on_done: OnDone | None) -> TaskHandle:
        if on_done is not None:
            checked_callback(on_done)
            if iscoroutinefunction(on_done) or iscoroutinefunction(type(on_done).__call__):
                raise InvalidTask(
                    f"on_done={shown(on_done)} is a coroutine function, and Client has no event "
                    "loop to run it on: use AsyncClient, or give a function that calls "
                    "asyncio.run()"
                )
        handle = TaskHandle(self._driver, spec.id, spec.name, spec)
        handle.patient = wait
        return handle

    def task(self, task_id: str) -> TaskHandle:
        """Return the handle of a task submitted before, by this client or another."""
        session = self._driver.session
        checked_id(task_id)

        def find(now_ns: int) -> TaskRecord:
            known = session.records.get(task_id)
            if known is not None:
                return known
            handle = TaskHandle(self._driver, task_id, "", None)
            session.watch(handle)
            return handle

        handle = self._driver.tell(find)
        assert isinstance(handle, TaskHandle)
        return handle

    def changes(self, *schedules: str, timeout: float | None = None) -> ChangeReader[TaskHandle]:
        """Yield a change whenever a schedule with `notify = "task.changed"` has a new result.

        Covers the named schedules, or all of them, from this call on. Survives restarts of the
        daemon and lost connections: changes that were missed are delivered, as far as history has
        kept them. TimeoutError if the next change takes longer than `timeout`.

        A change has `before` and `after`, the `fields` that differ, a unified `diff`, `at`, the
        `task` that found it, and `again` if the daemon may have told it before.
        """
        driver, following = self._driver, Following(schedules)
        driver.tell(lambda _: driver.session.follow(following))
        return ChangeReader(
            following,
            partial(driver.wait, following.any_unread, timeout, "the next change"),
            self.task,
            partial(self._recall, timeout=timeout),
            look_back=partial(self._look_back, timeout=timeout),
            stop=lambda: driver.tell(lambda _: driver.session.unfollow(following)),
        )

    def history(self, schedule: str, n: int = 20, timeout: float | None = None) -> list[KeptResult]:
        """Return the last `n` different results of a schedule with `notify`, oldest first.

        UnknownSchedule if there is none of this name.
        """
        return self._ask_history(history.question(schedule, n), timeout)

    def _recall(self, change: Change, timeout: float | None) -> list[KeptResult]:
        """Return the results of a change that the daemon has kept."""
        if not change.number:
            return []
        try:
            return self._ask_history(history.question_about(change), timeout)
        except (HistoryUnavailable, UnknownSchedule):  # not kept there; the schedule was removed
            return []

    def _look_back(self, change: Change, timeout: float | None) -> list[HistoryEntry]:
        """Return all that history has of the schedule of a change."""
        return self._ask_entries(History(0, change.schedule), timeout).entries

    def _ask_history(self, question: History, timeout: float | None) -> list[KeptResult]:
        return history.results_of(self._ask_entries(question, timeout))

    def _ask_entries(self, question: History, timeout: float | None) -> Entries:
        driver = self._driver
        inspection = driver.tell(lambda now_ns: driver.session.history(now_ns, question))
        _wait_for_answer(driver, inspection, timeout, f"the history of {question.schedule!r}")
        assert inspection.entries is not None
        return inspection.entries

    def invalidate(
        self, key: str = "", *, prefix: str | None = None, timeout: float | None = None
    ) -> None:
        """Forget the cached results of a key, or of all keys with a prefix; return when done."""
        driver, (text, many) = self._driver, checked_invalidation(key, prefix)
        inspection = driver.tell(lambda now_ns: driver.session.invalidate(now_ns, text, many))
        _wait_for_answer(driver, inspection, timeout, f"the invalidation of {text!r}")

    def recommended_workers(self, timeout: float | None = None) -> dict[str, int]:
        """Return how many workers memory allows in each pool."""
        driver = self._driver
        inspection = driver.tell(driver.session.advise)
        _wait_for_answer(driver, inspection, timeout, "the recommended number of workers")
        return inspection.workers

    def _ask_all(self, made: list[Make], timeout: float | None, what: str) -> list[Question]:
        """Ask about schedules; return when all is answered."""
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

    def flush(self, timeout: float | None = None) -> None:
        """Return when every task submitted so far is stored; raise if one was rejected unseen."""
        driver = self._driver
        driver.link.check_process()
        driver.flush(timeout)
        with driver.lock:
            error = unreported_error(driver.session)
        if error is not None:
            raise error

    def close(self, timeout: float | None = None) -> None:
        """Flush, then close the connection; handles of unfinished tasks stay unfinished."""
        self._closed = True
        if self._driver.closed:
            return
        try:
            if self._driver.usable_here:
                self.flush(timeout)
        finally:
            self._driver.close()


def _wait_for_answer(
    driver: Driver, inspection: Inspection, timeout: float | None, what: str
) -> None:
    try:
        driver.wait(lambda: inspection.answered, timeout, what)
    finally:
        if not inspection.answered:
            with driver.lock:
                driver.session.drop(inspection)
