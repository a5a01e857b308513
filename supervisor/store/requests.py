"""Questions to the store: asked now or when it has room, and answered later in the loop.

The core asks what it must know, and is bounded by itself: one page at a time, resends as far as
core/tasks/client_limits.py lets them in. Whoever asks for others (people, handlers, clients) looks
at `full` first, and refuses or waits. Whoever asks what the store may be unable to read says what
to do then: nobody waits for an answer that never comes.
"""

from collections.abc import Callable

from msgspec import Struct

from musterd.supervisor.store.interface import (
    Answer,
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
Otherwise = Callable[[], None]  # called instead where the store cannot be read

WAITING_MAX = 1000  # questions that the store has no room for; it keeps 20,000 itself
BUSY = (
    f"{WAITING_MAX} questions wait for the store, which is slow or fails: see the problem in "
    "`musterctl status`, and try again later"
)


class Question(Struct, frozen=True):
    """Something to find in the store, and what to do with the answer."""

    ask: Callable[["Question"], bool]
    then: Callable[[Answer], None]
    otherwise: Otherwise | None = None  # None: the store answers it in any case


class StoreRequests:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[Question] = []  # the store had no room for these

    def find(
        self, ids: list[str], then: Then, otherwise: Otherwise, *, attempts: bool = False
    ) -> None:
        """Tasks by their ids, finished or not; where asked for with their failed attempts."""

        def ask(question: Question) -> bool:
            return self._store.find(ids, question, attempts=attempts)

        self._put(Question(ask, _tasks(then), otherwise))

    def find_some(
        self,
        ids: list[str],
        bytes_max: int,
        then: Callable[[Portion], None],
        otherwise: Otherwise,
        *,
        attempts: bool = False,
    ) -> None:
        """The first of these tasks, as far as they fit."""

        def ask(question: Question) -> bool:
            return self._store.find_some(ids, bytes_max, question, attempts=attempts)

        def take(answer: Answer) -> None:
            assert isinstance(answer, Portion)
            then(answer)

        self._put(Question(ask, take, otherwise))

    @property
    def full(self) -> bool:
        """Whether nobody but the core may ask more."""
        return len(self._waiting) >= WAITING_MAX

    def list_finished(
        self, state: str | None, pool: str | None, limit: int, then: Then, otherwise: Otherwise
    ) -> None:
        """The newest finished tasks."""

        def ask(question: Question) -> bool:
            return self._store.list_finished(state, pool, limit, question)

        self._put(Question(ask, _tasks(then), otherwise))

    def list_live(self, pool: str | None, limit: int, then: Then, otherwise: Otherwise) -> None:
        """The newest unfinished tasks."""

        def ask(question: Question) -> bool:
            return self._store.list_live(pool, limit, question)

        self._put(Question(ask, _tasks(then), otherwise))

    def read(self, ids: list[str], then: Callable[[Page], None]) -> None:
        """Queued tasks, to be run."""

        def take(answer: Answer) -> None:
            assert isinstance(answer, Page)
            then(answer)

        self._put(Question(lambda question: self._store.read(ids, question), take))

    def stranded(self, pool: str, after_seq: int, then: Callable[[StrandedTasks], None]) -> None:
        """The next unfinished tasks of a pool."""

        def take(answer: Answer) -> None:
            assert isinstance(answer, StrandedTasks)
            then(answer)

        def again() -> None:  # the core waits for it
            self._waiting.append(question)

        question = Question(
            lambda question: self._store.find_stranded(pool, after_seq, question), take, again
        )
        self._put(question)

    def fact(self, kind: str, key: str, then: ThenFact, otherwise: Otherwise) -> None:
        """The value of a fact, None if there is none (any more)."""

        def take(answer: Answer) -> None:
            assert isinstance(answer, FoundFact)
            then(answer.value)

        def ask(question: Question) -> bool:
            return self._store.find_fact(kind, key, question)

        self._put(Question(ask, take, otherwise))

    def withdraw(self, seqs: list[int], then: Callable[[list[int]], None]) -> None:
        """Have these new tasks left out; told are those that were not written and never will be."""

        def take(answer: Answer) -> None:
            assert isinstance(answer, Withdrawn)
            then(answer.seqs)

        self._put(Question(lambda question: self._store.withdraw(seqs, question), take))

    def purge(
        self, ids: list[str] | None, before_wall_ns: int, then: Callable[[Purged], None]
    ) -> None:
        """Have failed tasks forgotten that ended before: those of the ids, or all."""

        def take(answer: Answer) -> None:
            assert isinstance(answer, Purged)
            then(answer)

        self._put(Question(lambda q: self._store.purge(ids, before_wall_ns, q), take))

    def _put(self, question: Question) -> None:
        if not question.ask(question):
            self._waiting.append(question)

    def answer(self) -> None:
        """Hand out the answers that have come."""
        for question, answer in self._store.found():
            assert isinstance(question, Question)
            if not isinstance(answer, Unanswered):
                question.then(answer)
            else:
                assert question.otherwise is not None
                question.otherwise()

    def repeat(self) -> None:
        """Put again what could not be asked."""
        waiting, self._waiting = self._waiting, []
        for question in waiting:
            self._put(question)


def _tasks(then: Then) -> Callable[[Answer], None]:
    def take(answer: Answer) -> None:
        assert isinstance(answer, list)
        then(answer)

    return take
