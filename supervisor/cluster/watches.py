"""Who waits for which task, by task and by client; and which progress they know."""

from collections.abc import Iterable, Iterator

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.cluster.handling import ProgressMark

# Between two looks at tasks that others submitted, whose ends nobody tells here. Whoever waits for
# long can wait a little longer; and a look takes a twentieth of the time at most.
LOOK_NS, LOOK_NS_MAX = SECOND_NS // 20, SECOND_NS // 2
PATIENCE, RARELY = 16, 20


class Watches:
    def __init__(self) -> None:
        # With what each was told last of the task's progress.
        self._watchers: dict[str, dict[bytes, ProgressMark | None]] = {}
        self._watched: dict[bytes, dict[str, None]] = {}
        self._pairs = 0
        self._foreign: dict[str, None] = {}  # tasks that others may have submitted
        self._foreign_ns = 0  # when the newest of them was noted
        self._doubtful: dict[str, None] = {}  # tasks to look at once
        self._marks: dict[str, ProgressMark] = {}  # the newest of a task
        self._marked_ns: dict[str, int] = {}  # when that was heard

    def __len__(self) -> int:
        """Return the number of pairs of a client and a task."""
        return self._pairs

    def validate(self) -> None:
        assert self._pairs == sum(map(len, self._watchers.values()))
        assert self._pairs == sum(map(len, self._watched.values()))
        assert self._foreign.keys() | self._doubtful.keys() <= self._watchers.keys()
        assert self._marks.keys() <= self._watchers.keys()
        assert self._marks.keys() == self._marked_ns.keys()

    def add(self, peer: bytes, id_: str) -> None:
        watchers = self._watchers.setdefault(id_, {})
        if peer not in watchers:
            self._watched.setdefault(peer, {})[id_] = None
            self._pairs += 1
        watchers[peer] = None  # who asks again is told again

    def remove(self, peer: bytes, id_: str) -> bool:
        """Return whether the client waited for the task."""
        watchers = self._watchers.get(id_)
        if watchers is None or peer not in watchers:
            return False
        del watchers[peer]
        if not watchers:
            del self._watchers[id_]
            self._foreign.pop(id_, None)
            self._doubtful.pop(id_, None)
            self._marks.pop(id_, None)
            self._marked_ns.pop(id_, None)
        watched = self._watched[peer]
        del watched[id_]
        if not watched:
            del self._watched[peer]
        self._pairs -= 1
        return True

    def remove_peer(self, peer: bytes) -> None:
        for id_ in list(self._watched.get(peer, ())):
            self.remove(peer, id_)

    def peers_of(self, id_: str) -> list[bytes]:
        return list(self._watchers.get(id_, ()))

    def by_peer(self, ids: Iterable[str] | None = None) -> Iterator[tuple[bytes, list[str]]]:
        """Yield each client with those of the tasks that it waits for; None: with all of them."""
        if ids is None:
            yield from [(peer, list(watched)) for peer, watched in self._watched.items()]
            return
        found: dict[bytes, list[str]] = {}
        for id_ in ids:
            for peer in self._watchers.get(id_, ()):
                found.setdefault(peer, []).append(id_)
        yield from found.items()

    def note_mark(self, mark: ProgressMark, now_ns: int) -> list[bytes]:
        """Note the newest mark of a task; return the watchers who have not been told it."""
        watchers = self._watchers.get(mark.id, {})
        if watchers:
            self._marks[mark.id], self._marked_ns[mark.id] = mark, now_ns
        return [peer for peer in watchers if self._is_news(peer, mark)]

    def missed(self, peer: bytes, id_: str) -> ProgressMark | None:
        """Return the newest mark of a task if this watcher has not been told it."""
        mark = self._marks.get(id_)
        news = mark is not None and peer in self._watchers[id_] and self._is_news(peer, mark)
        return mark if news else None

    def has_mark(self, id_: str) -> bool:
        return id_ in self._marks

    def still_news(self, marks: Iterable[ProgressMark], asked_ns: int) -> list[ProgressMark]:
        """Return the marks of tasks of which nothing was heard since they were asked for."""
        return [mark for mark in marks if self._marked_ns.get(mark.id, -1) <= asked_ns]

    def _is_news(self, peer: bytes, mark: ProgressMark) -> bool:
        """Whether a watcher has not been told this; it is told now."""
        watchers = self._watchers[mark.id]
        before, watchers[peer] = watchers[peer], mark
        return before != mark

    # -- tasks of which no end may be heard ---------------------------------------------------

    @property
    def has_foreign(self) -> bool:
        return bool(self._foreign)

    @property
    def has_doubtful(self) -> bool:
        return bool(self._doubtful)

    def note_foreign(self, id_: str, now_ns: int) -> None:
        if id_ in self._watchers:
            self._foreign[id_] = None
            self._foreign_ns = now_ns

    def next_look_ns(self, now_ns: int, called_ns: int) -> int:
        """Return when to look at foreign tasks again, after a look that was called for then."""
        pause_ns = max((now_ns - self._foreign_ns) // PATIENCE, (now_ns - called_ns) * RARELY)
        return now_ns + min(LOOK_NS_MAX, max(LOOK_NS, pause_ns))

    def doubt(self, ids: Iterable[str] | None = None) -> None:
        """Note that these tasks, or all, may have ended unheard."""
        chosen = self._watchers if ids is None else [id_ for id_ in ids if id_ in self._watchers]
        self._doubtful.update(dict.fromkeys(chosen))

    def next_to_check(self, number: int) -> list[str]:
        """Return the tasks to look at: the doubtful ones, then foreign ones in turn."""
        chosen = self._doubtful or self._foreign
        ids = [id_ for id_, _ in zip(chosen, range(number), strict=False)]
        for id_ in ids:
            self._doubtful.pop(id_, None)
            if id_ in self._foreign:  # to the end: the others have their turn before
                del self._foreign[id_]
                self._foreign[id_] = None
        return ids
