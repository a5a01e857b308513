"""A small disk for the daemon's state, which tests can fill and hang.

The disk is a file with an ext4 in it, mounted through a loop device. To hang it, the file system is
frozen (FIFREEZE): every writer waits in the kernel until it is thawed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

CHUNKS = (1 << 24, 1 << 20, 1 << 16, 1 << 12)  # bytes
# Thawed by a process in its own session: a test that is killed leaves no frozen disk.
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
    """A disk mounted on `place`, which then belongs to `uid`."""

    def __init__(self, image: Path, place: Path, uid: int, megabytes: int) -> None:
        self._image = image
        self._place = place
        self._ballast = place / "ballast"
        self._freezers: list[subprocess.Popen[bytes]] = []
        place.mkdir(mode=0o700, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(megabytes * 1024 * 1024)  # uses space only as it is written
        # Without reserved blocks: a full disk is full for root, too.
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(place))
        place.chmod(0o700)
        os.chown(place, uid, uid)

    @staticmethod
    def missing() -> str:
        """Say why no disk can be made here; "" if it can be tried."""
        if os.geteuid() != 0:
            return "mounting needs root"
        if shutil.which("mkfs.ext4") is None:
            return "there is no mkfs.ext4"
        return "" if Path("/dev/loop-control").exists() else "there are no loop devices"

    def fill(self) -> None:
        """Fill the disk to the last block."""
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
        """Hang the disk for that long; return as soon as it hangs."""
        command = [sys.executable, "-c", FREEZER, str(self._place), str(seconds)]
        freezer = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self._freezers.append(freezer)
        assert freezer.stdout is not None
        freezer.stdout.readline()

    def settle(self) -> None:
        """Wait until the disk hangs no more."""
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
