"""Throw-away machines with a real systemd: made once, booted many times, gone without a trace.

A `Workshop` is a mount namespace with a tmpfs in it, held by one process. In the workshop, `Image`
lays a writable layer over this machine's own files, or over those of another Debian (tree.sh), and
installs musterd into the layer. A `Machine` boots systemd over the image, with a layer and PID,
network and cgroup namespaces of its own. bed.sh hides this machine's /run and users, and all that
is stored in /var/lib, configured in systemd or installed by hand, above all a musterd. The holder
ends with the test process, and everything ends with the holder: the kernel removes the mounts, and
the processes die with the machine's PID 1.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).with_name("bed.sh")
# Commands that bed.sh calls outside of the machine.
COMMANDS = (
    "unshare",
    "nsenter",
    "mount",
    "mountpoint",
    "pivot_root",
    "setpriv",
    "tar",
    "chroot",
    "awk",
)
# Programs that run in the machine.
PROGRAMS = ("lib/systemd/systemd", "usr/bin/dbus-daemon", "usr/bin/make")
BOOT_SECONDS = 60.0
END_SECONDS = 20.0
RUN_SECONDS = 300.0
IMAGE_SECONDS = 900.0
INSIDE = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}

Done = subprocess.CompletedProcess[str]


class BedError(Exception):
    """The machine could not be made."""


def missing(tree: Path = Path("/")) -> str:
    """Say why no machine can be made of the files below `tree` here; "" if one can."""
    if os.geteuid() != 0:
        return "it takes root to boot a systemd"
    lacking = [name for name in COMMANDS if shutil.which(name) is None]
    if lacking:
        return f"commands are missing: {', '.join(lacking)}"
    for program in PROGRAMS:
        if not (tree / program).exists():
            return f"{tree / program} is missing"
    known = Path("/proc/filesystems").read_text()
    for kind in ("overlay", "cgroup2"):
        if f"\t{kind}\n" not in known:
            return f"this kernel has no {kind}"
    tried = subprocess.run(
        ["unshare", *["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "true"]],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        return f"namespaces are refused here: {tried.stderr.strip()}"
    return ""


class Workshop:
    """The namespace in which images and machines live."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="musterd-bed-"))
        held = 'mount -t tmpfs -o mode=755 bed "$1"; mkdir "$1/cgroup"; '
        held += 'mount -t cgroup2 cgroup2 "$1/cgroup"; echo held; read -r _'
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-euc"]
        self._holder = subprocess.Popen(
            [*enter, held, "sh", str(self.folder)],
            stdin=subprocess.PIPE,  # closed when we end; then the holder ends
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "held\n":
            self.close()
            raise BedError("no mount namespace could be made")

    def inside(self, *words: str) -> list[str]:
        """Return a command line that runs these words in the namespace."""
        return ["nsenter", "--target", str(self._holder.pid), "--mount", "--", *words]

    def path(self, below: str) -> Path:
        """Return the path of a file of the namespace as we see it."""
        return Path(f"/proc/{self._holder.pid}/root{self.folder}", below)

    def close(self) -> None:
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._holder.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        self.folder.rmdir()


def left_of(shop: Workshop) -> list[str]:
    """Return the remains of a closed workshop on this machine: there should be none."""
    left = [str(shop.folder)] if shop.folder.exists() else []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if str(shop.folder) in (process / "cmdline").read_text():
                left.append(f"process {process.name}")
    left += [line for line in _mounts() if str(shop.folder) in line]
    with tempfile.TemporaryDirectory() as place:
        look = 'mount -t cgroup2 cgroup2 "$1"; ls -d "$1"/musterd-bed-"$2"-* 2>/dev/null || true'
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-euc"]
        left += subprocess.run(
            [*enter, look, "sh", place, str(os.getpid())],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    return left


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


class Image:
    """The files of a system with something installed on top of them."""

    def __init__(self, shop: Workshop, source: Path, command: str, tree: Path = Path("/")) -> None:
        self.shop = shop
        self.tree = tree
        self.folder = shop.folder / "image"
        make = ("image", str(self.folder), str(tree), str(source), command)
        self.done = subprocess.run(
            shop.inside("bash", str(SCRIPT), *make),
            capture_output=True,
            text=True,
            timeout=IMAGE_SECONDS,
            check=False,
        )
        if self.done.returncode != 0:
            raise BedError(f"{command}: {self.done.stdout}\n{self.done.stderr}")


class Machine:
    """A booted systemd."""

    _made = 0

    def __init__(self, image: Image) -> None:
        Machine._made += 1
        self._shop = image.shop
        name = f"machine-{Machine._made}"
        self._folder = image.shop.folder / name
        self._group = f"musterd-bed-{os.getpid()}-{Machine._made}"
        self._shop.path(f"cgroup/{self._group}").mkdir()
        group = str(self._shop.folder / "cgroup" / self._group)
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by down()
        boot = ("boot", str(self._folder), str(image.tree), str(image.folder), group)
        self._booter = subprocess.Popen(
            # When we are killed, the machine is killed, too.
            [*["setpriv", "--pdeathsig", "KILL"], *self._shop.inside("bash", str(SCRIPT), *boot)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._first = 0  # the machine's PID 1, as we see it
        try:
            self._wait_until_up()
        except BaseException:
            self.down()
            raise

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            if self._booter.poll() is not None:
                break
            self._first = self._first or self._find_first()
            bus = Path(f"/proc/{self._first}/root/run/dbus/system_bus_socket")
            if self._first and bus.exists():
                state = self.run("systemctl", "is-system-running", "--wait", check=False).stdout
                if state.strip() in ("running", "degraded"):
                    return
            time.sleep(0.02)
        self._log.seek(0)
        raise BedError(f"the machine did not boot: {self._log.read()}")

    def _find_first(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            children = Path(f"/proc/{self._booter.pid}/task/{self._booter.pid}/children")
            for child in children.read_text().split():
                if os.readlink(f"/proc/{child}/exe").endswith("/systemd"):
                    return int(child)
        return 0

    # -- using it -----------------------------------------------------------------------------

    def command(self, *words: str, user: str = "") -> list[str]:
        """Return a command line that runs these words in the machine."""
        assert self._first, "it is not up"
        enter = [
            "nsenter",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--cgroup",
            "--root",
            "--wd",
        ]
        variables = [f"{key}={value}" for key, value in INSIDE.items()]
        who = ["runuser", "-u", user, "--"] if user else []
        return [*enter, "--target", str(self._first), "env", "-i", *variables, *who, *words]

    def run(
        self, *words: str, user: str = "", check: bool = True, timeout: float = RUN_SECONDS
    ) -> Done:
        """Run a command in the machine, as root unless a user is named."""
        done = subprocess.run(
            self.command(*words, user=user),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def popen(self, *words: str, user: str = "") -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(*words, user=user),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def file(self, path: str) -> Path:
        """Return the path of a file as we see it; do not follow its symbolic links from here."""
        return Path(f"/proc/{self._first}/root{path}")

    def write(self, path: str, text: str) -> None:
        self.file(path).parent.mkdir(parents=True, exist_ok=True)
        self.file(path).write_text(text)

    def show(self, unit: str, key: str) -> str:
        """Return one property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", key, unit).stdout.strip()

    def properties(self, unit: str, *keys: str) -> list[str]:
        """Return several properties of a unit, in the order of their names."""
        words = [word for key in keys for word in ("-p", key)]
        lines = self.run("systemctl", "show", *words, unit).stdout.splitlines()
        found = dict(line.split("=", 1) for line in lines)
        return [found[key] for key in keys]

    def journal(self, *words: str) -> str:
        return self.run("journalctl", "--no-pager", "-o", "cat", *words, check=False).stdout

    def processes(self) -> Iterator[tuple[int, str]]:
        """Return the pids, as the machine sees them, and command lines of all its processes."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                if f"/{self._group}/" in (process / "cgroup").read_text():
                    arguments = (process / "cmdline").read_text().replace("\0", " ").strip()
                    status = (process / "status").read_text()
                    pids = status.partition("NSpid:")[2].partition("\n")[0].split()
                    if arguments:  # none: a zombie
                        yield int(pids[1]), arguments

    # -- shutdown -----------------------------------------------------------------------------

    def down(self) -> None:
        """End the machine in any state."""
        if self._booter.poll() is None:
            # Killing PID 1 of a namespace kills every process in it.
            for pid in filter(None, (self._first or self._find_first(), self._booter.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._booter.wait(END_SECONDS)
        self._log.close()
        self._remove_group()
        subprocess.run(self._shop.inside("umount", "-R", "-l", f"{self._folder}/root"), check=False)
        subprocess.run(self._shop.inside("rm", "-rf", str(self._folder)), check=False)

    def _remove_group(self) -> None:
        top = self._shop.path(f"cgroup/{self._group}")
        deadline = time.monotonic() + END_SECONDS
        while top.exists() and time.monotonic() < deadline:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # a process of the machine is still ending
                    os.rmdir(folder)
            time.sleep(0.01)
