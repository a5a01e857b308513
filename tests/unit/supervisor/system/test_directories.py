"""Directories and sockets: where they are looked for, and which are refused as unsafe."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire import paths as shared
from musterd.supervisor.system import directories

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """Make a directory of an ordinary user, who runs the test: all uids are real."""
    folder = Path(tempfile.mkdtemp(prefix="musterd-test-"))
    folder.chmod(0o755)
    root = os.geteuid() == 0
    if root:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                inner.chmod(0o700)  # some are read-only, which only root could ignore
        shutil.rmtree(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def listen(path: Path, folder_mode: int = 0o700) -> None:
    """Leave a socket at the path, as a daemon does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(folder_mode)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def environ(place: Path) -> dict[str, str]:
    (place / "session").mkdir(exist_ok=True)
    (place / "tmp").mkdir(exist_ok=True)
    return {
        "XDG_RUNTIME_DIR": str(place / "session"),
        "TMPDIR": str(place / "tmp"),
        "HOME": str(place),
    }


# -- the runtime directory ---------------------------------------------------------------------


def test_a_configured_directory_is_taken_as_it_is(place: Path) -> None:
    assert directories.runtime_dir("/x/run", environ(place)) == Path("/x/run")
    assert directories.state_dir("/x/state", environ(place)) == Path("/x/state")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root")
def test_root_uses_the_directories_of_the_system() -> None:
    assert directories.runtime_dir("", {"XDG_RUNTIME_DIR": "/tmp"}) == Path("/run/musterd")
    assert directories.state_dir("", {"HOME": "/tmp"}) == Path("/var/lib/musterd")


def test_the_systems_directory_is_used_where_it_is_writable(place: Path) -> None:
    (place / "system").mkdir()
    assert shared.default_runtime_dir(environ(place), place / "system") == place / "system"
    assert directories.state_dir("", environ(place), place / "system") == place / "system"


def test_else_the_directory_is_the_sessions(place: Path) -> None:
    (place / "system").mkdir(0o555)
    found = shared.default_runtime_dir(environ(place), place / "system")
    assert found == place / "session" / "musterd"
    assert directories.state_dir("", environ(place), place / "system") == (
        place / ".local" / "state" / "musterd"
    )


@pytest.mark.parametrize("session", ["", "relative", "/nonexistent/session", "/"])
def test_else_the_directory_is_private_under_the_temporary_one(place: Path, session: str) -> None:
    variables = {**environ(place), "XDG_RUNTIME_DIR": session}
    expected = place / "tmp" / f"musterd-{os.geteuid()}"
    assert shared.default_runtime_dir(variables, place / "absent") == expected


def test_without_a_home_the_state_directory_must_be_given(place: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"give supervisor\.state_dir"):
        directories.state_dir("", {}, place / "absent")


# -- sockets ----------------------------------------------------------------------------------


def test_the_sockets_have_the_promised_names() -> None:
    folder = Path("/run/musterd")
    assert directories.control_socket(folder) == folder / "control.sock"
    assert directories.tasks_socket(folder) == folder / "tasks.sock"
    assert directories.workers_socket(folder) == folder / "workers.sock"
    assert directories.store_file(Path("/var/lib/musterd")).parent == Path("/var/lib/musterd")


def test_the_longest_path_that_is_accepted_can_really_be_bound(place: Path) -> None:
    length = shared.SOCKET_PATH_BYTES_MAX - len(os.fsencode(place)) - len("//workers.sock")
    folder = place / ("x" * length)
    folder.mkdir()
    path = directories.workers_socket(folder)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    folder = place / ("x" * (length + 1))
    folder.mkdir()
    with pytest.raises(ConfigurationError, match=r"108 bytes.* at most 107: shorten supervisor\."):
        directories.workers_socket(folder)
    with socket.socket(socket.AF_UNIX) as server, pytest.raises(OSError, match="too long"):
        server.bind(str(folder / "workers.sock"))


def test_the_length_counts_bytes_not_characters() -> None:
    with pytest.raises(ConfigurationError, match="the path has 132 bytes"):
        directories.tasks_socket(Path("/" + "é" * 60))
    with pytest.raises(ConfigurationError, match="shorten MUSTERD_TASKS"):
        shared.find_tasks_socket({"MUSTERD_TASKS": "/" + "x" * 200})


