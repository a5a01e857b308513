"""The last steps of the daemon: each is done, whatever became of those before."""

from collections.abc import Callable, Iterable

from musterd.ipc.errors import MusterdError
from musterd.supervisor.log import log


def do_all(steps: Iterable[Callable[[], object]]) -> bool:
    """Whether all of them succeeded; what went wrong is in the log."""
    clean = True
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the others have to be done as well
            clean = False
            kind = "" if isinstance(error, MusterdError) else f"{type(error).__name__}: "
            log.note("daemon.unclean", "error", reason=f"{kind}{error}")
    return clean
