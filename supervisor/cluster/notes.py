"""What is noted of attempts that run: that they have begun, and how far they are.

Nobody waits for it, so it is told together, now and then.
"""

from collections.abc import Iterable

from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire import node_messages as wire
from musterd.supervisor.cluster import engine, handling
from musterd.supervisor.cluster.handler_calls import Pair

BEGUN_NS = SECOND_NS // 5  # between two calls that tell of begun attempts
MARKS_NS = SECOND_NS  # between two reports of progress


class Notes:
    def __init__(self) -> None:
        self._begun: dict[Pair, None] = {}
        self._begun_at_ns = 0
        self._marks: dict[str, wire.AttemptProgress] = {}
        self._marking: dict[str, wire.AttemptProgress] = {}  # in the call under way
        self._marks_at_ns = 0

    def begun(self, held: Iterable[wire.Held]) -> None:
        self._begun.update({(each.id, each.claim): None for each in held})

    def marked(self, marks: Iterable[wire.AttemptProgress]) -> None:
        self._marks.update({mark.id: mark for mark in marks})

    def due_ns(self) -> int | None:
        """Return when to tell something; None: there is nothing."""
        if self._begun:
            return self._begun_at_ns
        return self._marks_at_ns if self._marks else None

    def next(self, now_ns: int) -> tuple[str, list[engine.Held] | list[handling.ProgressMark]]:
        """Return the method to call now, and its argument."""
        if self._begun:
            self._begun_at_ns = now_ns + BEGUN_NS
            begun, self._begun = self._begun, {}
            return "begun", [engine.Held(*pair) for pair in begun]
        self._marks_at_ns = now_ns + MARKS_NS
        self._marking, self._marks = self._marks, {}
        marks = [handling.ProgressMark(*structs.astuple(each)) for each in self._marking.values()]
        return "progress", marks

    def answered(self, result: object) -> None:
        """Tell again what came too early; what is newer wins."""
        early = result if isinstance(result, list) else []
        self._again({id_: self._marking[id_] for id_ in early if id_ in self._marking})

    def failed(self) -> None:
        """Tell the progress of the last call again."""
        self._again(self._marking)

    def _again(self, marks: dict[str, wire.AttemptProgress]) -> None:
        self._marks = {**marks, **self._marks}
        self._marking = {}

    def forget(self, pair: Pair) -> None:
        self._begun.pop(pair, None)
        self._marks.pop(pair[0], None)
        self._marking.pop(pair[0], None)
