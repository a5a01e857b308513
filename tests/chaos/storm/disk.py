"""A small disk of its own for the daemon's state: it can be filled, and it can hang.

A file with an ext4 in it, mounted through a loop device. A disk that hangs is that file system
frozen (FIFREEZE): whoever writes to it waits in the kernel until it is thawed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

CHUNKS = (1 << 24, 1 << 20, 1 << 16, 1 << 12)  # bytes
# By a process of its own, in a session of its own: a test that is killed leaves no frozen disk.
FREEZER = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
fcntl.ioctl(fd, 0xC0045877, 0)  # FIFREEZE
try:
    print("frozen", flush=True)
    time.sleep(float(sys.argv[2]))
finally:
    fcntl.ioctl(fd, 0xC0045878, 0)  # FITHAW
"""


class Disk:
    """Mounted on `place`, which belongs to `uid` then."""

    def __init__(self, image: Path, place: Path, uid: int, megabytes: int) -> None:
        self._image = image
        self._place = place
        self._ballast = place / "ballast"
        self._freezers: list[subprocess.Popen[bytes]] = []
        place.mkdir(mode=0o700, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(megabytes * 1024 * 1024)  # takes room as it is used
        # Without reserved blocks: what is full is full for root as well.
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(place))
        place.chmod(0o700)
        os.chown(place, uid, uid)

    @staticmethod
    def missing() -> str:
        """Why there can be none here; "" if it can be tried."""
        if os.geteuid() != 0:
            return "mounting needs root"
        if shutil.which("mkfs.ext4") is None:
            return "there is no mkfs.ext4"
        return "" if Path("/dev/loop-control").exists() else "there are no loop devices"

    def fill(self) -> None:
        """To the last block."""
        with self._ballast.open("wb") as file:
            end = 0
            for chunk in CHUNKS:
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), end, chunk)
                        end += chunk

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def hang(self, seconds: float) -> None:
        """For so long nothing is written; returns as soon as that has begun."""
        command = [sys.executable, "-c", FREEZER, str(self._place), str(seconds)]
        freezer = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self._freezers.append(freezer)
        assert freezer.stdout is not None
        freezer.stdout.readline()

    def settle(self) -> None:
        """Wait until it hangs no more."""
        for freezer in self._freezers:
            freezer.wait(60)
            assert freezer.stdout is not None
            freezer.stdout.close()
        self._freezers.clear()

    def close(self) -> None:
        self.settle()
        _run("umount", str(self._place))
        self._image.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
