"""Give a worker under test the time of its own clock: `time.sleep()` and all that tell the time.

While code of a worker runs, the functions of the module `time` and the names that other modules
have imported of it ask the clock of that worker, in its thread. Other threads, and all code when no
worker runs, see Python's own time. `time.perf_counter()` stays as it is: it measures, nobody waits
by it. `datetime.now()` stays as well: it cannot be replaced.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FrameType
from typing import Any, Protocol


class Timed(Protocol):
    """Somebody with a clock of his own."""

    thread: int

    def now_ns(self) -> int: ...
    def wall_ns(self) -> int: ...
    def sleep(self, seconds: float, frame: FrameType) -> None: ...


_running: list[Timed] = []  # the last one runs; it may have interrupted the others

_sleep, _monotonic, _monotonic_ns = time.sleep, time.monotonic, time.monotonic_ns
_time, _time_ns = time.time, time.time_ns


def running() -> Timed | None:
    """Return whose code runs, in whatever thread."""
    return _running[-1] if _running else None


def _here() -> Timed | None:
    """Return whose code runs in this thread."""
    if _running and _running[-1].thread == threading.get_ident():
        return _running[-1]
    return None


def sleep(seconds: float, /) -> None:
    here = _here()
    if here is None or not seconds >= 0:  # Python's own says what is wrong
        _sleep(seconds)
        return
    try:
        here.sleep(float(seconds), sys._getframe(1))
    except BaseException as error:  # noqa: BLE001 - a timeout struck: here, not in our code
        raise error.with_traceback(None) from None


def monotonic() -> float:
    here = _here()
    return _monotonic() if here is None else here.now_ns() / 1e9


def monotonic_ns() -> int:
    here = _here()
    return _monotonic_ns() if here is None else here.now_ns()


def time_() -> float:
    here = _here()
    return _time() if here is None else here.wall_ns() / 1e9


def time_ns() -> int:
    here = _here()
    return _time_ns() if here is None else here.wall_ns()


_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    _sleep: sleep,
    _monotonic: monotonic,
    _monotonic_ns: monotonic_ns,
    _time: time_,
    _time_ns: time_ns,
}
_OURS = ("musterd.workers",)  # of our own modules, those that are a worker's
_THEIRS = frozenset(("musterd", "_pytest", "pytest", "pluggy", "xdist", "execnet", "coverage"))

# The names of each module, with those that stand for one of these functions.
_places: dict[str, tuple[dict[str, Any], list[str]]] = {}
_found: list[tuple[dict[str, Any], str]] = []
_modules = (0, "")  # how many there were at the last look, and the last of them


@contextmanager
def time_of(timed: Timed) -> Iterator[None]:
    """Give this one's time to the code that runs in the block."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    if not _running:
        undo = [(names, name, names.get(name)) for names, name in _find_places()]
        for names, name, function in undo:
            if _is_replaced(function):  # nobody has put something else there
                names[name] = _REPLACED[function]
    _running.append(timed)
    try:
        yield
    finally:
        _running.remove(timed)
        for names, name, function in undo:
            if _is_replaced(function) and names.get(name) is _REPLACED[function]:
                names[name] = function


def _find_places() -> list[tuple[dict[str, Any], str]]:
    """Return what is to be replaced; each module is looked through once."""
    global _found, _modules
    modules = len(sys.modules), next(reversed(sys.modules))
    if _modules == modules:
        return _found
    _modules = modules
    found = []
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict:
            continue
        known = _places.get(module_name)
        if known is None or known[0] is not names:
            known = (names, _places_in(names) if _is_looked_at(module_name) else [])
            _places[module_name] = known
        found += [(names, name) for name in known[1]]
    _found = found
    return found


def _is_looked_at(name: str) -> bool:
    top = name.partition(".")[0]
    if name == "time" or name.startswith(_OURS):
        return True
    return top not in _THEIRS and top not in sys.stdlib_module_names


def _places_in(names: dict[str, Any]) -> list[str]:
    return [name for name, value in list(names.items()) if _is_replaced(value)]


def _is_replaced(value: Any) -> bool:
    return type(value) is BuiltinFunctionType and value in _REPLACED
