"""Start sidecars, hear them and end them; core/workers/sidecar.py decides when.

    python -m MODULE PARENT BEAT_FD     its settings on standard input, as JSON

A sidecar writes to a pipe: once that it is ready (the web process: where it listens), then a
heartbeat every few seconds. It is a child of the main thread. It stays in the daemon's session, so
that the spawner leaves its exit status to us, and has a process group of its own, so a terminal's
^C does not reach it. All die with the daemon, but `alerts` stays for a minute, to report the
daemon's end.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from musterd.supervisor.core.model.events import (
    ALERTS,
    CLUSTER,
    EVENTS,
    EXIT_TAKEN,
    WEB,
    SidecarBeat,
    SidecarExited,
    SidecarReady,
)
from musterd.supervisor.log.worker_output import Outputs, Source
from musterd.supervisor.processes import environment
from musterd.supervisor.processes.epoll import Watch
from musterd.supervisor.processes.handles import how_it_ended, open_pidfd, send_signal
from musterd.supervisor.system.linux import memory_file

COMMAND = (sys.executable, "-P", "-m")  # -P: the working directory is not first in sys.path
MODULES = {
    WEB: "musterd.supervisor.web",
    ALERTS: "musterd.supervisor.alerts",
    EVENTS: "musterd.supervisor.publisher",
    CLUSTER: "musterd.supervisor.node",
}
EXIT_CONFIGURATION = 78  # the exit code of a sidecar that another start will not help
CLOSE_SECONDS = 3.0  # from SIGTERM to SIGKILL at the end of the daemon: a last alert takes two
READ_BYTES = 4096

Event = SidecarReady | SidecarBeat | SidecarExited


class _Living(Struct, eq=False):
    name: str
    number: int
    process: "subprocess.Popen[bytes]"
    pidfd: int
    beats: int  # the reading end of its pipe; -1 when closed
    output: Source
    said: bytes = b""  # the beginning of a line, READ_BYTES at most
    ready: bool = False


class SidecarProcesses:
    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._watch = Watch()
        self._living: dict[str, _Living] = {}
        self._happened: list[Event] = []
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor that is readable when events() has news."""
        return self._watch.fileno()

    def start(self, name: str, number: int, settings: Struct, fds: Sequence[int] = ()) -> None:
        """Start a sidecar, which inherits `fds`; SidecarReady or SidecarExited follows."""
        assert name not in self._living, f"there is a sidecar {name}"
        try:
            living = self._make(name, number, settings, fds)
        except OSError as error:
            reason = f"it cannot be started: {error}"
            self._happened.append(SidecarExited(number, reason, name=name))
            self._watch.wake()
            return
        self._living[name] = living
        self._watch.add(living.beats, lambda: self._hear(living))
        self._watch.add(living.pidfd, lambda: self._ended(living))

    def _make(self, name: str, number: int, settings: Struct, fds: Sequence[int]) -> _Living:
        told = memory_file(msgspec.json.encode(settings))
        beats, theirs = os.pipe()
        os.set_blocking(beats, False)
        os.set_blocking(theirs, False)  # a sidecar never waits for a loop that does not read
        try:
            with self._outputs.open(output_name(name)) as output:
                process = subprocess.Popen(
                    [*COMMAND, MODULES[name], str(os.getpid()), str(theirs)],
                    pass_fds=[theirs, *fds],
                    stdin=told,
                    stdout=output.write_fd,
                    stderr=output.write_fd,
                    process_group=0,
                    env=environment.of_daemon(),
                )
            pidfd = open_pidfd(process, output)
        except OSError:
            os.close(beats)
            raise
        finally:
            os.close(told)
            os.close(theirs)
        return _Living(name, number, process, pidfd, beats, output)

    def signal(self, name: str, number: int, signum: int) -> None:
        living = self._living.get(name)
        if living is not None and living.number == number:
            send_signal(living.pidfd, signum)

    def events(self) -> list[Event]:
        """Return what happened since the last call."""
        self._watch.turn()
        happened, self._happened = self._happened, []
        return happened

    # -- what a sidecar says ------------------------------------------------------------------

    def _hear(self, living: _Living) -> None:
        if living.beats < 0:
            return
        try:
            data = os.read(living.beats, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close_beats(living)  # the sidecar is about to be gone
            return
        *lines, said = (living.said + data).split(b"\n")
        living.said = said[:READ_BYTES]
        if lines and not living.ready:
            living.ready = True
            address = lines.pop(0).decode(errors="replace")
            ready = SidecarReady(living.number, living.process.pid, address, living.name)
            self._happened.append(ready)
        if lines:
            self._happened.append(SidecarBeat(living.number, living.name))

    def _close_beats(self, living: _Living) -> None:
        if living.beats >= 0:
            self._watch.remove(living.beats)
            os.close(living.beats)
            living.beats = -1

    def _ended(self, living: _Living) -> None:
        code = self._bury(living)
        words = self._outputs.last_words(output_name(living.name))
        reason = f"it {how_it_ended(code)}" + (f": {words}" if words else "")
        fatal = code == EXIT_CONFIGURATION
        told = words or reason if fatal else reason
        if code == EXIT_TAKEN:
            told = words or reason
        self._happened.append(SidecarExited(living.number, told, fatal, living.name, code))

    def _bury(self, living: _Living) -> int:
        del self._living[living.name]
        code = living.process.wait()  # returns at once: the pidfd was readable
        living.output.end()
        self._close_beats(living)
        self._watch.remove(living.pidfd)
        os.close(living.pidfd)
        return code

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """End all sidecars. May be called twice."""
        for living in self._living.values():
            send_signal(living.pidfd, signal.SIGTERM)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._living and (left := deadline - time.monotonic()) > 0:
            self._watch.wait(left)
            self._watch.turn()
        for living in list(self._living.values()):
            send_signal(living.pidfd, signal.SIGKILL)
            self._bury(living)
        if not self._closed:
            self._closed = True
            self._watch.close()


def output_name(name: str) -> str:
    """Return the name for the output of a sidecar; no pool has such a name."""
    return f"musterd-{name}"
