"""Client: submit tasks and get their results, from any thread."""

import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from musterd.ipc.client import history
from musterd.ipc.client.calls import Names
from musterd.ipc.client.changes import ChangeReader, Following
from musterd.ipc.client.driver import Driver
from musterd.ipc.client.handle import (
    EXIT_FLUSH_SECONDS,
    checked_seconds,
    unreported_error,
)
from musterd.ipc.client.history import KeptResult
from musterd.ipc.client.link import Link
from musterd.ipc.client.record import TaskRecord
from musterd.ipc.client.schedules import Schedules
from musterd.ipc.client.sync_submit import Submitting, TaskHandle, wait_for_answer
from musterd.ipc.client.taskspec import (
    checked_id,
    checked_invalidation,
)
from musterd.ipc.errors import HistoryUnavailable, MusterdError, UnknownSchedule
from musterd.ipc.wire.history import Entries, HistoryEntry
from musterd.ipc.wire.messages import Change, History

log = logging.getLogger("musterd.client")


class Client(Submitting):
    """Connection to the supervisor, made in the background; safe to share between threads.

    `socket` is the path of tasks.sock, by default $MUSTERD_TASKS or where this machine's daemon has
    it; or the address of a cluster, "postgresql://...". NotConnected if nobody answers within
    `connect_timeout` seconds.
    """

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, connect_timeout: float = 5.0
    ) -> None:
        self._closed = True  # until there is something to close
        seconds = checked_seconds("connect_timeout", connect_timeout)
        self._link = Link(socket)
        self._driver = Driver(self._link, seconds)
        self._names = Names(self._link.session)
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

    def task(self, task_id: str) -> TaskHandle[Any]:
        """Return the handle of a task submitted before, by this client or another."""
        session = self._driver.session
        checked_id(task_id)

        def find(now_ns: int) -> TaskRecord:
            known = session.records.get(task_id)
            if known is not None:
                return known
            handle: TaskHandle[Any] = TaskHandle(task_id, "", None, self._driver)
            session.watch(handle)
            return handle

        handle = self._driver.tell(find)
        assert isinstance(handle, TaskHandle)
        return handle

    def changes(
        self, *schedules: str, timeout: float | None = None
    ) -> ChangeReader[TaskHandle[Any]]:
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
        wait_for_answer(driver, inspection, timeout, f"the history of {question.schedule!r}")
        assert inspection.entries is not None
        return inspection.entries

    def invalidate(
        self, key: str = "", *, prefix: str | None = None, timeout: float | None = None
    ) -> None:
        """Forget the cached results of a key, or of all keys with a prefix; return when done."""
        driver, (text, many) = self._driver, checked_invalidation(key, prefix)
        inspection = driver.tell(lambda now_ns: driver.session.invalidate(now_ns, text, many))
        wait_for_answer(driver, inspection, timeout, f"the invalidation of {text!r}")

    def recommended_workers(self, timeout: float | None = None) -> dict[str, int]:
        """Return how many workers memory allows in each pool."""
        driver = self._driver
        inspection = driver.tell(driver.session.advise)
        wait_for_answer(driver, inspection, timeout, "the recommended number of workers")
        return inspection.workers

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
