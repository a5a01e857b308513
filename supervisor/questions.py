"""Questions to the store: asked now or when it has room, and answered later in the loop."""

from collections.abc import Callable

from msgspec import Struct

from musterd.supervisor.store import Store, StoredTask

Then = Callable[[list[StoredTask]], None]


class Question(Struct, frozen=True):
    """Something to find in the store, and what to do with the answer."""

    ask: Callable[["Question"], bool]
    then: Then


class Questions:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[Question] = []  # the store had no room for these, or could not read

    def find(self, ids: list[str], then: Then) -> None:
        """Tasks by their ids, finished or not."""
        self._put(Question(lambda question: self._store.find(ids, question), then))

    def list_finished(self, state: str | None, pool: str | None, limit: int, then: Then) -> None:
        """The newest finished tasks."""
        self._put(Question(lambda q: self._store.list_finished(state, pool, limit, q), then))

    def _put(self, question: Question) -> None:
        if not question.ask(question):
            self._waiting.append(question)

    def answer(self) -> None:
        """Hand out the answers that have come."""
        for question, found in self._store.found():
            assert isinstance(question, Question)
            if found is None:
                self._waiting.append(question)
            else:
                question.then(found)

    def repeat(self) -> None:
        """Put again what could not be asked or read."""
        waiting, self._waiting = self._waiting, []
        for question in waiting:
            self._put(question)
