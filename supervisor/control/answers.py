"""Answers of control.sock that come later: by the core, the store, or when the fleet is that far.

A command that cannot answer at once returns a `Pending`. `LaterAnswers` keeps two kinds of them:

token   The command asks the core by an event and gives its token as `peer`. The core carries the
        token unread and names it in each answer (Acknowledge, Deliver, LookUp, TellMissing). This
        table alone knows what a token means.
wait    The command is answered when the fleet has reached a state; each turn of the loop looks.

Neither needs a limit of its own. Every entry belongs to a Pending of a connection and is dropped
with it, so there are at most CONNECTIONS_MAX * PENDING_MAX (server.py).
"""

from collections.abc import Callable
from itertools import count
from typing import Any

from msgspec import Struct

from musterd.ipc.wire.messages import Outcome, Rejection
from musterd.supervisor.api.rpc import FAILED, RpcError
from musterd.supervisor.core.tasks.refusals import UNREADABLE

Methods = dict[type, Callable[[Any], object]]  # the type of the parameters -> the command
Attempt = Callable[[], bool]  # answers the caller if that is possible by now; whether it did

_SHUTTING_DOWN = RpcError(FAILED, "the daemon is shutting down")


class Pending:
    """An answer that comes later. Resolve it or fail it once, in the loop's thread.

    When the caller goes away first, `abandoned` is set and `on_abandoned` is called; a later
    resolve() has no effect. When the daemon ends first, the caller gets `last_answer`.
    """

    __slots__ = ("_deliver", "_outcome", "_settled", "abandoned", "last_answer", "on_abandoned")

    def __init__(
        self,
        on_abandoned: Callable[[], object] | None = None,
        last_answer: object = _SHUTTING_DOWN,
    ) -> None:
        self.abandoned = False
        self.on_abandoned = on_abandoned
        self.last_answer = last_answer
        self._settled = False
        self._outcome: object = None
        self._deliver: Callable[[object], None] | None = None

    def resolve(self, result: object) -> None:
        if self.abandoned:
            return
        assert not self._settled, "answered twice"
        self._settled = True
        if self._deliver is None:
            self._outcome = result
        else:
            self._deliver(result)

    def fail(self, error: RpcError) -> None:
        self.resolve(error)

    def unreadable(self) -> None:
        """Tell the caller that the store cannot answer."""
        self.resolve(RpcError(FAILED, UNREADABLE))

    def bind(self, deliver: Callable[[object], None]) -> None:
        self._deliver = deliver
        if self._settled:
            deliver(self._outcome)

    def abandon(self) -> None:
        self.abandoned = True
        if self.on_abandoned is not None:
            self.on_abandoned()

    def end(self) -> None:
        """Give the last answer: the daemon ends, and nothing else will resolve this."""
        self.resolve(self.last_answer)
        self.abandon()


class Dialogue(Pending):
    """A request whose connection is a dialogue until it is answered.

    The connection sends `opening`, then what is given to say(); `heard` gets what the caller says.
    """

    __slots__ = ("_send", "heard", "opening")

    def __init__(
        self,
        opening: Struct,
        heard: Callable[[Struct], None],
        on_abandoned: Callable[[], object],
        last_answer: object = _SHUTTING_DOWN,
    ) -> None:
        super().__init__(on_abandoned, last_answer)
        self.opening = opening
        self.heard = heard
        self._send: Callable[[Struct], None] | None = None

    def begin(self, send: Callable[[Struct], None]) -> None:
        self._send = send
        send(self.opening)

    def say(self, what: Struct) -> None:
        if self._send is not None and not self.abandoned:
            self._send(what)


class CoreRequest(Struct, frozen=True, eq=False):
    """What is done with the core's answers to one request."""

    pending: Pending
    acknowledged: Callable[[list[Rejection]], None]
    ended: Callable[[Outcome], None] | None  # None: the caller does not wait for the task's end


class LaterAnswers:
    def __init__(self) -> None:
        self._requests: dict[bytes, CoreRequest] = {}
        self._tokens = count(1)
        self._waits: list[tuple[Pending, Attempt]] = []

    # -- by the core --------------------------------------------------------------------------

    def begin(
        self,
        acknowledged: Callable[[list[Rejection]], None],
        ended: Callable[[Outcome], None] | None = None,
    ) -> tuple[bytes, Pending]:
        """Return a new token and what its caller waits for.

        `acknowledged` is called with the core's answer, `ended` with the outcome of the task.
        """
        token = b"c%d" % next(self._tokens)  # never a client's name, which is a number
        pending = Pending(on_abandoned=lambda: self._requests.pop(token, None))
        self._requests[token] = CoreRequest(pending, acknowledged, ended)
        return token, pending

    def __contains__(self, token: bytes) -> bool:
        """Whether a caller of control.sock waits under this token."""
        return token in self._requests

    def acknowledge(self, token: bytes, rejected: list[Rejection]) -> None:
        """Report what the core has done of the request, and what it refused."""
        request = self._requests[token]
        if rejected or request.ended is None:
            del self._requests[token]
        request.acknowledged(rejected)

    def deliver(self, token: bytes, outcomes: list[Outcome]) -> None:
        """Pass on how the task ended, if the caller waits for that; a request has one task."""
        request = self._requests[token]
        if request.ended is not None:
            del self._requests[token]
            (outcome,) = outcomes
            request.ended(outcome)

    def fail(self, token: bytes, error: RpcError) -> None:
        """Tell the caller that its task cannot be found or read."""
        request = self._requests.pop(token, None)
        if request is not None:
            request.pending.fail(error)

    # -- by the state of the fleet ------------------------------------------------------------

    def wait(self, pending: Pending, attempt: Attempt) -> Pending:
        """Have `attempt` answer, after this turn of the loop or a later one."""
        self._waits.append((pending, attempt))
        return pending

    def settle(self) -> None:
        """After each turn of the loop: answer those that can be answered by now."""
        if self._waits:
            self._waits = [wait for wait in self._waits if not (wait[0].abandoned or wait[1]())]
