"""Real processes: fork servers, inits, workers, and their remains."""

import errno
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from musterd.ipc.wire.messages import TaskDeclaration
from musterd.ipc.wire.signals import DUMP_SIGNAL, INTERRUPT_SIGNAL
from musterd.supervisor.core.model.events import (
    ForkServerExited,
    ForkServerFailed,
    ForkServerReady,
    LeftoversEnded,
    SpawnFailed,
    WorkerExited,
    WorkerForked,
)
from musterd.supervisor.processes import marks, orphans
from musterd.supervisor.processes import spawner as spawner_module
from musterd.supervisor.processes.handles import Event
from musterd.supervisor.processes.init import FORWARDED, KILL_TREE
from musterd.supervisor.processes.spawner import Spawner
from musterd.supervisor.system.linux import family, stat_of
from support.surroundings import Survivors
from support.waiting import wait_for

HERE = Path(__file__).parent
DEADLINE_SECONDS = 20.0
TREE_SIZE = 6  # processes in a tree of spawner_workers.py, the worker included
MODES = ["pidns", pytest.param("cgroup", marks=pytest.mark.cgroups), "reaper"]
E = TypeVar("E", bound=Event)


class Harness:
    """A spawner whose events tests wait for, in order."""

    def __init__(self, spawner: Spawner) -> None:
        self.spawner = spawner
        self._events: list[Event] = []
        self._workers = 0

    def wait_for(self, kind: type[E], **fields: Any) -> E:
        """Return the first event of that kind; earlier events stay for later calls."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            for event in self._events:
                if isinstance(event, kind) and all(
                    getattr(event, name) == value for name, value in fields.items()
                ):
                    self._events.remove(event)
                    return event
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__} {fields}, but {self._events}"
            select.select([self.spawner], [], [], left)
            self._events += self.spawner.events()

    def start(self, worker: str, pool: str = "parser", **arguments: Any) -> ForkServerReady:
        env = {"PYTHONPATH": str(HERE), **arguments.pop("env", {})}
        self.spawner.start_fork_server(pool, worker, env=env, **arguments)
        return self.wait_for(ForkServerReady, pool=pool)

    def spawn(self, pool: str = "parser", index: int = 0) -> int:
        """Spawn a worker; return its number once its pid is known."""
        worker = self.ask(pool, index)
        self.wait_for(WorkerForked, worker=worker)
        return worker

    def ask(self, pool: str = "parser", index: int = 0) -> int:
        self._workers += 1
        self.spawner.spawn(self._workers, pool, index)
        return self._workers


Open = Callable[..., Harness]


@pytest.fixture
def spawners(tmp_path: Path) -> Iterator[Open]:
    """Open spawners; afterwards they may leave nothing behind."""
    descriptors = _descriptors()
    before = set(family().get(os.getpid(), []))  # processes that the suite itself started
    opened: list[Spawner] = []

    def open_spawner(containment: str = "auto") -> Harness:
        root = tmp_path / f"temp{len(opened)}"
        opened.append(Spawner("workers.sock", root, containment, runtime="spawner_workers"))
        return Harness(opened[-1])

    yield open_spawner
    for spawner in opened:
        spawner.close()
    assert set(family().get(os.getpid(), [])) <= before, "processes are left"
    assert _descriptors() == descriptors, "descriptors are left"
    assert not [path for root in tmp_path.glob("temp[0-9]") for path in root.iterdir()]
    assert "janitor" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def harness(spawners: Open) -> Harness:
    return spawners()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _report(folder: Path, index: int = 0) -> dict[str, Any]:
    path = folder / f"parser-{index}.json"
    wait_for("the worker reports", path.exists)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def _parent(pid: int) -> int:
    return next(parent for parent, children in family().items() if pid in children)


# -- a worker's surroundings --------------------------------------------------------------------


def test_worker_is_pid_2_of_its_own_namespace(spawners: Open, tmp_path: Path) -> None:
    harness = spawners("pidns")
    ready = harness.start("idle", options=str(tmp_path).encode())
    assert ready.declarations == (TaskDeclaration("noop", timeout_ns=5),)
    assert harness.spawner.containment() == {"parser": ("pidns", "")}
    began = time.monotonic()
    worker = harness.spawn()
    print(f"spawn to WorkerForked: {(time.monotonic() - began) * 1e3:.1f} ms")
    seen = _report(tmp_path)
    assert (seen["pid"], seen["ppid"], seen["proc_self"]) == (2, 1, "2")
    pid = harness.spawner.pid(worker)
    assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"musterd: worker parser/0")
    init = _parent(pid)
    assert Path(f"/proc/{init}/cmdline").read_bytes().startswith(b"musterd: init parser\0")
    assert _parent(init) == os.getpid()


@pytest.mark.parametrize("containment", MODES)
def test_worker_starts_as_an_ordinary_process(
    spawners: Open, tmp_path: Path, containment: str
) -> None:
    harness = spawners(containment)
    harness.start("idle", options=str(tmp_path).encode(), env={"GREETING": "hello"})
    worker = harness.spawn(index=4)
    seen = _report(tmp_path, index=4)
    assert (seen["pool"], seen["index"], seen["socket"]) == ("parser", 4, "workers.sock")
    assert seen["title"] == "musterd: worker parser/4"
    assert seen["GREETING"] == "hello"
    assert seen["stdin"] == "/dev/null"
    assert seen["session"] == seen["pid"]
    assert seen["sigterm_default"]
    assert seen["blocked"] == []
    assert seen["temp_dir"] == seen["TMPDIR"] == str(tmp_path / f"temp0/parser-4-{worker}")
    assert Path(seen["temp_dir"]).stat().st_mode & 0o777 == 0o700
    # No channel of the fork server, no pipe and no pidfd: only the scoreboard and the duplicate of
    # its mapping.
    inherited = [fd for fd in seen["fds"] if fd.startswith(("socket", "anon_inode", "/memfd"))]
    assert set(inherited) == {"/memfd"}


def test_workers_of_one_fork_server_have_different_random_numbers(
    harness: Harness, tmp_path: Path
) -> None:
    harness.start("idle", options=str(tmp_path).encode())
    for index in range(3):
        harness.spawn(index=index)
    assert len({_report(tmp_path, index)["random"] for index in range(3)}) == 3


def test_the_daemon_may_open_more_files_and_its_workers_as_many_as_before(
    spawners: Open, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] <= 600:
        pytest.skip("the hard limit of open files leaves no room")
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, before[1]))
    try:
        harness = spawners()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 600
        harness.start("idle", options=str(tmp_path).encode())
        harness.spawn()
        assert _report(tmp_path)["open_files"] == 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_token_names_its_worker_once(harness: Harness, tmp_path: Path) -> None:
    harness.start("idle", options=str(tmp_path).encode())
    worker = harness.spawn()
    token = _report(tmp_path)["token"]
    assert harness.spawner.worker_of("0" * 32) is None
    assert harness.spawner.worker_of(token) == worker
    assert harness.spawner.worker_of(token) is None


def test_token_of_a_dead_worker_is_worth_nothing(harness: Harness, tmp_path: Path) -> None:
    harness.start("idle", options=str(tmp_path).encode())
    worker = harness.spawn()
    token = _report(tmp_path)["token"]
    harness.spawner.kill(worker)
    harness.wait_for(WorkerExited, worker=worker)
    assert harness.spawner.worker_of(token) == 0


# -- how a worker ends --------------------------------------------------------------------------


@pytest.mark.parametrize("containment", MODES)
@pytest.mark.parametrize(
    ("behaviour", "exit_code", "detail"),
    [
        ("exit:0", 0, ""),
        ("exit:7", 7, ""),
        (f"signal:{signal.SIGTERM:d}", -signal.SIGTERM, ""),
        (f"signal:{signal.SIGKILL:d}", -signal.SIGKILL, ""),
        ("words:no browser here", 3, "no browser here"),
        ("raise:boom", 1, "ValueError: boom"),
    ],
)
def test_exit_is_reported_as_it_was(
    spawners: Open, containment: str, behaviour: str, exit_code: int, detail: str
) -> None:
    harness = spawners(containment)
    harness.start(behaviour)
    worker = harness.spawn()
    assert harness.wait_for(WorkerExited) == WorkerExited(worker, exit_code, 0, detail)
    assert harness.spawner.pid(worker) == 0
    assert harness.spawner.board(worker) is None


@pytest.mark.parametrize("containment", MODES)
def test_terminate_reaches_the_worker_and_kill_everything(spawners: Open, containment: str) -> None:
    harness = spawners(containment)
    harness.start("idle")
    first, second = harness.spawn(index=0), harness.spawn(index=1)
    harness.spawner.terminate(first)
    assert harness.wait_for(WorkerExited).exit_code == -signal.SIGTERM
    assert not harness.spawner.signal(first, signal.SIGUSR1)
    harness.spawner.kill(second)
    assert harness.wait_for(WorkerExited) == WorkerExited(second, -signal.SIGKILL, 0)


def test_sigterm_to_the_init_is_forwarded(harness: Harness) -> None:
    harness.start("idle")
    worker = harness.spawn()
    os.kill(_parent(harness.spawner.pid(worker)), signal.SIGTERM)
    assert harness.wait_for(WorkerExited).exit_code == -signal.SIGTERM


@pytest.mark.parametrize("containment", MODES)
def test_no_signal_for_workers_is_the_one_that_kills_the_tree(
    spawners: Open, containment: str
) -> None:
    assert KILL_TREE not in {INTERRUPT_SIGNAL, DUMP_SIGNAL} | FORWARDED
    harness = spawners(containment)
    harness.start("idle")
    worker = harness.spawn()
    init = _parent(harness.spawner.pid(worker))
    for signum in (INTERRUPT_SIGNAL, DUMP_SIGNAL):
        os.kill(init, signum)
    os.kill(init, signal.SIGTERM)
    assert harness.wait_for(WorkerExited).exit_code == -signal.SIGTERM


def test_the_lease_that_ran_is_known_after_a_crash(harness: Harness) -> None:
    harness.start("busy:42")
    worker = harness.spawn()

    def lease() -> int:
        reading = harness.spawner.board(worker)
        assert reading is not None
        return reading.lease

    wait_for("the board shows the lease", lambda: lease() == 42)
    os.kill(harness.spawner.pid(worker), signal.SIGKILL)
    assert harness.wait_for(WorkerExited) == WorkerExited(worker, -signal.SIGKILL, 42)


def test_a_worker_ended_before_its_fork_is_reported_and_never_runs(
    harness: Harness, tmp_path: Path
) -> None:
    harness.start("idle", options=str(tmp_path).encode())
    killed, terminated = harness.ask(index=0), harness.ask(index=1)
    harness.spawner.kill(killed)
    harness.spawner.terminate(terminated)
    assert harness.wait_for(WorkerExited) == WorkerExited(killed, -signal.SIGKILL, 0)
    assert harness.wait_for(WorkerExited) == WorkerExited(terminated, -signal.SIGTERM, 0)
    harness.spawn(index=2)
    _report(tmp_path, index=2)
    assert not (tmp_path / "parser-0.json").exists()
    assert not (tmp_path / "parser-1.json").exists()


def test_temporary_directory_goes_with_its_worker(harness: Harness, tmp_path: Path) -> None:
    harness.start("idle", options=str(tmp_path).encode())
    worker = harness.spawn()
    folder = Path(_report(tmp_path)["temp_dir"])
    (folder / "locked").mkdir()
    (folder / "locked" / "file").write_text("x")
    (folder / "locked").chmod(0)
    harness.spawner.kill(worker)
    harness.wait_for(WorkerExited)
    wait_for("the temporary directory is gone", lambda: not folder.exists())


def test_leftovers_of_an_earlier_supervisor_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "temp"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (root / "parser-0-1" / "profile").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "file").write_text("x")
    Spawner("workers.sock", root).close()
    assert list(root.iterdir()) == []
    assert (outside / "kept").exists()


# -- nothing survives ---------------------------------------------------------------------------


@pytest.mark.parametrize("containment", MODES)
@pytest.mark.parametrize("end", ["SIGKILL of the worker", "kill()", "normal exit"])
def test_nothing_survives_the_end_of_a_worker(
    spawners: Open, survivors: Survivors, containment: str, end: str
) -> None:
    harness = spawners(containment)
    kind = "tree-exit" if end == "normal exit" else "tree"
    harness.start(f"{kind}:{survivors.path}")
    worker = harness.spawn()
    survivors.wait_until_up()
    if end == "SIGKILL of the worker":
        os.kill(harness.spawner.pid(worker), signal.SIGKILL)
    elif end == "kill()":
        harness.spawner.kill(worker)
    exited = harness.wait_for(WorkerExited)
    assert exited.exit_code == (0 if end == "normal exit" else -signal.SIGKILL)
    print(f"{containment}, {end}: gone {survivors.wait_until_gone() * 1e3:.1f} ms after its event")


@pytest.mark.parametrize("containment", MODES)
def test_nothing_survives_a_killed_init(
    spawners: Open, survivors: Survivors, containment: str
) -> None:
    harness = spawners(containment)
    harness.start(f"tree:{survivors.path}")
    worker = harness.spawn()
    survivors.wait_until_up()
    os.kill(_parent(harness.spawner.pid(worker)), signal.SIGKILL)
    assert harness.wait_for(WorkerExited).exit_code == -signal.SIGKILL
    survivors.wait_until_gone()


def _alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- fork servers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing', at {}:1"),
        ("x = 1\ny = x / 0\n", "ZeroDivisionError: division by zero, at {}:2"),
        ("def f(:\n", "SyntaxError: invalid syntax, at {}:1"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3, at {}:2"),
    ],
)
def test_failed_import_is_reported_with_its_place(
    harness: Harness, tmp_path: Path, source: str, reason: str
) -> None:
    module = tmp_path / "unloadable.py"
    module.write_text(source)
    path = f"{HERE}:{tmp_path}"
    harness.spawner.start_fork_server("parser", "import:unloadable", env={"PYTHONPATH": path})
    failed = harness.wait_for(ForkServerFailed)
    assert failed.reason == f"cannot load 'import:unloadable': {reason.format(module)}"
    # A second attempt is possible at once.
    module.write_text("")
    harness.start("import:unloadable", env={"PYTHONPATH": path})


def test_a_failed_import_in_a_folder_whose_name_is_no_text_is_reported(
    harness: Harness, tmp_path: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"b\xf6t")
    folder.mkdir()
    (folder / "unloadable.py").write_text("x = 1 / 0\n")
    path = f"{HERE}:{folder}"
    harness.spawner.start_fork_server("parser", "import:unloadable", env={"PYTHONPATH": path})
    failed = harness.wait_for(ForkServerFailed)
    assert "ZeroDivisionError" in failed.reason
    assert "b\\udcf6t/unloadable.py:1" in failed.reason


def test_what_a_fork_server_has_imported_is_known_until_it_is_stopped(
    harness: Harness, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("x = 1\n")
    env = {"PYTHONPATH": f"{HERE}:{tmp_path}"}
    harness.start("import:mine", env=env)
    code = harness.spawner.code("parser", "")
    assert code is not None
    mine = [source.path for source in code.sources if source.path.startswith(str(tmp_path))]
    assert mine == [str(tmp_path / "mine.py"), str(tmp_path / "beside.py")]
    assert harness.spawner.code("parser", "another build") is None
    harness.spawner.stop_fork_server("parser")
    assert harness.spawner.code("parser", "") is None
    # Also where it starts over, because the import has started threads, and where it failed.
    restless = "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    (tmp_path / "beside.py").write_text(f"import threading, time\n{restless}\n")
    harness.start("import:mine", env=env)
    again = harness.spawner.code("parser", "")
    assert again is not None
    assert [source.path for source in again.sources] == [source.path for source in code.sources]
    harness.spawner.stop_fork_server("parser")
    (tmp_path / "beside.py").write_text("def f(:\n")
    harness.spawner.start_fork_server("parser", "import:mine", env=env)
    harness.wait_for(ForkServerFailed)
    failed = harness.spawner.code("parser", "")
    assert failed is not None
    assert failed.sources[-1].path == str(tmp_path / "beside.py")


def test_a_module_that_does_not_exist_is_named(harness: Harness) -> None:
    harness.spawner.start_fork_server("parser", "import:nowhere", env={"PYTHONPATH": str(HERE)})
    failed = harness.wait_for(ForkServerFailed)
    assert failed.reason == (
        "cannot load 'import:nowhere': ModuleNotFoundError: No module named 'nowhere'"
    )


def test_a_module_in_the_current_directory_is_found_and_hides_nothing(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_worker.py").write_text("")
    (tmp_path / "tempfile.py").write_text("raise RuntimeError('not the tempfile of Python')")
    monkeypatch.chdir(tmp_path)
    harness.start("import:my_own_worker")


def test_import_that_starts_a_thread_still_gives_workers(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness.start("thread", options=str(tmp_path).encode())
    (record,) = caplog.records
    fields = record.__dict__["fields"]
    assert fields == {"EVENT": "forkserver.threads", "POOL": "parser", "THREADS": "restless"}
    harness.spawn()
    seen = _report(tmp_path)
    assert seen["threads"] == ["MainThread", "restless"]
    assert seen["pid"] == 2


@pytest.mark.parametrize("loading", [True, False])
def test_killed_fork_server_is_reported_and_can_be_started_again(
    harness: Harness, tmp_path: Path, loading: bool
) -> None:
    if loading:
        (tmp_path / "slow.py").write_text("import time; time.sleep(3600)")
        path = f"{HERE}:{tmp_path}"
        harness.spawner.start_fork_server("parser", "import:slow", env={"PYTHONPATH": path})
    else:
        harness.start("idle")
        survivor = harness.spawn()
    # Until its exec, the fork server's title is that of these tests.
    wait_for("there is a fork server", _fork_servers)
    (fork_server,) = _fork_servers()
    os.kill(fork_server, signal.SIGKILL)
    reason = "the fork server was ended by signal 9" + " while it loaded the worker class" * loading
    assert harness.wait_for(ForkServerExited) == ForkServerExited("parser", reason)
    unborn = harness.ask()
    assert harness.wait_for(SpawnFailed) == SpawnFailed(unborn, "pool 'parser' has no fork server")
    harness.start("idle")
    harness.spawn()
    if not loading:
        assert _alive(harness.spawner.pid(survivor))


def _fork_servers() -> list[int]:
    return [pid for pid in family()[os.getpid()] if _is_fork_server(pid)]


def _is_fork_server(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return (
        command.startswith(b"musterd: fork server")
        or b"musterd.supervisor.processes.forkserver" in command
    )


def test_requests_a_dead_fork_server_did_not_serve_fail(harness: Harness) -> None:
    harness.start("idle")
    (fork_server,) = filter(_is_fork_server, family()[os.getpid()])
    os.kill(fork_server, signal.SIGSTOP)
    unborn = [harness.ask(index=index) for index in range(3)]
    os.kill(fork_server, signal.SIGKILL)
    assert sorted(harness.wait_for(SpawnFailed).worker for _ in unborn) == unborn
    harness.wait_for(ForkServerExited)


def test_a_fork_server_that_takes_no_requests_blocks_nobody_and_loses_none(
    harness: Harness,
) -> None:
    harness.start("idle")
    (fork_server,) = filter(_is_fork_server, family()[os.getpid()])
    os.kill(fork_server, signal.SIGSTOP)
    asked = [harness.ask(index=index) for index in range(2000)]
    assert harness.spawner.events() == []
    called_off = asked.pop(1500)
    harness.spawner.kill(called_off)
    assert harness.wait_for(WorkerExited) == WorkerExited(called_off, -signal.SIGKILL, 0)
    os.kill(fork_server, signal.SIGKILL)
    assert [harness.wait_for(SpawnFailed).worker for _ in asked] == asked


def test_stopped_fork_server_leaves_its_workers_and_says_nothing(harness: Harness) -> None:
    harness.start("idle")
    worker = harness.spawn()
    harness.spawner.stop_fork_server("parser")
    assert harness.spawner.containment() == {}
    harness.start("idle")  # at once, while the old one is still ending
    wait_for(
        "the old fork server is gone",
        lambda: sum(map(_is_fork_server, family()[os.getpid()])) == 1,
    )
    assert harness.spawner.events() == []
    assert _alive(harness.spawner.pid(worker))


def test_orphans_are_reaped_but_not_the_daemon_s_own_children(harness: Harness) -> None:
    own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"])
    os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
    harness.spawner.events()
    assert own.wait() == 5
    orphan = int(
        subprocess.check_output(
            [
                sys.executable,
                "-c",
                "import os\npid = os.fork()\nif pid: print(pid)\nelse: os.setsid()",
            ]
        )
    )

    def reaped() -> bool:
        harness.spawner.events()
        return not Path(f"/proc/{orphan}").exists()

    wait_for("the orphan is reaped", reaped)


def test_fifty_workers_leave_no_descriptor(harness: Harness, tmp_path: Path) -> None:
    harness.start("idle")
    before = _descriptors()
    began = time.monotonic()
    for _ in range(50):
        worker = harness.spawn()
        harness.spawner.kill(worker)
        harness.wait_for(WorkerExited, worker=worker)
    print(f"spawn and kill: {(time.monotonic() - began) / 50 * 1e3:.1f} ms each")
    wait_for("descriptors are given back", lambda: _descriptors() <= before)


def test_an_orphan_is_reaped_although_a_child_of_the_daemon_waits_to_be(spawners: Open) -> None:
    own = subprocess.Popen([sys.executable, "-c", ""])  # ends before anybody waits for it
    os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
    harness = spawners()
    orphan = os.fork()
    if orphan == 0:
        os.setsid()
        os._exit(0)
    os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
    harness.spawner.events()
    try:
        assert not _alive_or_zombie(orphan), "the orphan is a zombie"
    finally:
        own.wait()


def _alive_or_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# -- the census ---------------------------------------------------------------------------------


@pytest.mark.parametrize("containment", [MODES[1], MODES[2]])
def test_a_slot_gets_no_worker_before_the_remains_of_the_last_one_are_gone(
    spawners: Open, survivors: Survivors, containment: str
) -> None:
    harness = spawners(containment)
    harness.start(f"tree:{survivors.path}")
    worker = harness.spawn()
    survivors.wait_until_up()
    os.kill(_parent(harness.spawner.pid(worker)), signal.SIGKILL)
    found = harness.wait_for(LeftoversEnded)
    assert (found.pool, found.index, found.directories) == ("parser", 0, 0)
    assert found.processes in (TREE_SIZE, TREE_SIZE - 1)  # the worker may die with its init
    harness.wait_for(WorkerExited)
    harness.spawn(index=0)


def test_a_slot_waits_until_what_was_killed_is_gone(
    spawners: Open, survivors: Survivors, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the kernel had not released the processes yet.
    monkeypatch.setattr(orphans, "_kill", lambda pidfd: None)
    monkeypatch.setattr(spawner_module, "kill_inherited", lambda known: False)
    harness = spawners("reaper")
    harness.start(f"tree:{survivors.path}")
    worker = harness.spawn()
    survivors.wait_until_up()
    os.kill(_parent(harness.spawner.pid(worker)), signal.SIGKILL)
    harness.wait_for(LeftoversEnded)
    waits, other = harness.ask(index=0), harness.ask(index=1)
    harness.wait_for(WorkerForked, worker=other)
    assert not [each for each in harness._events if isinstance(each, WorkerForked)]
    strays = marks.find(_run(harness))[marks.of_worker(_run(harness), worker)]
    assert len(strays) >= TREE_SIZE - 1
    monkeypatch.undo()
    for pid in strays:
        os.kill(pid, signal.SIGKILL)
    harness.wait_for(WorkerForked, worker=waits)


def test_a_slot_does_not_wait_for_ever(
    spawners: Open,
    survivors: Survivors,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(orphans, "_kill", lambda pidfd: None)
    monkeypatch.setattr(spawner_module, "kill_inherited", lambda known: False)
    monkeypatch.setattr(orphans, "PATIENCE_SECONDS", 0.2)
    harness = spawners("reaper")
    harness.start(f"tree:{survivors.path}")
    worker = harness.spawn()
    survivors.wait_until_up()
    os.kill(_parent(harness.spawner.pid(worker)), signal.SIGKILL)
    harness.wait_for(LeftoversEnded)
    waits = harness.ask(index=0)

    def forked() -> bool:  # no event announces that the wait is over
        harness._events += harness.spawner.events()
        return any(isinstance(e, WorkerForked) and e.worker == waits for e in harness._events)

    wait_for("the slot has its worker", forked)
    events = [record.__dict__["fields"]["EVENT"] for record in caplog.records]
    assert events.count("worker.resists") == TREE_SIZE - 1
    monkeypatch.undo()


def _run(harness: Harness) -> int:
    return harness.spawner._run_record.run


def test_a_directory_that_was_not_removed_is_found_before_the_next_spawn(
    harness: Harness, tmp_path: Path
) -> None:
    harness.start("idle", options=str(tmp_path).encode())
    worker = harness.spawn(index=3)
    folder = Path(_report(tmp_path, index=3)["temp_dir"])
    harness.spawner.kill(worker)
    harness.wait_for(WorkerExited)
    removes = harness.spawner._janitor.removes
    wait_for(
        "the temporary directory is gone",
        lambda: not folder.exists() and not removes(folder),
    )
    folder.mkdir()
    harness.spawn(index=3)
    assert harness.wait_for(LeftoversEnded) == LeftoversEnded("parser", 3, 0, 1)
    wait_for("the directory is gone", lambda: not folder.exists())


def test_a_worker_that_leaves_nothing_is_replaced_without_a_word(harness: Harness) -> None:
    harness.start("idle")
    for _ in range(3):
        harness.spawner.kill(harness.spawn(index=0))
        harness.wait_for(WorkerExited)
    assert harness.spawner.events() == []
    assert not harness._events


# -- no descriptors -----------------------------------------------------------------------------


class NoDescriptors:
    """An os.pidfd_open of which some calls fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = os.pidfd_open
        self.failing: set[int] = set()  # numbers of calls
        self._calls = 0
        monkeypatch.setattr(os, "pidfd_open", self)

    def fail(self, call: int) -> None:
        """Make a later call fail: 1 is the next call."""
        self.failing.add(self._calls + call)

    def __call__(self, pid: int, flags: int = 0) -> int:
        self._calls += 1
        if self._calls in self.failing:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._real(pid, flags)


