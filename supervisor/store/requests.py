"""Requests to the store: asked now or when the store has room, answered later in the loop.

The core asks what it must know and bounds itself: one page, one withdrawal, one look for stranded
tasks of a pool at a time, and as many resends as core/tasks/client_limits.py lets in. Everybody who
asks for others (people, handlers, clients) checks `full` first, and refuses or waits. A request
that may fail says what to do then: nobody waits for an answer that never comes.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from musterd.supervisor.store.interface import A, Query, Store, Unanswered

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
    """A query, and what to do with its answer."""

    query: Query[Any]
    then: Callable[[Any], None]
    otherwise: Otherwise | None


class StoreRequests:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[Request] = []  # the store had no room for these

    @property
    def full(self) -> bool:
        """Tell whether the core alone may ask more."""
        return len(self._waiting) >= WAITING_MAX

    def ask(
        self, query: Query[A], then: Callable[[A], None], otherwise: Otherwise | None = None
    ) -> None:
        """Have `then` called with the answer. Without `otherwise` the query is asked until it is
        answered: the core waits for it."""
        self._put(Request(query, then, otherwise))

    def _put(self, request: Request) -> None:
        if self._store.ask(request.query, request):
            return
        if len(self._waiting) < WAITING_LAST:
            self._waiting.append(request)
        else:
            self._fail(request)

    def _fail(self, request: Request) -> None:
        if request.otherwise is None:
            self._waiting.append(request)
        else:
            request.otherwise()

    def answer(self) -> None:
        """Hand out the answers that have come."""
        for request, answer in self._store.found():
            assert isinstance(request, Request)
            if isinstance(answer, Unanswered):
                self._fail(request)
            else:
                request.then(answer)

    def repeat(self) -> None:
        """Ask again what the store had no room for."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._put(request)
