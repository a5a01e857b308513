"""Find out which pools run older code than is on disk.

A fork server tells what it has imported (processes/spawner.py). Here that is compared with the
files, and with the files of secrets, in a thread: file systems may be slow, and may hang.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from musterd.ipc.secrets.access import fits
from musterd.ipc.user_code import Source, changed_since
from musterd.supervisor.api.status import NewerCode
from musterd.supervisor.config.schema import Config
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.processes.spawner import Code
from musterd.supervisor.system.background_calls import BackgroundCalls

CHECK_SECONDS = 2.0  # then a command is answered without; the file system may hang
WAITING_MAX = 64  # checks in line; more are answered without
SECRETS_LOOKED_AT_MAX = 1000  # files of a secrets_dir

CodeOf = Callable[[str, str], Code | None]  # of a pool's build


class RunningCode(Struct, frozen=True):
    """What the workers of a pool are made of, beside the configuration."""

    pool: str
    sources: tuple[Source, ...]
    at_ns: int  # of the wall clock: when it was read
    secrets_dir: str
    secrets: tuple[str, ...]  # patterns


def running_code(fleet: Fleet, code_of: CodeOf, config: Config) -> list[RunningCode]:
    """Return what is known of each pool; of one that is being replaced, of its next workers."""
    found = []
    for name, pool in fleet.pools.items():
        build = pool.rollout.build if pool.rollout is not None else pool.build
        code, made = code_of(name, build), config.pools.get(name)
        if code is not None and made is not None:
            found.append(
                RunningCode(name, code.sources, code.at_ns, made.secrets_dir, made.secrets)
            )
    return found


def newer_code(running: Iterable[RunningCode]) -> list[NewerCode]:
    """Return the pools of which something has changed since. This reads files."""
    found = (
        NewerCode(pool=each.pool, files=changed_since(each.sources), secrets=_secrets(each))
        for each in running
    )
    return [each for each in found if each.files or each.secrets]


def _secrets(running: RunningCode) -> list[str]:
    """Return the names of secrets whose files have changed."""
    if not running.secrets_dir:
        return []
    names = []
    with contextlib.suppress(OSError), os.scandir(running.secrets_dir) as entries:
        for _, entry in zip(range(SECRETS_LOOKED_AT_MAX), entries, strict=False):
            # Not the time of the content, which a moved file keeps.
            if fits(entry.name, running.secrets) and entry.stat().st_ctime_ns > running.at_ns:
                names.append(entry.name)
    return sorted(names)


class Check:
    """One question; `result` is there when it is `over`."""

    def __init__(self) -> None:
        self.result: list[NewerCode] = []
        self._done = False
        self._until = time.monotonic() + CHECK_SECONDS

    @property
    def over(self) -> bool:
        return self._done or time.monotonic() > self._until

    def settle(self, result: list[NewerCode]) -> None:
        self.result, self._done = result, True


class CodeChecks:
    """Answer in a thread whether pools run older code than is on disk, one question at a time."""

    def __init__(self, running: Callable[[], list[RunningCode]], calls: BackgroundCalls) -> None:
        self._running = running
        self._calls = calls
        self._waiting: deque[tuple[Check, Collection[str]]] = deque()
        self._busy = False

    def ask(self, pools: Collection[str]) -> Check:
        check = Check()
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append((check, pools))
            self._next()
        else:
            check.settle([])
        return check

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        check, pools = self._waiting.popleft()
        running = [each for each in self._running() if each.pool in pools]

        def answer(found: list[NewerCode]) -> None:
            self._busy = False
            check.settle(found)
            self._next()

        self._calls.run("code", lambda: newer_code(running), answer)