def test_without_a_descriptor_for_a_worker_it_ends_and_the_spawner_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.start("idle")
    openings = NoDescriptors(monkeypatch)
    openings.fail(1)  # for the init
    worker = harness.ask()
    assert "cannot be watched" in harness.wait_for(SpawnFailed, worker=worker).reason
    openings.fail(2)  # for the worker itself
    worker = harness.ask()
    assert harness.wait_for(WorkerExited, worker=worker).exit_code == -signal.SIGKILL
    harness.spawn()


def test_without_a_descriptor_for_a_fork_server_nothing_is_left_of_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings = NoDescriptors(monkeypatch)
    before, children = len(os.listdir("/proc/self/fd")), set(family().get(os.getpid(), ()))
    openings.fail(1)
    harness.spawner.start_fork_server("parser", "idle", env={"PYTHONPATH": str(HERE)})
    assert "Too many open files" in harness.wait_for(ForkServerExited).reason
    wait_for("no process is left", lambda: set(family().get(os.getpid(), ())) <= children)
    assert len(os.listdir("/proc/self/fd")) == before
    harness.start("idle")


def test_without_a_descriptor_to_look_with_the_census_is_taken_later(
    spawners: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = spawners("reaper")
    harness.start("idle")
    worker = harness.spawn()
    real = os.listdir

    def fail(path: str = ".") -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "listdir", fail)
    os.kill(_stat_parent(harness.spawner.pid(worker)), signal.SIGKILL)  # its init
    harness.wait_for(WorkerExited, worker=worker)
    harness.spawner.events()
    monkeypatch.setattr(os, "listdir", real)
    harness.spawn()


def _stat_parent(pid: int) -> int:
    stat = stat_of(pid)
    assert stat is not None
    return stat.parent
