"""Killed supervisors: which processes survive, and which the next supervisor finds and ends."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.supervisor.core.model.events import LeftoversEnded
from musterd.supervisor.processes import cgroups, marks
from musterd.supervisor.processes.spawner import Spawner
from musterd.supervisor.system.linux import descendants, family, is_alive
from support.surroundings import Survivors
from support.waiting import Waiting

HERE = Path(__file__).parent
NOBODY = 65534
AS_NOBODY = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
TREE_SIZE = 6  # processes in a tree of spawner_workers.py, the worker included
MODES = ["pidns", pytest.param("cgroup", marks=pytest.mark.cgroups), "reaper"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Host:
    """A supervisor in a separate process, with one worker."""

    def __init__(self, root: Path, containment: str, worker: str, **how: Any) -> None:
        prefix = how.pop("prefix", [])
        path = os.pathsep.join(map(str, (HERE, *how.pop("path", ()))))
        self.process = subprocess.Popen(
            [*prefix, sys.executable, HERE / "spawner_workers.py", root, containment, worker],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            **how,
        )

    def wait_for(self, word: str) -> str:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:  # ends with the process; pytest's timeout is the limit
            lines.append(line)
            if word in line:
                return line
        raise AssertionError(f"no {word} in {lines}")

    def worker(self) -> int:
        """Return the pid of the worker, once there is one."""
        return int(self.wait_for("WorkerForked").split("pid=")[1].rstrip(")\n"))

    def inits(self) -> list[int]:
        return [
            pid for pid in family()[self.process.pid] if _title(pid).startswith("musterd: init")
        ]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill_with_inits(self) -> None:
        """Kill the supervisor and its inits, so that no process is left to clean up."""
        inits = self.inits()
        for init in inits:
            os.kill(init, signal.SIGSTOP)
        self.kill()
        for init in inits:
            os.kill(init, signal.SIGKILL)


@contextlib.contextmanager
def _hosted(*arguments: Any, **how: Any) -> Iterator[Host]:
    host = Host(*arguments, **how)
    try:
        yield host
    finally:
        host.kill()


def _title(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _next_start(root: Path) -> LeftoversEnded:
    """Return the first event of a new supervisor on the same directory."""
    spawner = Spawner("unused.sock", root)
    try:
        select.select([spawner], [], [], 0)
        found = [event for event in spawner.events() if isinstance(event, LeftoversEnded)]
    finally:
        spawner.close()
    assert len(found) == 1, found
    return found[0]


def _group_of(root: Path) -> Path:
    """Return the control group of the killed supervisor."""
    return Path(json.loads(root.with_name(root.name + ".run").read_bytes())["group"])


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Make a folder that an unprivileged user can reach and write to."""
    folder = Path(tempfile.mkdtemp(prefix="musterd-test-"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def unprivileged() -> None:
    """Skip where the test cannot run as another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    probe = subprocess.run(
        [sys.executable, "-c", "import musterd.supervisor.processes.spawner"],
        **AS_NOBODY,
        check=False,
        capture_output=True,
    )
    if probe.returncode:
        pytest.skip("the interpreter or the project cannot be read by an unprivileged user")


# -- the supervisor is killed -------------------------------------------------------------------


@pytest.mark.parametrize("containment", MODES)
def test_nothing_survives_the_sigkill_of_the_supervisor(
    tmp_path: Path, survivors: Survivors, containment: str, waiting: Waiting
) -> None:
    with _hosted(tmp_path / "temp", containment, f"tree:{survivors.path}") as host:
        assert host.wait_for(containment)
        survivors.wait_until_up()
        made = descendants(host.process.pid, family())
        host.kill()
    seconds = survivors.wait_until_gone()
    print(f"{containment}: gone after {seconds * 1e3:.1f} ms")
    waiting("fork servers and inits are gone", lambda: not any(map(is_alive, made)))
    assert _next_start(tmp_path / "temp").directories == 1
    assert not list((tmp_path / "temp").iterdir())


@pytest.mark.parametrize("containment", [MODES[1], MODES[2]])
def test_what_nobody_cleaned_up_is_ended_by_the_next_start(
    tmp_path: Path, survivors: Survivors, containment: str, waiting: Waiting
) -> None:
    with (
        _bystander(tmp_path) as bystander,
        _hosted(tmp_path / "temp", containment, f"tree:{survivors.path}") as host,
    ):
        worker = host.worker()
        survivors.wait_until_up()
        mortal = [worker, *family()[host.process.pid]]
        host.kill_with_inits()
        waiting("the worker died with its init", lambda: not any(map(is_alive, mortal)))
        assert survivors.are_there()
        group = _group_of(tmp_path / "temp")
        assert group.exists() == (containment == "cgroup")
        assert _next_start(tmp_path / "temp") == LeftoversEnded("", -1, TREE_SIZE - 1, 1)
        survivors.wait_until_gone()
        assert bystander.poll() is None, "a process was ended that is not ours"
    assert not list((tmp_path / "temp").iterdir())
    assert not group.exists()


@contextlib.contextmanager
def _bystander(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "3600"], cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_nothing_of_a_supervisor_that_lives_is_touched(
    tmp_path: Path, survivors: Survivors
) -> None:
    """A second supervisor starts on a copy of the state directory of the first."""
    with _hosted(tmp_path / "temp", "auto", f"tree:{survivors.path}") as host:
        host.wait_for("WorkerForked")
        survivors.wait_until_up()
        shutil.copytree(tmp_path / "temp", tmp_path / "copy")
        shutil.copy(tmp_path / "temp.run", tmp_path / "copy.run")
        assert _next_start(tmp_path / "copy") == LeftoversEnded("", -1, 0, 1)
        assert survivors.are_there()


@pytest.mark.parametrize("end", ["of the supervisor", "of the fork server"])
def test_what_an_import_started_is_ended_after_the_sigkill(
    tmp_path: Path, survivors: Survivors, end: str, waiting: Waiting
) -> None:
    (tmp_path / "importing.py").write_text(
        "import os, subprocess, sys\n"
        f"fifo = os.open({str(survivors.path)!r}, os.O_WRONLY)\n"
        "script = 'import os, sys, time; os.write(int(sys.argv[1]), b\"x\"); time.sleep(3600)'\n"
        "subprocess.Popen([sys.executable, '-c', script, str(fifo)], pass_fds=[fifo],\n"
        "                 start_new_session=True, env={})\n"
        "os.close(fifo)\n"
    )
    with _hosted(tmp_path / "temp", "auto", "import:importing", path=[tmp_path]) as host:
        host.wait_for("WorkerForked")
        survivors.wait_until_up()
        if end == "of the fork server":
            (fork_server,) = (
                pid for pid in family()[host.process.pid] if "fork server" in _title(pid)
            )
            os.kill(fork_server, signal.SIGKILL)
            found = host.wait_for("LeftoversEnded")
            assert "pool='parser', index=-1, processes=1, directories=0" in found
        else:
            host.kill_with_inits()
            assert survivors.are_there()
            found_processes = _next_start(tmp_path / "temp").processes
            assert found_processes >= 1
        survivors.wait_until_gone()


# -- in other surroundings ----------------------------------------------------------------------


def test_nothing_survives_when_run_by_an_unprivileged_user(
    public_folder: Path, survivors_in: Callable[[Path], Survivors], unprivileged: None
) -> None:
    survivors = survivors_in(public_folder)
    with _hosted(public_folder / "temp", "auto", f"tree:{survivors.path}", **AS_NOBODY) as host:
        mode = host.wait_for("pidns")
        assert mode.strip() == "pidns", mode
        survivors.wait_until_up()
        host.kill()
    seconds = survivors.wait_until_gone()
    print(f"unprivileged: gone after {seconds * 1e3:.1f} ms")


def test_an_unprivileged_user_s_next_start_ends_what_was_left(
    public_folder: Path,
    survivors_in: Callable[[Path], Survivors],
    unprivileged: None,
    waiting: Waiting,
) -> None:
    survivors = survivors_in(public_folder)
    root = public_folder / "temp"
    with _hosted(root, "reaper", f"tree:{survivors.path}", **AS_NOBODY) as host:
        mortal = [host.worker(), *family()[host.process.pid]]
        survivors.wait_until_up()
        host.kill_with_inits()
        waiting("the worker died with its init", lambda: not any(map(is_alive, mortal)))
    assert survivors.are_there()
    with _hosted(root, "reaper", "idle", **AS_NOBODY) as host:
        found = host.wait_for("LeftoversEnded")
        assert f"pool='', index=-1, processes={TREE_SIZE - 1}, directories=1" in found
        survivors.wait_until_gone()


@pytest.mark.parametrize("end", ["of the worker", "of the supervisor"])
def test_nothing_survives_where_proc_cannot_be_mounted(
    public_folder: Path, survivors_in: Callable[[Path], Survivors], unprivileged: None, end: str
) -> None:
    cover = "mount -t tmpfs none /proc/fs && exec setpriv --reuid=65534 --regid=65534 "
    prefix = ["unshare", "--mount", "sh", "-c", cover + '--clear-groups "$@"', "sh"]
    survivors = survivors_in(public_folder)
    with _hosted(public_folder / "temp", "pidns", f"tree:{survivors.path}", prefix=prefix) as host:
        mode = host.wait_for("pidns")
        assert mode.startswith("pidns workers see the /proc of the host: "), mode
        worker = host.worker()
        survivors.wait_until_up()
        if end == "of the worker":
            os.kill(worker, signal.SIGKILL)
        else:
            host.kill()
        survivors.wait_until_gone()


NO_PID_NAMESPACES = [
    "unshare",
    "--user",
    "--map-root-user",
    "sh",
    "-c",
    'echo 0 > /proc/sys/user/max_pid_namespaces && exec "$@"',
    "sh",
]
NO_CGROUPS = ["unshare", "--mount", "sh", "-c", 'umount -a -t cgroup2; exec "$@"', "sh"]


@pytest.mark.cgroups
@needs_root
def test_auto_falls_back_to_control_groups_and_says_why(
    tmp_path: Path, survivors: Survivors
) -> None:
    worker = f"tree:{survivors.path}"
    with _hosted(tmp_path / "temp", "auto", worker, prefix=NO_PID_NAMESPACES) as host:
        mode = host.wait_for("PID namespaces")
        assert mode.startswith("cgroup PID namespaces are refused here: ")
        assert "unshare of " in mode
        survivors.wait_until_up()
        host.kill()
    survivors.wait_until_gone()
    group = _group_of(tmp_path / "temp")
    assert group.exists()
    _next_start(tmp_path / "temp")
    assert not group.exists()


@needs_root
def test_auto_falls_back_to_the_reaper_and_says_why(tmp_path: Path, survivors: Survivors) -> None:
    worker = f"tree:{survivors.path}"
    prefix = [*NO_CGROUPS, *NO_PID_NAMESPACES]
    with _hosted(tmp_path / "temp", "auto", worker, prefix=prefix) as host:
        mode = host.wait_for("PID namespaces")
        assert mode.startswith("reaper PID namespaces are refused here: ")
        assert "; control groups are refused here: no hierarchy" in mode
        survivors.wait_until_up()
        host.kill()
    survivors.wait_until_gone()


def test_pidns_where_it_is_refused_is_a_failed_fork_server(tmp_path: Path) -> None:
    with _hosted(tmp_path / "temp", "pidns", "idle", prefix=NO_PID_NAMESPACES) as host:
        failed = host.wait_for("ForkServerFailed")
        assert "containment = 'pidns' does not work: PID namespaces are refused here" in failed


@needs_root
@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (NO_CGROUPS, "no hierarchy of control groups of version 2 is mounted"),
        (
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
            "Permission denied",
        ),
    ],
)
def test_cgroup_where_it_is_refused_is_a_failed_fork_server(
    public_folder: Path, unprivileged: None, prefix: list[str], reason: str
) -> None:
    with _hosted(public_folder / "temp", "cgroup", "idle", prefix=prefix) as host:
        failed = host.wait_for("ForkServerFailed")
        assert "containment = 'cgroup' does not work: control groups are refused here" in failed
        assert reason in failed


@pytest.fixture
def delegated() -> Iterator[Path]:
    """Make a control group that belongs to an unprivileged user, as systemd does."""
    group = cgroups.own_group() / f"delegated-{os.getpid()}"
    group.mkdir()
    for path in (group, group / "cgroup.procs", group / "cgroup.subtree_control"):
        os.chown(path, NOBODY, NOBODY)
    yield group
    assert cgroups.clear(group)


@pytest.mark.cgroups
@needs_root
def test_a_delegated_group_serves_an_unprivileged_user(
    public_folder: Path,
    survivors_in: Callable[[Path], Survivors],
    unprivileged: None,
    request: pytest.FixtureRequest,
) -> None:
    group = request.getfixturevalue("delegated")
    enter = f"echo 0 > {group}/cgroup.procs; exec setpriv --reuid=65534 --regid=65534 "
    prefix = ["sh", "-c", enter + '--clear-groups "$@"', "sh"]
    survivors = survivors_in(public_folder)
    tree = f"tree:{survivors.path}"
    with _hosted(public_folder / "temp", "cgroup", tree, prefix=prefix) as host:
        assert host.wait_for("cgroup").strip() == "cgroup"
        worker = host.worker()
        survivors.wait_until_up()
        (leaf,) = group.glob("musterd-*/parser-1")
        assert len((leaf / "cgroup.procs").read_text().split()) == TREE_SIZE
        os.kill(worker, signal.SIGKILL)
        survivors.wait_until_gone()
        host.wait_for("WorkerExited")
        assert not leaf.exists()


# -- control groups -----------------------------------------------------------------------------


@pytest.mark.cgroups
def test_a_group_is_emptied_without_cgroup_kill(tmp_path: Path, survivors: Survivors) -> None:
    """Kernels before 5.14 have no cgroup.kill; the tree goes on forking while it is killed."""
    group = cgroups.own_group() / f"test-of-tests-{os.getpid()}"
    (group / "inner").mkdir(parents=True)
    script = (
        "import os, signal, time\n"
        f"fifo = os.open({str(survivors.path)!r}, os.O_WRONLY)\n"
        "for signum in (signal.SIGTERM, signal.SIGHUP): signal.signal(signum, signal.SIG_IGN)\n"
        "for number in range(20):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if number == 0: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "        while True:\n"
        "            if os.fork(): os._exit(0)\n"
        "            time.sleep(0.001)\n"
        "os.write(fifo, b'x')\n"
        "time.sleep(3600)\n"
    )
    enter = f'echo 0 > {group}/inner/cgroup.procs; exec "$@"'
    process = subprocess.Popen(["sh", "-c", enter, "sh", sys.executable, "-c", script])
    survivors.wait_until_up()
    deadline = time.monotonic() + cgroups.KILL_SECONDS_MAX
    while not cgroups.is_empty(group) and time.monotonic() < deadline:
        cgroups.kill_each(group)
    survivors.wait_until_gone()
    assert process.wait() == -signal.SIGKILL
    assert cgroups.remove(group)
    assert not group.exists()


# -- marks --------------------------------------------------------------------------------------


def test_a_mark_is_carried_over_everything_a_process_does(tmp_path: Path, waiting: Waiting) -> None:
    run = marks.new_run()
    mark = marks.of_worker(run, 5)
    script = (
        "import os\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "os.closerange(0, 100)\n"
        "os.chdir('/')\n"
        "os.execve('/bin/sleep', ['-', '3600'], {})\n"
    )
    child = os.fork()
    if child == 0:
        marks.put_on(mark)
        os.execv(sys.executable, [sys.executable, "-c", script])
    os.waitpid(child, 0)
    waiting("the grandchild has changed its name", lambda: _sleepers(run, mark))
    assert marks.find(marks.new_run()) == {}
    assert not marks.carried(run)
    assert marks.end_all(run) == (1, 0)
    assert marks.find(run) == {}


def _sleepers(run: int, mark: int) -> bool:
    found = marks.find(run)
    return list(found) == [mark] and [_title(pid) for pid in found[mark]] == ["-\x003600\x00"]


def test_a_pid_that_belongs_to_somebody_else_by_now_is_not_opened() -> None:
    assert marks.open_marked(os.getpid(), marks.of_worker(marks.new_run(), 1)) is None
