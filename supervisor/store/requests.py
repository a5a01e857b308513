"""Requests to the store: asked now or when the store has room, answered later in the loop.

The core asks what it must know and bounds itself: one page, one withdrawal, one look for stranded
tasks of a pool at a time, and as many resends as core/tasks/client_limits.py lets in. Everybody who
asks for others (people, handlers, clients) checks `full` first, and refuses or waits. A request
that may fail says what to do then: nobody waits for an answer that never comes.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from musterd.supervisor.store.interface import (
    FoundFact,
    Page,
    Portion,
    Purged,
    Store,
    StoredTask,
    StrandedTasks,
    Unanswered,
    Withdrawn,
)

Then = Callable[[list[StoredTask]], None]
ThenFact = Callable[[bytes | None], None]
Otherwise = Callable[[], None]  # called instead when the store cannot answer

# Requests that the store has no room for; it holds 20,000 itself, about a second of work. Beyond
# this limit `full` keeps people, handlers and clients out.
WAITING_MAX = 1000
# Beyond this limit resends fail too, and their clients send them again. All clients together may
# have some 50,000 requests under way.
WAITING_LAST = 10_000
BUSY = (
    f"{WAITING_MAX} requests wait for the store, which is slow or fails: see the problem in "
    "`musterctl status`, and try again later"
)


class Request(Struct, frozen=True):
    """A call of the store, and what to do with its answer."""

    ask: Callable[["Request"], bool]
    kind: type  # of the answer
    then: Callable[[Any], None]
    otherwise: Otherwise | None = None  # None: the store always takes and answers this request


class StoreRequests:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[Request] = []  # the store had no room for these

    @property
    def full(self) -> bool:
        """Tell whether the core alone may ask more."""
        return len(self._waiting) >= WAITING_MAX

    def find(
        self, ids: list[str], then: Then, otherwise: Otherwise, *, attempts: bool = False
    ) -> None:
        """Look up tasks by their ids, finished or not; on request with their failed attempts."""

        def ask(request: Request) -> bool:
            return self._store.find(ids, request, attempts=attempts)

        self._put(Request(ask, list, then, otherwise))

    def find_some(
        self,
        ids: list[str],
        bytes_max: int,
        then: Callable[[Portion], None],
        otherwise: Otherwise,
        *,
        attempts: bool = False,
    ) -> None:
        """Look up the first of these tasks, as many as fit into `bytes_max`."""

        def ask(request: Request) -> bool:
            return self._store.find_some(ids, bytes_max, request, attempts=attempts)

        self._put(Request(ask, Portion, then, otherwise))

    def list_finished(
        self, state: str | None, pool: str | None, limit: int, then: Then, otherwise: Otherwise
    ) -> None:
        """List the newest finished tasks."""

        def ask(request: Request) -> bool:
            return self._store.list_finished(state, pool, limit, request)

        self._put(Request(ask, list, then, otherwise))

    def list_live(self, pool: str | None, limit: int, then: Then, otherwise: Otherwise) -> None:
        """List the newest unfinished tasks."""

        def ask(request: Request) -> bool:
            return self._store.list_live(pool, limit, request)

        self._put(Request(ask, list, then, otherwise))

    def read(self, ids: list[str], then: Callable[[Page], None]) -> None:
        """Read queued tasks, to be run."""
        self._put(Request(lambda request: self._store.read(ids, request), Page, then))

    def stranded(self, pool: str, after_seq: int, then: Callable[[StrandedTasks], None]) -> None:
        """Read the next unfinished tasks of a pool."""

        def ask(request: Request) -> bool:
            return self._store.find_stranded(pool, after_seq, request)

        def again() -> None:  # the core waits for the answer
            self._waiting.append(request)

        request = Request(ask, StrandedTasks, then, again)
        self._put(request)

    def fact(self, kind: str, key: str, then: ThenFact, otherwise: Otherwise) -> None:
        """Look up the value of a fact; None if there is none (any more)."""

        def ask(request: Request) -> bool:
            return self._store.find_fact(kind, key, request)

        def found(fact: FoundFact) -> None:
            then(fact.value)

        self._put(Request(ask, FoundFact, found, otherwise))

    def withdraw(self, seqs: list[int], then: Callable[[list[int]], None]) -> None:
        """Leave out new tasks; `then` gets those that were not written and never will be."""

        def withdrawn(answer: Withdrawn) -> None:
            then(answer.seqs)

        self._put(
            Request(lambda request: self._store.withdraw(seqs, request), Withdrawn, withdrawn)
        )

    def purge(
        self,
        ids: list[str] | None,
        before_wall_ns: int,
        then: Callable[[Purged], None],
        otherwise: Otherwise,
    ) -> None:
        """Forget failed tasks that ended before this time: those of the ids, or all."""

        def ask(request: Request) -> bool:
            return self._store.purge(ids, before_wall_ns, request)

        self._put(Request(ask, Purged, then, otherwise))

    def _put(self, request: Request) -> None:
        if request.ask(request):
            return
        if len(self._waiting) < WAITING_LAST:
            self._waiting.append(request)
        else:
            self._fail(request)

    def _fail(self, request: Request) -> None:
        assert request.otherwise is not None, "the store always takes and answers this request"
        request.otherwise()

    def answer(self) -> None:
        """Hand out the answers that have come."""
        for request, answer in self._store.found():
            assert isinstance(request, Request)
            if isinstance(answer, Unanswered):
                self._fail(request)
            else:
                assert isinstance(answer, request.kind)
                request.then(answer)

    def repeat(self) -> None:
        """Ask again what the store had no room for."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._put(request)
