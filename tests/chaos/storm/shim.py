"""The wall clock and the disk as the daemon sees them: see shim.c."""

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
PAGE = struct.Struct("2q")  # as in shim.c


class Shim:
    """A library that a daemon preloads through its environment."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        assert compiler is not None, "no C compiler: `make test` installs gcc"
        library, page = folder / "shim.so", folder / "shim.page"
        command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-o", library, SOURCE, "-ldl"]
        subprocess.run(command, check=True)
        page.write_bytes(bytes(mmap.PAGESIZE))
        page.chmod(0o644)
        library.chmod(0o755)
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_PAGE": str(page)}
        with page.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.ahead_seconds = 0.0
        self.sync_seconds = 0.0

    def set_clock(self, ahead_seconds: float) -> None:
        """Set how far the daemon's wall clock is ahead of the machine's."""
        self.ahead_seconds = ahead_seconds
        self._write()

    def slow_down(self, sync_seconds: float) -> None:
        """Set how much longer each fsync() of the daemon takes."""
        self.sync_seconds = sync_seconds
        self._write()

    def _write(self) -> None:
        PAGE.pack_into(self._map, 0, int(self.ahead_seconds * 1e9), int(self.sync_seconds * 1e9))

    def close(self) -> None:
        self._map.close()
