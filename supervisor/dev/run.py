"""`musterd dev`: one terminal that runs a project and reloads what is saved.

The daemon is a child with a session of its own, so that a Ctrl-C of the terminal reaches only us;
we pass it on as SIGTERM, and a second and a third time, which end the drain and kill. If we are
killed, the kernel sends the daemon SIGTERM: it ends as ever, and its workers with it.
"""

import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from musterd.supervisor.dev.project import Project, find, open_project
from musterd.supervisor.dev.screen import BOLD, DIM, RED, YELLOW, Screen
from musterd.supervisor.dev.watch import Watcher, is_possible
from musterd.supervisor.system.commands import typed
from musterd.supervisor.system.linux import die_with_parent

EXIT_INTERNAL = 70
READ_BYTES = 65536
LINE_BYTES_MAX = 256 * 1024  # of the log: no line of it is as long

# -P: nothing in the project hides a module of Python or ours.
DAEMON = (sys.executable, "-P", "-m", "musterd.supervisor", "run")
STOPS = (
    "stopping: running tasks may end; Ctrl-C again: stop them",
    "stopping them; Ctrl-C again: kill",
    "killing what is left",
)


def run_dev(files: Sequence[Path], profile: str | None, overrides: Sequence[str]) -> int:
    """Run the project until Ctrl-C; return the exit code."""
    found = find(files)
    os.chdir(found[0].parent)
    project = open_project(found, profile, overrides, os.environ)
    return Dev(project, Screen(os.environ, project.folder)).run()


class Dev:
    def __init__(self, project: Project, screen: Screen) -> None:
        self._project = project
        self._screen = screen
        self._watcher = Watcher(project, screen) if is_possible() else None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._stops = 0  # times that we were told to stop
        self._rest = b""  # of the log: a line that is not whole yet

    def run(self) -> int:
        self._introduce(os.environ)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        ours = os.getpid()

        def tie() -> None:
            """Runs in the child, before it is the daemon."""
            die_with_parent(signal.SIGTERM)
            if os.getppid() != ours:  # we were killed before that
                os._exit(EXIT_INTERNAL)

        # We have one thread yet, the one that the daemon's life is tied to.
        with subprocess.Popen(
            [*DAEMON, *self._project.arguments],
            cwd=self._project.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=tie,  # noqa: PLW1509 - there are no other threads
        ) as daemon:
            self._daemon = daemon
            if self._stops:  # meanwhile
                daemon.send_signal(signal.SIGTERM)
            if self._watcher is not None:
                self._watcher.start()
            assert daemon.stdout is not None
            try:
                self._follow(daemon, daemon.stdout)
            except BaseException:
                daemon.terminate()  # a mistake of ours leaves nothing behind
                raise
            code = daemon.wait()
        if self._watcher is not None:
            self._watcher.stop()
        return self._ended(code)

    def _introduce(self, environ: Mapping[str, str]) -> None:
        project, screen = self._project, self._screen
        files = " ".join(project.short(file) for file in project.files)
        screen.show(screen.paint(f"musterd dev: {files} in {project.folder}", BOLD))
        named = [] if project.is_found else ["-s", project.short(project.control)]
        tasks = f"MUSTERD_TASKS={shlex.quote(project.short(project.tasks))} "
        rows = [
            ("steer it", typed("musterctl", *named, "status", cwd=project.folder)),
            ("clients", f"{'' if project.is_found else tasks}python your_program.py"),
        ]
        if project.no_dashboard:
            rows.append(("dashboard", f"none: {project.no_dashboard}"))
        if self._watcher is None:
            rows.append(("reload", "nothing is reloaded when saved: pip install 'musterd[dev]'"))
        for name, text in rows:
            screen.show(f"  {screen.paint(f'{name:10}', DIM)} {text}")
        screen.say(
            "Saved files are reloaded. Ctrl-C ends everything."
            if self._watcher
            else "Ctrl-C ends everything.",
            DIM,
        )

    # -- the log ----------------------------------------------------------------------------------

    def _follow(self, daemon: "subprocess.Popen[bytes]", log: IO[bytes]) -> None:
        """Show the log until the daemon ends, whoever else has the pipe."""
        os.set_blocking(log.fileno(), False)
        pidfd = os.pidfd_open(daemon.pid)
        try:
            poll = select.poll()
            poll.register(log.fileno(), select.POLLIN)
            poll.register(pidfd, select.POLLIN)
            ended = over = False
            while not over:
                ready = dict(poll.poll())
                ended = ended or pidfd in ready
                data = os.read(log.fileno(), READ_BYTES) if log.fileno() in ready else b""
                self._take(data)
                over = (ended and not data) or (log.fileno() in ready and not data)
        finally:
            os.close(pidfd)
        if self._rest:
            self._take(b"\n")

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LINE_BYTES_MAX]
        for line in lines:
            if line:
                self._show(line.decode(errors="replace"))

    def _show(self, line: str) -> None:
        told = self._screen.log(line)
        match told.event:
            case "web.ready":
                self._show_address(told.reason)
            case "pool.roll_failed":
                self._screen.say(f"{told.pool} goes on as before: mend it and save again", YELLOW)
            case "pool.fatal" if self._watcher is not None:
                self._screen.say(f"{told.pool} starts when that is mended and saved", YELLOW)

    def _show_address(self, address: str) -> None:
        if address.startswith("http"):
            link = f"/#token={self._project.token}" if self._project.token else "/"
            address = f"{address}{link}"
        self._screen.show(f"  {self._screen.paint('dashboard ', DIM)} {address}")

    # -- the end ----------------------------------------------------------------------------------

    def _stop(self, number: int, _frame: object) -> None:
        """Pass a Ctrl-C on; the terminal's end as well."""
        if self._stops < len(STOPS):
            self._screen.say(STOPS[self._stops], BOLD)
        self._stops += 1
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.send_signal(signal.SIGTERM)

    def _ended(self, code: int) -> int:
        if code == -signal.SIGTERM and self._stops:
            return 0  # it was told to end before it could listen
        if code < 0:
            self._screen.say(f"the daemon was ended by signal {-code}", RED)
            return EXIT_INTERNAL
        return code
