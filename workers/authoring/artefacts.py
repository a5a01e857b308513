"""Artefacts of one attempt: held until it ends, written to disk only where it has failed; and the
picture for the alert about a change, written where it has succeeded.

Nothing is written for an attempt that succeeds, unless a tool has to write a file itself (path()).
ipc/wire/artefacts.py says where they go and how they are bounded.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from musterd.ipc.wire.artefacts import (
    ATTACHED,
    ATTEMPT_BYTES_MAX,
    FILE_BYTES_MAX,
    FILE_NAME,
    FILES_MAX,
    Keep,
    publish,
)

Data = str | bytes
Held = Data | Callable[[], Data]  # a function makes it when the attempt has failed


class Artefacts:
    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._held: dict[str, Held] = {}
        self._staged: Path | None = None
        self.always = True  # all of them are kept whatever secrets the attempt has seen

    def hold(self, name: str, data: Held) -> None:
        """Keep this if the attempt fails, in place of what had the name before."""
        check_name(name)
        if name not in self._held and len(self._held) >= FILES_MAX:
            raise ValueError(f"artefact {name!r}: an attempt has at most {FILES_MAX}")
        if not callable(data) and len(data) > FILE_BYTES_MAX:
            raise ValueError(
                f"artefact {name!r} has {len(data)} bytes, over the limit of {FILE_BYTES_MAX}"
            )
        self._held[name] = data

    def path(self, name: str) -> Path:
        """Return where a tool may write an artefact itself."""
        check_name(name)
        return self._directory() / name

    def publish(self, task_id: str, attempt: int, redact: Callable[[str], str]) -> None:
        """Make them the artefacts of a failed attempt; OSError says why not."""
        try:
            for name, held in self._held.items():
                data = held() if callable(held) else held
                if isinstance(data, str):
                    data = redact(data).encode("utf-8", "replace")
                self._write(name, data[:FILE_BYTES_MAX])
            if self._staged is not None and self._fits(self._staged):
                publish(self._keep, task_id, attempt, self._staged, time.time_ns())
        finally:
            self.discard()

    def discard(self) -> None:
        """Forget all of them."""
        self._held.clear()
        if self._staged is not None:
            shutil.rmtree(self._staged, ignore_errors=True)
            self._staged = None

    def _directory(self) -> Path:
        if self._staged is None:
            # Passed each time: tempfile remembers the first answer for the life of the process.
            self._staged = Path(tempfile.mkdtemp("", "kept-", os.environ.get("TMPDIR") or None))
        return self._staged

    def _write(self, name: str, data: bytes) -> None:
        path = self._directory() / name
        with suppress(FileNotFoundError):
            path.unlink()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)

    def _fits(self, staged: Path) -> bool:
        """Make the directory what an attempt may have; return whether anything is left."""
        left = ATTEMPT_BYTES_MAX
        for each in sorted(staged.iterdir(), key=lambda path: path.lstat().st_size):
            size = each.lstat().st_size
            if each.is_symlink() or not each.is_file() or size > min(left, FILE_BYTES_MAX):
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each, ignore_errors=True)
                else:
                    each.unlink()
                continue
            each.chmod(0o600)
            left -= size
        return any(staged.iterdir())


def attach(keep: Keep, task_id: str, attempt: int, picture: bytes) -> None:
    """Make this the picture of a successful attempt; OSError says why not."""
    made = Artefacts(keep)
    made.hold(ATTACHED, picture)
    made.publish(task_id, attempt, str)


def check_name(name: str) -> None:
    """Raise ValueError for a name that no artefact can have."""
    if not FILE_NAME.fullmatch(name):
        raise ValueError(
            f"artefact {name!r}: give a name of at most 64 lower-case letters, digits, dots, - "
            "and _, such as 'page.html'"
        )
