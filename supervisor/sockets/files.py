"""The files of our sockets: whether they are still ours, and their removal at the end."""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.sockets.listen import inode


class SocketFiles:
    def __init__(self, paths: Iterable[Path], held: Collection[Path] = ()) -> None:
        """To be called when all of them are bound. Those that are `held` outlive us."""
        self._inodes = {path: inode(str(path)) for path in paths}
        self._held = frozenset(held)

    def lost(self) -> list[Path]:
        """Those that were removed or replaced: nobody can connect there to us any more."""
        return [path for path, made in self._inodes.items() if inode(str(path)) != made]

    def problem(self) -> str:
        """What is wrong and what to do, or ""."""
        lost = self.lost()
        if not lost:
            return ""
        names = ", ".join(str(path) for path in lost)
        return f"removed or replaced: {names}; nobody can connect there: stop musterd and start it"

    def remove(self) -> None:
        """Those that are still ours."""
        lost = self.lost()
        for path in self._inodes.keys() - self._held:
            if path not in lost:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def binding(path: Path) -> Iterator[None]:
    """What goes wrong while a socket is bound is a matter of the configuration."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {path}: {error.strerror or error}: remove what is in the way, and "
            "check supervisor.runtime_dir (its owner and its length)"
        ) from error
