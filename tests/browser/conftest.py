"""The sample site in a process of its own, and a user without privileges to browse it."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

NOBODY = 65534  # uid and gid of `nobody`; no files, no rights
START_SECONDS = 30


@pytest.fixture(scope="session")
def sample_site() -> Iterator[str]:
    """The address of a running sample site."""
    command = [sys.executable, "-m", "musterd.supervisor.sample_site", "--until-stdin-closes"]
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
    """Whom to run a browser as, and with which interpreter."""

    python: str
    switch: dict[str, Any]  # for subprocess: empty where we are that user already
    uid: int

    def run(self, command: list[str], home: Path) -> subprocess.CompletedProcess[str]:
        """Runs `python COMMAND` as this user, with nothing of our environment but the path."""
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
    # Not tmp_path: pytest's directories are closed to other users, and their names too long for
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
    """A user without privileges who can run this project; skips, with the reason, without one."""
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


@pytest.fixture
def home(unprivileged: User) -> Iterator[Path]:
    """A home and temporary directory of the unprivileged user."""
    with _directory(unprivileged.uid) as home:
        yield home


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory for browsers of this process; a killed one leaves files there."""
    with _directory(os.geteuid()) as scratch:
        monkeypatch.setenv("TMPDIR", str(scratch))
        yield scratch
