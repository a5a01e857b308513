"""A daemon with browser pools, seen from outside: its processes, their owners, and leftovers."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from musterd import TaskFailed
from musterd.supervisor.processes.marks import OWNER_BITS
from support.daemon import Muster
from support.waiting import Waiting
from trouble.site import TroubleSite

RENDERERS_IDLE_MAX = 2  # spare renderers, made before they are needed
RESULT_SECONDS = 60.0
OF_BROWSERS = ("part", "network", "renderer")
CACHES = ("dconf", "fontconfig")  # of libraries; they do not grow
LOOK_SECONDS = 0.1  # between two looks at all processes of the machine


class Part(NamedTuple):
    """A process of the daemon."""

    pid: int
    mark: int  # tells the owner, see musterd.supervisor.processes.marks
    kind: str  # "browser" (its main process), "driver", "renderer", "network", "musterd", or "part"
    status: str
    session: int


def mark_of(pid: int) -> int:
    """Return the mark of a process, 0 for none. prlimit() needs the right to change limits."""
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    value = next(line.split()[3] for line in lines if line.startswith("Max file locks"))
    return int(value) if value.isdecimal() else 0


def _kind(process: psutil.Process) -> str:
    words = process.cmdline()
    if "run-driver" in words:
        return "driver"
    if "--type=renderer" in words:
        return "renderer"
    if "--utility-sub-type=network.mojom.NetworkService" in words:
        return "network"
    if any(word.startswith("--type=") for word in words):
        return "part"
    return "browser" if "--remote-debugging-pipe" in words else "musterd"


def _parts(run: int) -> Iterator[Part]:
    """Return every process with a mark of this run, zombies included, whatever its parent."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and (mark := mark_of(int(name))) >> OWNER_BITS == run:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process = psutil.Process(int(name))
                session = os.getsid(process.pid)
                yield Part(process.pid, mark, _kind(process), process.status(), session)


class Fleet:
    """The daemon, its client, the site, and `waiting` for conditions."""

    def __init__(self, daemon: Muster, backend: str, site: TroubleSite, waiting: Waiting) -> None:
        self.daemon = daemon
        self.backend = backend
        self.site = site
        self.waiting = waiting
        self.client = daemon.client()
        self.pools = [pool.name for pool in daemon.status().pools]
        self.run = mark_of(self.worker(self.pools[0])) >> OWNER_BITS

    # -- tasks ---------------------------------------------------------------------------------

    def submit(self, path: str, pool: str = "browser", **options: Any) -> Any:
        """Submit a task that opens a page of the site; options are those of submit()."""
        args = {"url": f"{self.site.url}{path}", **options.pop("args", {})}
        method = options.pop("method", "render")
        return self.client.submit(f"{pool}.{method}", args, max_retries=0, **options)

    def render(self, path: str, pool: str = "browser", **options: Any) -> dict[str, Any]:
        return dict(self.submit(path, pool, **options).result(RESULT_SECONDS))

    def loading(self, pages: dict[str, str], **options: Any) -> dict[str, Any]:
        """Submit a page for each pool; return the tasks by pool once the site has all requests."""
        before = self.site.requested.copy()
        before.update(pages.values())
        tasks = {pool: self.submit(path, pool, **options) for pool, path in pages.items()}
        self.waiting("the pages are asked for", lambda: self.site.requested >= before)
        return tasks

    # -- processes -----------------------------------------------------------------------------

    def worker(self, pool: str) -> int:
        return int(self.waiting("there is a worker", lambda: self.daemon.worker(f"{pool}/0").pid))

    def parts(self, pool: str) -> list[Part]:
        """Return the processes of the pool's worker."""
        mark = mark_of(self.worker(pool))
        return [part for part in _parts(self.run) if part.mark == mark]

    def strike(self, pool: str, kind: str, number: signal.Signals) -> None:
        """Send the signal to all processes of this kind; "worker" is the worker itself."""
        pids = [part.pid for part in self.parts(pool) if part.kind == kind]
        for pid in [self.worker(pool)] if kind == "worker" else pids:
            os.kill(pid, number)

    def one(self, pool: str, kind: str) -> Part:
        """Return a process of this kind."""
        return next(part for part in self.parts(pool) if part.kind == kind)

    def profile(self, pool: str) -> Path:
        """Return the directory of the pool's browser."""
        (worker,) = Path(self.daemon.state, "tmp").glob(f"{pool}-*")
        (profile,) = worker.iterdir()
        return profile

    # -- leftovers ------------------------------------------------------------------------------

    def untidy(self) -> str:
        """Name something that should not be there when no task runs; "" where all is well."""
        parts = list(_parts(self.run))
        workers = {mark_of(self.worker(pool)): pool for pool in self.pools}
        fork_servers = {mark_of(p.pid) for p in psutil.Process(self.daemon.pid).children()}
        for part in parts:
            if part.status == psutil.STATUS_ZOMBIE:
                return f"a zombie: {part}"
            if part.mark not in workers and part.mark not in fork_servers:
                return f"a survivor of a worker: {part}"
        for mark, pool in workers.items():
            if problem := self._crowded([part for part in parts if part.mark == mark]):
                return f"{pool}: {problem}"
        return self._litter()

    def _crowded(self, parts: list[Part]) -> str:
        """Say in what a worker differs from one with exactly one browser."""
        kinds = Counter(part.kind for part in parts)
        wanted = {"browser": 1, "driver": int(self.backend == "playwright")}
        if any(kinds[kind] != number for kind, number in wanted.items()):
            return f"instead of one browser it has {kinds}"
        if kinds["renderer"] > RENDERERS_IDLE_MAX:
            return f"pages are left: {kinds}"
        (session,) = (part.session for part in parts if part.kind == "browser")
        of_others = [p for p in parts if p.kind in OF_BROWSERS and p.session != session]
        return f"left by another browser: {of_others}" if of_others else ""

    def _litter(self) -> str:
        """Say what differs from one directory per worker, with one in it for its browser."""
        workers = list(Path(self.daemon.state, "tmp").iterdir())
        if len(workers) != len(self.pools):
            return f"directories of workers: {workers}"
        for worker in workers:
            if len(found := list(worker.iterdir())) != 1:
                return f"directories of browsers: {found}"
        home = [path for path in self.daemon.folder.glob(".*/**/*") if path.is_file()]
        strange = [path for path in home if path.parent.name not in CACHES]
        return f"files in the user's home: {strange}" if strange else ""

    def settle(self) -> None:
        """Wait until nothing is left of earlier tasks."""
        last = "?"

        def tidy() -> bool:
            nonlocal last
            last = self.untidy()
            if last:
                time.sleep(LOOK_SECONDS)
            return not last

        try:
            self.waiting("nothing is left over", tidy, 15.0)
        except BaseException:
            print(last)
            raise

    def well(self) -> None:
        """Check that the next task of each pool works, and that nothing is left of the last."""
        tasks = [self.submit("/good", pool) for pool in self.pools]
        for pool, task in zip(self.pools, tasks, strict=True):
            assert task.result(RESULT_SECONDS)["title"] == "good", pool
        self.settle()


def failure(task: Any) -> str:
    """Return the class of a task's error, or its kind where no exception was raised."""
    try:
        value = task.result(RESULT_SECONDS)
    except TaskFailed as error:
        return error.type.rpartition(".")[2] or error.kind
    return f"none, it returned {str(value)[:200]}"
