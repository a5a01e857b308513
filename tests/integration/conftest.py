"""A worker module with everything the tests want to happen, put beside the daemon; a way to see
whether a tree of processes is gone; and the pages of the documentation, put to work."""

import contextlib
import os
import re
import select
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this file

from musterd.ipc.errors import SpawnError
from musterd.supervisor.processes.cgroups import own_group

sys.path.insert(0, str(Path(__file__).parent))  # for the stand-ins beside this file

GONE_SECONDS_MAX = 20.0

JOBS = """
import asyncio, os, sys, time
from pathlib import Path
from musterd import Permanent, Retry, Worker, task

class Jobs(Worker):
    def open(self):
        self.count = 0

    @task
    def echo(self, ctx, value: object = None) -> object:
        return value

    @task
    async def aecho(self, ctx, value: object = None) -> object:
        await asyncio.sleep(0)
        return value

    @task
    def nap(self, ctx, seconds: float, tell: str = "") -> int:
        if tell:
            with open(tell, "a") as f:
                f.write(f"{ctx.task_id} {os.getpid()}\\n")
        time.sleep(seconds)
        return self.index

    @task
    def die(self, ctx, signal: int = 9, unless: str = "") -> str:
        if unless and Path(unless).exists():
            return "spared"
        if unless:
            Path(unless).touch()
        os.kill(os.getpid(), signal)
        time.sleep(10)

    @task(max_retries=0)
    def fail(self, ctx, text: str) -> None:
        raise ValueError(text)

    @task(max_retries=5)
    def flaky(self, ctx, path: str, times: int) -> int:
        with open(path, "a") as f:
            f.write(f"{ctx.attempt}\\n")
        if ctx.attempt <= times:
            raise Retry(after=0.01)
        return ctx.attempt

    @task(timeout=0.3, max_retries=0)
    def deaf(self, ctx) -> None:
        sum(range(10**12))      # never looks at signals nor leaves the interpreter's lock

    @task
    def stamp(self, ctx) -> int:
        return time.monotonic_ns()

    @task
    def orphans(self, ctx) -> str:
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                import signal
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
                os._exit(0)
        Path(os.environ["TMPDIR"], "left").write_text("x" * 1000)
        return os.environ["TMPDIR"]
"""


@pytest.fixture
def jobs(muster: Callable[..., Any]) -> Callable[..., Any]:
    """jobs(size=2, ...) -> a daemon whose pool `jobs` runs the tasks above."""

    def make(
        size: int = 2, *, pool: dict[str, Any] | None = None, start: bool = True, **settings: Any
    ) -> Any:
        pools = {"jobs": {"worker": "jobs:Jobs", "size": size, **(pool or {})}}
        pools.update(settings.pop("others", {}))
        made = muster(pools, start=False, **settings)
        Path(made.folder, "jobs.py").write_text(JOBS)
        return made.start() if start else made

    return make


