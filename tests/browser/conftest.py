"""The sample site in a separate process, and an unprivileged user to browse it."""

import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from trouble.fleet import Fleet
from trouble.site import TroubleSite

from musterd.supervisor.system.linux import become_subreaper
from musterd.workers.browser import worker
from support.daemon import Musters
from support.waiting import Waiting

HERE = Path(__file__).parent
NOBODY = 65534  # uid and gid of `nobody`; no files, no rights
START_SECONDS = 30
GONE_SECONDS = 10.0
RENDERS = 20  # pages that the soak opens in `make test`
RENDER_SECONDS_MAX = 5.0  # per page on a very busy machine; half a second is usual
# A busy machine may need longer for a page than the 5 s that a browser has. The tests that stop
# browsers check the real limit.
PROBE_SECONDS = 60.0
PATIENT_WORKER = f"""
from musterd.workers.browser import BrowserWorker, worker

worker.PROBE_SECONDS = {PROBE_SECONDS}
"""
TABLE = pytest.StashKey[list[tuple[str, str]]]()


@pytest.fixture(scope="module", autouse=True)
def _subreaper() -> Iterator[None]:
    """Adopt orphaned processes of browsers: PID 1 of this machine may not reap them."""
    become_subreaper()
    yield
    become_subreaper(until_now=True)
    psutil.wait_procs(
        [each for each in psutil.Process().children() if each.status() == psutil.STATUS_ZOMBIE],
        timeout=GONE_SECONDS,
    )


@pytest.fixture(autouse=True)
def _nothing_inherited() -> Iterator[None]:
    """Check that browsers of this process leave nothing behind, not even zombies."""
    before = set(psutil.Process().children())
    yield
    new = set(psutil.Process().children()) - before
    _, alive = psutil.wait_procs(new, timeout=GONE_SECONDS)  # collects their exit statuses
    lasting = [each for each in alive if not _lasts(each)]
    assert not lasting, f"left behind by the test: {lasting}"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sure that a slow browser of this process does not count as stuck."""
    monkeypatch.setattr(worker, "PROBE_SECONDS", PROBE_SECONDS)


def _lasts(process: psutil.Process) -> bool:
    """Tell whether the process serves other tests, too: it is in the session of the suite."""
    return os.getsid(process.pid) == os.getsid(0)


@pytest.fixture(scope="session")
def sample_site() -> Iterator[str]:
    """Yield the address of a running sample site."""
    command = [sys.executable, "-m", "musterd.supervisor.demo.sample_site", "--until-stdin-closes"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port.isdigit(), f"the sample site printed {port!r} instead of its port"
        yield f"http://127.0.0.1:{port}"
        process.stdin.close()
        assert process.wait(START_SECONDS) == 0


class User(msgspec.Struct, frozen=True):
    """The user that runs a browser, and the interpreter for it."""

    python: str
    switch: dict[str, Any]  # arguments for subprocess; empty where we are that user already
    uid: int

    def run(self, command: list[str], home: Path) -> subprocess.CompletedProcess[str]:
        """Run `python COMMAND` as this user, with nothing of our environment but the path."""
        environment: Mapping[str, str] = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
        }
        return subprocess.run(
            [self.python, *command],
            **self.switch,
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )


@contextmanager
def _directory(uid: int) -> Iterator[Path]:
    # Not tmp_path: pytest's directories are closed to other users, and their names are too long for
    # the socket that Chromium makes in its temporary directory.
    directory = Path(tempfile.mkdtemp(prefix="musterd-browser-"))
    try:
        if os.geteuid() == 0:
            os.chown(directory, uid, uid)
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def unprivileged() -> User:
    """Yield an unprivileged user who can run this project; skip, with the reason, without one."""
    python = os.environ.get("MUSTERD_TEST_PYTHON", sys.executable)
    if os.geteuid() == 0:
        switch: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        user = User(python, switch, NOBODY)
    else:
        user = User(python, {}, os.geteuid())
    try:
        with _directory(user.uid) as home:
            tried = user.run(["-c", "import musterd.workers.browser"], home)
        problem = tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""
    except PermissionError as error:
        problem = str(error)
    if problem:
        pytest.skip(
            f"uid {user.uid} cannot run this project with {python} ({problem}): clone it where "
            "all users can read, or name another interpreter in MUSTERD_TEST_PYTHON"
        )
    return user


@pytest.fixture(scope="session")
def sandboxing(unprivileged: User) -> User:
    """Return the unprivileged user; skip where Chromium's sandbox cannot work."""
    program = "from musterd.supervisor.system.linux import unshare_processes as u; u(user=True)"
    with _directory(unprivileged.uid) as home:
        tried = unprivileged.run(["-c", program], home)
    if tried.returncode:
        problem = tried.stderr.strip().rpartition("\n")[2]
        pytest.skip(f"user namespaces are refused here, so Chromium has no sandbox: {problem}")
    return unprivileged


