"""The files of the daemon's sockets: whether they are still there, and their removal."""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.sockets.listen import inode


class SocketFiles:
    def __init__(self, paths: Iterable[Path], held: Collection[Path] = ()) -> None:
        """Note the files of bound sockets; those in `held` belong to systemd and stay."""
        self._inodes = {path: inode(str(path)) for path in paths}
        self._held = frozenset(held)

    def lost(self) -> list[Path]:
        """Return the files that were removed or replaced: nobody can connect there any more."""
        return [path for path, made in self._inodes.items() if inode(str(path)) != made]

    def problem(self) -> str:
        """Return what is wrong and what to do, or ""."""
        lost = self.lost()
        if not lost:
            return ""
        names = ", ".join(str(path) for path in lost)
        return f"removed or replaced: {names}; nobody can connect there: stop musterd and start it"

    def remove(self) -> None:
        """Remove the files that are still the daemon's own."""
        lost = self.lost()
        for path in self._inodes.keys() - self._held:
            if path not in lost:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def binding(path: Path) -> Iterator[None]:
    """Turn errors of binding a socket into ConfigurationError."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {path}: {error.strerror or error}: remove what is in the way, and "
            "check supervisor.runtime_dir (its owner and its length)"
        ) from error