class Survivors:
    """A FIFO that a tree of processes holds open: it ends when the last of them is gone."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fifo"
        os.mkfifo(self.path)
        self.path.chmod(0o666)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_until_up(self) -> None:
        assert select.select([self._fd], [], [], GONE_SECONDS_MAX)[0], "the tree is not up"
        assert os.read(self._fd, 1) == b"x"

    def are_there(self) -> bool:
        return not select.select([self._fd], [], [], 0)[0]

    def wait_until_gone(self) -> float:
        """How long it took, in seconds."""
        began = time.monotonic()
        assert select.select([self._fd], [], [], GONE_SECONDS_MAX)[0], "there are survivors"
        assert os.read(self._fd, 1) == b""
        return time.monotonic() - began

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def survivors_in() -> Iterator[Callable[[Path], Survivors]]:
    with contextlib.ExitStack() as opened:

        def open_survivors(folder: Path) -> Survivors:
            fifo = Survivors(folder)
            opened.callback(fifo.close)
            return fifo

        yield open_survivors


@pytest.fixture
def survivors(tmp_path: Path, survivors_in: Callable[[Path], Survivors]) -> Survivors:
    return survivors_in(tmp_path)


@pytest.fixture(autouse=True)
def groups(request: pytest.FixtureRequest) -> None:
    """Tests marked `cgroups` need a hierarchy of version 2 that this process may change."""
    if request.node.get_closest_marker("cgroups") is None:
        return
    try:
        trial = own_group() / f"trial-of-tests-{os.getpid()}"
        trial.mkdir()
        trial.rmdir()
    except (SpawnError, OSError) as error:
        pytest.skip(f"no control groups can be made here: {error}")


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Path]]:
    """memory_group(BYTES) -> a control group that may use so much, of whichever version is here."""
    made: list[Path] = []

    def make(limit_bytes: int) -> Path:
        mounted = Path("/sys/fs/cgroup")
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = {line.split(":")[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
        base, limit = mounted, "memory.max"
        if "memory" in own:  # version 1
            base, limit = mounted / "memory" / own["memory"], "memory.limit_in_bytes"
            base = base if base.exists() else mounted / "memory"
        group = base / f"musterd-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
            made.append(group)
            (group / limit).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no control group for memory can be made here: {error}")
        return group

    yield make
    for group in made:
        _remove_group(group)


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            group.rmdir()
        except OSError:  # the last process is still leaving it
            time.sleep(0.01)
        else:
            return
    pytest.fail(f"{group} is not empty")


BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w.]+\.(?:py|toml))\n")


class Document:
    """A page of the documentation, whose examples are put to work in `folder`."""

    def __init__(self, path: Path, daemon: Any) -> None:
        self.text = path.read_text()
        self.blocks: list[tuple[str, str]] = BLOCK.findall(self.text)
        self.daemon = daemon
        self.folder: Path = daemon.folder
        for _, text in self.blocks:
            if match := FILE_NAME.match(text):
                (self.folder / match[1]).write_text(text)

    def section(self, heading: str) -> str:
        """The text below a heading, up to the next one of any level."""
        found, inside, code = [], False, False
        for line in self.text.splitlines(keepends=True):
            code ^= line.startswith("```")
            if line.startswith("#") and not code:
                inside = line.lstrip("#").strip() == heading
            elif inside:
                found.append(line)
        assert found, f"no section {heading!r}"
        return "".join(found)

    def commands(self, heading: str) -> str:
        """The shell commands below a heading."""
        return "".join(text for kind, text in BLOCK.findall(self.section(heading)) if kind == "sh")

    def start(self, config: str, **settings: Any) -> Any:
        """The daemon, with one of the page's configurations."""
        tables = tomllib.loads((self.folder / config).read_text())
        for key, value in settings.items():
            table, _, name = key.rpartition("__")
            inner = tables
            for part in filter(None, table.split("__")):
                inner = inner.setdefault(part, {})
            inner[name] = value
        own = {"runtime_dir": str(self.daemon.runtime), "state_dir": str(self.daemon.state)}
        tables["supervisor"] = tables.get("supervisor", {}) | own
        tables.setdefault("memory", {"enabled": False})
        self.daemon.config_path.write_bytes(msgspec.json.encode(tables))
        return self.daemon.start()

    def run(self, *words: str) -> str:
        """What a program of the page, or a command, prints; it has to succeed."""
        done = subprocess.run(
            words if len(words) > 1 else [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "MUSTERD_TASKS": self.daemon.tasks_socket,
                "MUSTERD_CONTROL": self.daemon.control_socket,
            },
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def document(muster: Callable[..., Any]) -> Callable[[str], Document]:
    """document("docs/page.md") -> its examples, in the folder of a daemon that is not started."""

    def make(path: str) -> Document:
        return Document(Path(__file__).parents[2] / path, muster({}, start=False))

    return make


class BrokenDisk:
    """See broken_disk.c."""

    def __init__(self, folder: Path) -> None:
        self._switches = folder / "switches"
        self._switches.mkdir()
        self._library = folder / "broken.so"
        source = Path(__file__).with_name("broken_disk.c")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", self._library, source, "-ldl"]
        subprocess.run(command, check=True)

    @property
    def environment(self) -> dict[str, str]:
        """For a process whose disk this is."""
        return {
            **os.environ,
            "LD_PRELOAD": str(self._library),
            "BROKEN_DISK": str(self._switches),
        }

    def turn_on(self, switch: str) -> None:
        (self._switches / switch).touch()

    def is_on(self, switch: str) -> bool:
        return (self._switches / switch).exists()

    def mend(self) -> None:
        for switch in self._switches.iterdir():
            switch.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> BrokenDisk:
    """A disk that breaks when a test says so."""
    return BrokenDisk(tmp_path)
