"""Requests to the store: asked now or when the store has room, answered later in the loop.

The core asks what it must know and bounds itself: one page, one withdrawal, one look for stranded
tasks of a pool at a time, and as many resends as core/tasks/client_limits.py lets in. Everybody who
asks for others (people, handlers, clients) checks `full` first, and refuses or waits. A request
that may fail says what to do then: nobody waits for an answer that never comes.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from musterd.supervisor.store.interface import A, Query, Store, Unanswered

Otherwise = Callable[[], None]  # called instead when the store cannot answer

# Requests that the store has no room for; it holds 20,000 itself, about a second of work. Beyond
# this limit `full` keeps people, handlers and clients out.
WAITING_MAX = 1000
# Beyond this limit resends fail too, and their clients send them again. All clients together may
# have some 50,000 requests under way.
WAITING_LAST = 10_000
SLOW_MAX = 10_000  # slow requests that wait, such as one for each schedule that has changed
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
        self._slow: deque[Request] = deque()
        self._slow_asked = False

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

    def ask_slow(self, query: Query[A], then: Callable[[A], None], otherwise: Otherwise) -> None:
        """Ask what keeps the loop busy for some milliseconds when it is answered. One such request
        is asked at a time, so that a turn of the loop has one answer at most."""
        if self.full or len(self._slow) >= SLOW_MAX:
            otherwise()
            return
        self._slow.append(Request(query, then, otherwise))
        self._ask_next()

    def _ask_next(self) -> None:
        if self._slow_asked or not self._slow:
            return
        self._slow_asked = True
        query, then, otherwise = structs.astuple(self._slow.popleft())

        def answered(answer: object) -> None:
            self._slow_asked = False
            self._ask_next()
            then(answer)

        def failed() -> None:
            self._slow_asked = False
            self._ask_next()
            otherwise()

        self.ask(query, answered, failed)

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