@pytest.fixture(scope="module")
def trouble_site() -> Iterator[TroubleSite]:
    """Yield a site whose pages harm browsers."""
    site = TroubleSite()
    site.start()
    yield site
    site.stop()


@pytest.fixture(scope="module", params=["root", "sandbox"])
def privilege(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return arguments of muster(): root without Chromium's sandbox, or another user with it."""
    if request.param == "root":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        return {}
    user = request.getfixturevalue("sandboxing")
    return {"as_user": user.uid} if os.geteuid() == 0 else {}


@pytest.fixture(scope="module", params=["playwright", "cdp"])
def fleet(
    request: pytest.FixtureRequest,
    module_muster: Musters,
    trouble_site: TroubleSite,
    waiting: Waiting,
    privilege: dict[str, Any],
) -> Iterator[Fleet]:
    """Start a daemon for the tests of a module, with the pools of its POOLS and one backend."""
    backend = str(request.param)
    worker_class = {"worker": "patient:BrowserWorker"} if hasattr(request.module, "PATIENT") else {}
    pools = {
        name: {**keys, **worker_class, "options": {"backend": backend, **keys.get("options", {})}}
        for name, keys in request.module.POOLS.items()
    }
    daemon = module_muster(pools, start=False, breaker__enabled=False, **privilege)
    (daemon.folder / "patient.py").write_text(PATIENT_WORKER)
    daemon.popen_options.setdefault("env", {**os.environ, "HOME": str(daemon.folder)})
    daemon.start()
    try:
        fleet = Fleet(daemon, backend, trouble_site, waiting)
        fleet.settle()
        yield fleet
        assert daemon.stop() == 0
    finally:
        daemon.close()


@pytest.fixture(scope="session")
def usual_user(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return arguments of muster(): a user with a sandbox, if there is one here; else root."""
    try:
        user = request.getfixturevalue("sandboxing")
    except pytest.skip.Exception:
        return {}
    return {"as_user": user.uid} if os.geteuid() == 0 else {}


@pytest.fixture
def renders(request: pytest.FixtureRequest) -> int:
    """Return how many pages the soak opens."""
    return int(request.config.getoption("--browser-renders", None) or RENDERS)


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Add a row to the table at the end of the run: tell("pages", 300)."""
    table = request.config.stash.setdefault(TABLE, [])
    table.append((request.node.name, ""))

    def row(what: str, value: object) -> None:
        table.append((f"  {what}", str(value)))

    return row


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("browser").addoption(
        "--browser-renders", type=int, help=f"how many pages the soak opens (default {RENDERS})"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose one of all combinations for `make test`; give a long soak the time it asks for."""
    for item in items:
        if is_another_combination(item):
            item.add_marker(pytest.mark.long)
    seconds = int(config.getoption("--browser-renders", None) or RENDERS) * RENDER_SECONDS_MAX
    for item in items:
        if "renders" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(seconds + 120))


# Pairs of backend and user; each of the four occurs in one pair.
USUAL = (("playwright", "root"), ("cdp", "sandbox"))


def is_another_combination(item: pytest.Item) -> bool:
    """Tell whether `make test` has this test with another backend or user.

    Each test has one of the pairs there, by its name and its other parameters, so that every file
    has tests of both.
    """
    call = getattr(item, "callspec", None)
    if call is None or not item.path.is_relative_to(HERE):
        return False
    backend = call.params.get("backend", call.params.get("fleet"))
    if backend not in ("playwright", "cdp"):
        return False
    if item.get_closest_marker("one_backend") is not None:
        pair = USUAL[1]
    else:
        ours = {*USUAL[0], *USUAL[1]}
        words = [item.nodeid.partition("[")[0], *(x for x in call.id.split("-") if x not in ours)]
        pair = USUAL[zlib.crc32(" ".join(words).encode()) % len(USUAL)]
    return (backend, call.params.get("privilege", pair[1])) != pair


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    table = terminalreporter.config.stash.get(TABLE, [])
    if table:
        terminalreporter.section("browsers")
        width = max(len(what) for what, _ in table)
        for what, value in table:
            terminalreporter.write_line(f"{what:<{width}}  {value}".rstrip())


@pytest.fixture
def home(unprivileged: User) -> Iterator[Path]:
    """Make a home and temporary directory for the unprivileged user."""
    with _directory(unprivileged.uid) as home:
        yield home


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a temporary directory for browsers of this process; a killed one leaves files there."""
    with _directory(os.geteuid()) as scratch:
        monkeypatch.setenv("TMPDIR", str(scratch))
        yield scratch
