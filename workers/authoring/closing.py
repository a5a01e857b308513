"""End of a worker: its close(), and the clean-ups that its code registered.

    on_close(connection.close)            in a module of functions, or anywhere
    self.on_close(shutil.rmtree, folder)  in open() or in a handler

Clean-ups run last first, because later things may need earlier ones: those registered since open()
began, then close(), then those registered by the import. Each is tried even if others fail, and its
error is logged. All of them share `stop_timeout`; each may use an equal share of the time left,
then CloseTimeout is raised in it and the next one runs.
"""

import logging
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from msgspec import Struct

from musterd.workers.authoring import forks
from musterd.workers.authoring.clock import Clock, SystemClock

CALLBACKS_MAX = 1000  # more are registered by mistake, once for each task
# Of the time the supervisor gives us: results and the end of the interpreter need some of it too.
USABLE_SHARE = 0.9
BUDGET_SECONDS = 5.0  # where the supervisor has not said how long we have
BUDGET_SECONDS_MIN = 0.1

F = TypeVar("F", bound=Callable[..., Any])
Await = Callable[[Any], Any]  # returns the value, awaited if necessary

log = logging.getLogger("musterd.worker")


class CloseTimeout(BaseException):
    """Raised in a clean-up that has used up its time.

    Not an Exception, so that `except Exception` does not swallow it.
    """


class Callback(Struct, frozen=True):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", repr(self.function)))


_registered: list[Callback] = []


def on_close(function: F, /, *args: Any, **kwargs: Any) -> F:
    """Call the function with these arguments when the worker ends; return the function.

    The function may be async. It is not called when the worker is killed. A function registered
    by the import of a module is called in every worker made of it.
    """
    if not callable(function):
        raise TypeError(f"on_close({function!r}): give a function")
    if len(_registered) >= CALLBACKS_MAX:
        raise RuntimeError(
            f"on_close: {CALLBACKS_MAX} callbacks are registered already: register each of them "
            "once, in open() or at import, not in every task"
        )
    _registered.append(Callback(function, args, kwargs))
    return function


def count() -> int:
    """Return the number of registered functions."""
    return len(_registered)


def exchange(callbacks: list[Callback]) -> list[Callback]:
    """Register these functions in place of all others; return the others."""
    others = _registered[:]
    _registered[:] = callbacks
    return others


class Closing:
    """Run registered functions, each for its share of the time."""

    def __init__(self, await_: Await, budget_ns: int, clock: Clock | None = None) -> None:
        self._await = await_
        self._clock = clock or SystemClock()
        budget = budget_ns / 1e9 * USABLE_SHARE if budget_ns else BUDGET_SECONDS * USABLE_SHARE
        self._end = self._now() + max(budget, BUDGET_SECONDS_MIN)
        self._window = False  # whether a clean-up's code runs
        self._clock.on_alarm(self._time_is_over)

    def _now(self) -> float:
        return self._clock.now_ns() / 1e9

    def run(self, *, since: int, close: Callable[[], Any] | None) -> BaseException | None:
        """Run all, those before number `since` after close(); return the error of close()."""
        later, earlier = _registered[since:], _registered[:since]
        _registered.clear()
        steps: list[Callback] = later[::-1]
        if close is not None:
            steps += [Callback(close, (), {}), *earlier[::-1]]
        problem: BaseException | None = None
        for number, step in enumerate(steps):
            share = (self._end - self._now()) / (len(steps) - number)
            error = self._try(step, max(share, BUDGET_SECONDS_MIN))
            if error is None:
                continue
            if step.function is close:
                problem = error
            else:
                log.error("clean-up %s failed", step.name, exc_info=error)
        self._clock.on_alarm(None)
        return problem

    def _try(self, step: Callback, seconds: float) -> BaseException | None:
        try:
            try:
                self._window = True
                self._clock.set_alarm(seconds)
                self._await(step())
            finally:
                self._window = False
                self._clock.set_alarm(0)
            forks.leave_if_child()
        except CloseTimeout:
            return CloseTimeout(f"{step.name} took longer than its share of {seconds:.1f} s")
        except BaseException as error:  # noqa: BLE001 - also a sys.exit(): the others follow
            forks.leave_if_child(error)
            return error
        return None

    def _time_is_over(self, _number: int, _frame: FrameType | None) -> None:
        if self._window:
            self._window = False
            raise CloseTimeout
