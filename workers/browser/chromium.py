"""Chromium as a process: find it, start it, and end all of its processes."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterable

import psutil

from musterd.ipc.errors import ConfigurationError
from musterd.workers.browser.cdp import Connection
from musterd.workers.browser.errors import BrowserDied, BrowserError
from musterd.workers.browser.scratch import Scratch

EXIT_SECONDS = 5.0  # from a request to close until it is killed; a healthy one takes 0.1 s
GONE_SECONDS = 5.0  # from SIGKILL until all its processes are gone
POLL_SECONDS = 0.02
ERRORS = "stderr"  # file of its standard error in the profile
WORDS_CHARACTERS_MAX = 500  # of its last output before it died

# Most frugal first. Debian's commands are shell scripts around the programs in /usr/lib; that of
# the headless shell stays as its parent, and Chromium would outlive it.
EXECUTABLES = (
    "/usr/lib/chromium/chromium-headless-shell",
    "chromium-headless-shell",
    "/usr/lib/chromium/chromium",
    "chromium",
    "google-chrome",
)
# Keep it from talking to anyone but the site.
QUIET_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Further flags that automation needs; Playwright passes such flags by itself.
AUTOMATION_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-startup-window",
    "--no-default-browser-check",
    "--disable-extensions",
    "--disable-default-apps",
    "--disable-component-extensions-with-background-pages",
    "--disable-client-side-phishing-detection",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-breakpad",
    "--disable-dev-shm-usage",  # /dev/shm has 64 MB in a container
    "--disable-hang-monitor",
    "--disable-popup-blocking",
    "--disable-prompt-on-repost",
    "--disable-features=Translate,MediaRouter,OptimizationHints,DialMediaRouteProvider",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--mute-audio",
    "--password-store=basic",
)
COMMANDS_FD, ANSWERS_FD = 3, 4  # where Chromium looks for its pipes
FD_ABOVE = 10  # keeps our descriptors off the numbers they are copied to


def find_executable(wanted: str = "") -> str:
    """Return the path of the browser to run: the given one, else the first that is installed."""
    for candidate in [wanted] if wanted else EXECUTABLES:
        if found := shutil.which(candidate):
            return found
    if wanted:
        raise ConfigurationError(f"options.executable = {wanted!r} is not an executable file")
    raise ConfigurationError(
        f"no browser found: none of {', '.join(EXECUTABLES)} is installed; "
        "install chromium-headless-shell or chromium, or set options.executable"
    )


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants that are alive."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def session_members(session: int) -> set[psutil.Process]:
    """Return the processes of a session, also orphans: a browser has a session of its own."""
    found = set()
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session:
                found.add(psutil.Process(pid))
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return found


def processor_seconds(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """Return how long each of these has used processors, by pid; those that are gone are left
    out."""
    seconds = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            seconds[process.pid] = used.user + used.system
    return seconds


async def end_processes(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each, stopped ones too; return when they are gone, or after GONE_SECONDS."""
    left = list(processes)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + GONE_SECONDS
    while left and time.monotonic() < deadline:
        left = [process for process in left if lives(process)]
        if left:
            await asyncio.sleep(POLL_SECONDS)


def lives(process: psutil.Process) -> bool:
    """Tell whether the process has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Chromium:
    """Running browser with its pipes, its profile and its processes."""

    def __init__(self, executable: str, pid: int, scratch: Scratch, connection: Connection) -> None:
        self.executable = executable
        self.pid = pid
        self.connection = connection
        self._scratch = scratch
        self._left: set[psutil.Process] = set()  # what its main process left when it ended
        self._pidfd = os.pidfd_open(pid)
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @classmethod
    async def start(cls, executable: str, args: Iterable[str], *, sandbox: bool) -> "Chromium":
        """Start the process; the first answer on its pipe shows whether it works."""
        scratch = Scratch("cr-")
        command = [
            scratch.launcher(executable),
            *AUTOMATION_FLAGS,
            *QUIET_FLAGS,
            f"--user-data-dir={scratch.path}",
            *([] if sandbox else ["--no-sandbox"]),
            *args,
        ]
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        try:
            pid = _spawn(command, theirs_in, theirs_out, scratch)
        except OSError as error:
            os.close(ours_out)
            os.close(ours_in)
            await scratch.remove()
            raise BrowserError(f"cannot launch {executable}: {error.strerror}") from error
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        connection = await Connection.open(ours_out, ours_in)
        return cls(executable, pid, scratch, connection)

    def words(self) -> str:
        """Return the end of its standard error."""
        try:
            text = (self._scratch.path / ERRORS).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return text[-WORDS_CHARACTERS_MAX:].strip()

    async def end(self) -> None:
        """Ask it to close, kill what does not, and remove its profile."""
        try:
            self.connection.notify("Browser.close", {})
            async with asyncio.timeout(EXIT_SECONDS):
                await self._exited.wait()
        except (BrowserError, TimeoutError):
            pass  # it is dead or stuck, and killed below
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kill all its processes at once, and remove its profile."""
        self.connection.end(BrowserDied("the browser was ended"))
        everyone = self._left if self._exited.is_set() else session_members(self.pid)
        try:
            await end_processes(everyone)
        finally:
            if not self._exited.is_set():
                self._reap()
            await self._scratch.remove()

    def _reap(self) -> None:
        """Collect its exit status: it is our child, and a zombie until then."""
        # Before that: while it is a zombie, its number cannot be another session's.
        self._left = session_members(self.pid)
        try:
            pid, _ = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # other code in this process waits for all children
            pid = self.pid
        if pid == 0:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exited.set()


def _spawn(command: list[str], commands: int, answers: int, scratch: Scratch) -> int:
    """Use posix_spawn: unlike preexec_fn it is safe in a process with threads."""
    errors = str(scratch.path / ERRORS)
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FD_ABOVE) for fd in (commands, answers)]
    try:
        return os.posix_spawn(
            command[0],
            command,
            {**os.environ, **scratch.environment},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, errors, os.O_WRONLY | os.O_CREAT, 0o600),
                (os.POSIX_SPAWN_DUP2, sources[0], COMMANDS_FD),
                (os.POSIX_SPAWN_DUP2, sources[1], ANSWERS_FD),
            ],
            # A signal to the worker's whole group must not end the browser before the worker; and
            # its session finds all its descendants, whatever became of their parents.
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
        )
    finally:
        for fd in sources:
            os.close(fd)
