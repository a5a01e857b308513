"""Questions to the store: asked now or when it has room, and answered later in the loop."""

from collections.abc import Callable

from msgspec import Struct

from musterd.supervisor.store import (
    Answer,
    FoundFact,
    Page,
    Purged,
    Store,
    StoredTask,
    StrandedTasks,
    Withdrawn,
)

Then = Callable[[list[StoredTask]], None]
ThenFact = Callable[[bytes | None], None]


class Question(Struct, frozen=True):
    """Something to find in the store, and what to do with the answer."""

    ask: Callable[["Question"], bool]
    then: Callable[[Answer], None]


class Questions:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[Question] = []  # the store had no room for these

    def find(self, ids: list[str], then: Then, *, attempts: bool = False) -> None:
        """Tasks by their ids, finished or not; where asked for with their failed attempts."""

        def ask(question: Question) -> bool:
            return self._store.find(ids, question, attempts=attempts)

        self._put(Question(ask, _tasks(then)))

    def list_finished(self, state: str | None, pool: str | None, limit: int, then: Then) -> None:
        """The newest finished tasks."""

        def ask(question: Question) -> bool:
            return self._store.list_finished(state, pool, limit, question)

        self._put(Question(ask, _tasks(then)))

    def list_live(self, pool: str | None, limit: int, then: Then) -> None:
        """The newest unfinished tasks."""

        def ask(question: Question) -> bool:
            return self._store.list_live(pool, limit, question)

        self._put(Question(ask, _tasks(then)))

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

        self._put(Question(lambda q: self._store.find_stranded(pool, after_seq, q), take))

    def fact(self, kind: str, key: str, then: ThenFact) -> None:
        """The value of a fact, None if there is none (any more)."""

        def take(answer: Answer) -> None:
            assert isinstance(answer, FoundFact)
            then(answer.value)

        self._put(Question(lambda question: self._store.find_fact(kind, key, question), take))

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
            question.then(answer)

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