def test_a_client_takes_the_first_socket_that_exists(place: Path) -> None:
    variables, system = environ(place), place / "system"
    private = place / "tmp" / f"musterd-{os.geteuid()}" / "tasks.sock"
    found = [shared.find_tasks_socket(variables, system)]
    listen(private)
    found.append(shared.find_tasks_socket(variables, system))
    listen(place / "session" / "musterd" / "tasks.sock")
    found.append(shared.find_tasks_socket(variables, system))
    listen(system / "tasks.sock", 0o755)
    found.append(shared.find_tasks_socket(variables, system))
    found.append(shared.find_tasks_socket({**variables, "MUSTERD_TASKS": "/x/t.sock"}, system))
    assert found == [
        place / "session" / "musterd" / "tasks.sock",  # none exists: the path where it would be
        private,
        place / "session" / "musterd" / "tasks.sock",
        system / "tasks.sock",
        Path("/x/t.sock"),
    ]


@contextmanager
def served(folder: Path) -> Iterator[Path]:
    """A project that `musterd dev` runs."""
    run = folder / shared.PROJECT_RUNTIME_DIR
    run.mkdir(parents=True)
    (folder / shared.PROJECT_DIR).chmod(0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(run / "control.sock"))
        server.listen()
        yield run


def test_within_a_project_that_runs_its_sockets_are_found(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = environ(place)
    usual = place / "session" / "musterd"
    below = place / "bot" / "tests"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    with served(place / "bot") as run:
        assert shared.find_tasks_socket(variables, place / "absent") == run / "tasks.sock"
        assert shared.find_control_socket(variables, place / "absent") == run / "control.sock"
        (place / "bot" / ".musterd").chmod(0o770)
        found = shared.find_control_socket(variables, place / "absent")
        assert found == usual / "control.sock", "others may have put it there"
        (place / "bot" / ".musterd").chmod(0o700)
        assert shared.find_control_socket(variables, place / "absent") == run / "control.sock"
    found = shared.find_control_socket(variables, place / "absent")
    assert found == usual / "control.sock", "its daemon was killed and left the socket"


def test_the_sockets_of_a_project_in_a_long_path_are_behind_its_link(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / ("x" * 100)
    with served(place / "short") as run:
        (folder / shared.PROJECT_DIR).mkdir(parents=True, mode=0o700)
        (folder / shared.PROJECT_RUNTIME_DIR).symlink_to(run)
        monkeypatch.chdir(folder)
        found = shared.find_control_socket(environ(place), place / "absent")
        assert found == run / "control.sock"
    for each in (folder / shared.PROJECT_DIR, folder):
        shutil.rmtree(each)


def test_folders_that_are_not_for_this_user_are_no_projects(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = environ(place)
    (place / "shut" / "inner").mkdir(parents=True)
    monkeypatch.chdir(place / "shut" / "inner")
    (place / "shut").chmod(0)
    found = shared.find_control_socket(variables, place / "absent")
    assert found == place / "session" / "musterd" / "control.sock"


def test_a_folder_that_was_removed_is_no_project(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = environ(place)
    (place / "gone").mkdir()
    monkeypatch.chdir(place / "gone")
    (place / "gone").rmdir()
    found = shared.find_control_socket(variables, place / "absent")
    assert found == place / "session" / "musterd" / "control.sock"


def test_musterctl_looks_in_the_same_places(place: Path) -> None:
    variables = environ(place)
    listen(place / "session" / "musterd" / "control.sock")
    found = shared.find_control_socket({**variables, "MUSTERD_TASKS": "/x"}, place / "system")
    assert found == place / "session" / "musterd" / "control.sock"


def test_a_file_that_is_no_socket_is_passed_over(place: Path) -> None:
    (place / "system").mkdir(0o755)
    (place / "system" / "tasks.sock").touch()
    (place / "system").chmod(0o555)
    found = shared.find_tasks_socket(environ(place), place / "system")
    assert found == place / "session" / "musterd" / "tasks.sock"


def test_a_socket_in_a_temporary_directory_that_others_can_fill_is_not_used(place: Path) -> None:
    variables = environ(place)
    private = place / "tmp" / f"musterd-{os.geteuid()}"
    listen(private / "tasks.sock", 0o777)
    found = shared.find_tasks_socket(variables, place / "absent")
    assert found == place / "session" / "musterd" / "tasks.sock"
    del variables["XDG_RUNTIME_DIR"]
    with pytest.raises(ConfigurationError, match=r"mode 0700, but it has uid \d+ and mode drwxrwx"):
        shared.find_tasks_socket(variables, place / "absent")


# -- preparing --------------------------------------------------------------------------------


def test_directories_are_made_with_their_modes_whatever_the_umask(place: Path) -> None:
    old = os.umask(0o077)
    try:
        directories.prepare(place / "run" / "musterd", place / "a" / "b" / "state", environ(place))
    finally:
        os.umask(old)
    assert mode(place / "run" / "musterd") == 0o755
    assert mode(place / "a" / "b" / "state") == 0o700


def test_the_directory_under_the_temporary_one_is_private(place: Path) -> None:
    variables = environ(place)
    private = shared.private_runtime_dir(variables)
    directories.prepare(private, place / "state", variables)
    assert mode(private) == 0o700


def test_preparing_again_changes_nothing(place: Path) -> None:
    for _ in range(2):
        directories.prepare(place / "run", place / "state", environ(place))
    (place / "run").chmod(0o750)
    directories.prepare(place / "run", place / "state", environ(place))
    assert mode(place / "run") == 0o750


@pytest.mark.parametrize("unsafe", ["run", "state"])
def test_a_directory_that_everybody_can_write_to_is_refused(place: Path, unsafe: str) -> None:
    (place / unsafe).mkdir()
    (place / unsafe).chmod(0o777)
    with pytest.raises(ConfigurationError, match=f"{unsafe}: is writable for everybody"):
        directories.prepare(place / "run", place / "state", environ(place))


def test_a_directory_of_somebody_else_is_refused(place: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"belongs to uid 0.*supervisor\.runtime_dir"):
        directories.prepare(Path("/usr"), place / "state", environ(place))
    with pytest.raises(ConfigurationError, match=r"belongs to uid 0.*supervisor\.state_dir"):
        directories.prepare(place / "run", Path("/usr"), environ(place))


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_a_private_directory_that_is_not_private_is_refused(place: Path, how: str) -> None:
    variables = environ(place)
    private = shared.private_runtime_dir(variables)
    (place / "elsewhere").mkdir(0o700)
    if how == "open":
        private.mkdir()
        private.chmod(0o755)
    elif how == "link":
        private.symlink_to(place / "elsewhere")
    else:
        private.touch(0o600)
    with pytest.raises(ConfigurationError, match="must be a directory of uid"):
        directories.prepare(private, place / "state", variables)


def test_what_cannot_be_made_is_refused_with_the_key(place: Path) -> None:
    (place / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be made.*supervisor\.runtime_dir"):
        directories.prepare(place / "file" / "run", place / "state", environ(place))
    with pytest.raises(ConfigurationError, match=r"is not a directory.*supervisor\.runtime_dir"):
        directories.prepare(place / "file", place / "state", environ(place))
    (place / "locked").mkdir(0o555)
    with pytest.raises(ConfigurationError, match=r"Permission denied.*supervisor\.state_dir"):
        directories.prepare(place / "run", place / "locked" / "state", environ(place))


def test_a_path_too_long_is_found_before_anything_is_made(place: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"shorten supervisor\.runtime_dir"):
        directories.prepare(place / ("x" * 120), place / "state", environ(place))
    assert sorted(os.listdir(place)) == ["session", "tmp"]


def test_a_file_system_that_is_read_only_is_told_from_missing_permissions(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    script = f"""
mount -t tmpfs none {tmp_path}/disk || exit 99
mkdir -m 700 {tmp_path}/disk/state && mount -o remount,ro {tmp_path}/disk || exit 99
exec {sys.executable} -c '
from pathlib import Path
from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.system import directories
try:
    directories.prepare(Path("{tmp_path}/run"), Path("{tmp_path}/disk/state"))
except ConfigurationError as error:
    print(error)
'
"""
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode in (1, 99) and not done.stdout:
        pytest.skip(f"mounts are refused here: {done.stderr}")
    assert "is on a file system that is mounted read-only" in done.stdout, done.stderr


def test_a_log_file_that_cannot_be_written_is_refused_and_nothing_is_made(place: Path) -> None:
    (place / "tmp").mkdir()
    (place / "readable.log").touch(0o444)
    (place / "locked").mkdir(0o555)
    for name, why in (
        ("tmp", "is a directory"),
        ("nowhere/x.log", "its directory does not exist"),
        ("locked/x.log", "its directory is not writable"),
        ("readable.log", "is not writable"),
    ):
        with pytest.raises(ConfigurationError, match=rf"supervisor\.log_file.*{why}"):
            directories.check_log_file(str(place / name))
    directories.check_log_file(str(place / "tmp" / "good.log"))
    directories.check_log_file("")
    assert not (place / "tmp" / "good.log").exists()
