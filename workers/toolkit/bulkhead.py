"""Limit how many calls of a kind run at once, so that one kind cannot starve another.

    @bulkhead("background", limit=5)
    def tidy(): ...

The limit belongs to the name: all functions with that name share it, sync or async, in any thread
and any event loop of this process. Places are given first come, first served.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from musterd.ipc.errors import MusterdError
from musterd.workers.toolkit import counts, functions
from musterd.workers.toolkit.gate import Gates, GateStatus, Permit

P = ParamSpec("P")
R = TypeVar("R")

_gates = Gates("bulkhead")


class BulkheadFull(MusterdError):
    """The bulkhead had no free place in time."""

    def __init__(self, name: str, limit: int, timeout: float) -> None:
        super().__init__(
            f"bulkhead {name!r} is full: {limit} at once, and no place within {timeout:g} s; "
            "come back later or raise its limit"
        )
        self.name = name
        self.limit = limit


class bulkhead:
    """Allow at most `limit` calls at once under this name; others wait up to `timeout` seconds.

    The name may be a function of the arguments. Without a timeout a call waits for a place until
    the task's own time is over; with 0 it does not wait.
    """

    def __init__(
        self,
        name: str | Callable[..., str],
        limit: int = 0,
        timeout: float | timedelta | None = None,
    ) -> None:
        if not limit and callable(name):
            raise TypeError(
                f"write @bulkhead(NAME, limit=N) above {functions.name_of(name)}: it has no limit"
            )
        self._name = name
        self._limit = functions.count("bulkhead: limit", limit, least=1)
        self._timeout: float | None = None
        if timeout is not None:
            self._timeout = functions.seconds("bulkhead: timeout", timeout, zero=True)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        awaits = functions.is_async("bulkhead", function)
        call: Callable[..., Any] = function
        name = functions.namer("bulkhead: name", self._name, function)

        async def limited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            permit = Permit(name(args, kwargs))
            try:
                if awaits:
                    entered = await _gates.enter_async(permit, self._limit, self._timeout)
                else:
                    entered = _gates.enter(permit, self._limit, self._timeout)
                if not entered:
                    raise self._full(permit)
                counts.bulkhead_entered(permit.name)
                value = call(*args, **kwargs)
                return await value if awaits else value
            finally:
                _gates.leave(permit)

        return functions.wrapped(function, limited, awaits=awaits)

    @staticmethod
    def states() -> dict[str, GateStatus]:
        """Return the bulkheads in use: limit, used, waiting."""
        return _gates.status()

    def _full(self, permit: Permit) -> BulkheadFull:
        counts.bulkhead_refused(permit.name)
        return BulkheadFull(permit.name, self._limit, self._timeout or 0.0)
