"""What tests of faults need beside nodes: a standby, a network to cut, a disk to fill, a clock."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from postgres import PORT, Server

from support.daemon import Muster
from support.waiting import wait_for


class Standby(Server):
    """A standby of a server, with the same settings."""

    def __init__(self, primary: Server, folder: Path) -> None:
        self.folder = folder
        self._data = folder / "data"
        self._user = primary._user
        self._log = folder / "log"
        self._process = None
        source = f"host={primary.folder} port={PORT} user=postgres application_name=standby"
        self._run("pg_basebackup", "-D", str(self._data), "-R", "-X", "stream", "-d", source)
        with (self._data / "postgresql.auto.conf").open("a") as config:
            config.write(f"unix_socket_directories = '{folder}'\n")

    def promote(self) -> None:
        """Become the primary. Nobody stands by for the new one."""
        self.execute("SELECT pg_promote()")
        self.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
        self.execute("SELECT pg_reload_conf()")


@contextmanager
def standby_of(primary: Server) -> Iterator[Standby]:
    """A synchronous standby that is up."""
    folder = Path(tempfile.mkdtemp(prefix="musterd-pg-"))
    if primary._user is not None:
        shutil.chown(folder, primary._user)
    standby = Standby(primary, folder)
    try:
        standby.start()
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
        primary.execute("SELECT pg_reload_conf()")
        look = "SELECT FROM pg_stat_replication WHERE sync_state = 'sync'"
        wait_for("it stands by", lambda: primary.execute(look))
        yield standby
    finally:
        standby.stop()
        shutil.rmtree(folder)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def namespace(name: str) -> Iterator[tuple[str, str]]:
    """A network namespace with a cable `md-out` to this one; yields the addresses of both ends."""
    inside, outside = "198.51.100.2", "198.51.100.1"
    ip("netns", "add", name)
    try:
        ip("link", "add", "md-out", "type", "veth", "peer", "name", "md-in", "netns", name)
        ip("address", "add", f"{outside}/30", "dev", "md-out")
        ip("link", "set", "md-out", "up")
        ip("-n", name, "address", "add", f"{inside}/30", "dev", "md-in")
        ip("-n", name, "link", "set", "md-in", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield inside, outside
    finally:
        ip("netns", "delete", name)


def allow(server: Server, address: str) -> None:
    """Let a server be used from an address."""
    with (server._data / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all all {address}/32 trust\n")
    server.execute("SELECT pg_reload_conf()")


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 250 MB in memory, which others than root may reach."""
    folder.mkdir()
    for each in (folder, *folder.parents):
        if each.stat().st_uid == 0 and each != Path("/"):
            each.chmod(each.stat().st_mode | 0o055)
    mount = ["mount", "-t", "tmpfs", "-o", "size=250m", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M"]
    subprocess.run(command, capture_output=True, check=False)


def shift_clock(node: Muster, seconds: int) -> None:
    """Have the wall clock of all processes of a node be another, from the next start on."""
    node.tune("time")
    with (node.folder / "sitecustomize.py").open("a") as file:
        file.write(
            "import time as _time\n"
            "_seconds, _ns = _time.time, _time.time_ns\n"
            f"_time.time = lambda: _seconds() + {seconds}\n"
            f"_time.time_ns = lambda: _ns() + {seconds} * 10**9\n"
        )
