"""Directory that holds all files of one browser, and is removed with it."""

import asyncio
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path

REMOVE_SECONDS = 5.0  # an ending process does not write for longer
POLL_SECONDS = 0.02
# Chromium makes this in its temporary directory, and exits at once if a socket's name (107 bytes)
# is too short for it. A state directory in somebody's home is too long already.
SOCKET_NAME = "org.chromium.Chromium.XXXXXX/SingletonSocket"
PATH_BYTES_MAX = 107 - len("/") - len(SOCKET_NAME)
# Then Chromium runs in that directory, and knows it by a name that is never too long.
LAUNCHER = """#!/bin/sh
cd {path} && TMPDIR=/proc/self/cwd exec {executable} "$@"
"""


class Scratch:
    """Directory in this worker's own temporary directory."""

    def __init__(self, prefix: str) -> None:
        # Passed each time: tempfile remembers the first answer for the life of the process.
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=os.environ.get("TMPDIR") or None))

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a browser keep its files here."""
        # Without the second, dumps of crashed pages gather in the user's home, 0.1 MB for each.
        return {"TMPDIR": str(self.path), "BREAKPAD_DUMP_LOCATION": str(self.path / "crashes")}

    def launcher(self, executable: str) -> str:
        """Return a command that runs this browser with this directory as its TMPDIR."""
        if len(os.fsencode(self.path)) <= PATH_BYTES_MAX:
            return executable
        script = self.path / "launch"
        words = {"path": shlex.quote(str(self.path)), "executable": shlex.quote(executable)}
        script.write_text(LAUNCHER.format(**words))
        script.chmod(0o700)
        return str(script)

    async def remove(self) -> None:
        """Remove the directory, even while an ending process still writes there."""
        deadline = time.monotonic() + REMOVE_SECONDS
        shutil.rmtree(self.path, ignore_errors=True)
        while self.path.exists() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            shutil.rmtree(self.path, ignore_errors=True)
