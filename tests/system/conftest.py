"""Machines with a real systemd and musterd installed in them; skipped where there cannot be any."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the package `bed` beside this file

import bed  # noqa: E402

SOURCE = HERE.parents[1]
JOBS = "/srv/bed"
# Beside the unit as it is: where the workers of the tests are, and no wait where none is tested.
DROP_IN = f"""
[Service]
Environment=PYTHONPATH={JOBS}
RestartSec=100ms
"""
FOLDERS = ("musterd.service.d", "musterd@.service.d")


# The first test of a session waits for the installation.
IMAGE_TIMEOUT_SECONDS = 400


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("system").addoption(
        "--tree", type=Path, help="files of the system to boot (default: this machine's)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(IMAGE_TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def tree(request: pytest.FixtureRequest) -> Path:
    """Where the files of the system are that machines are made of: / is this machine itself."""
    return request.config.getoption("--tree", None) or Path("/")


@pytest.fixture(scope="session")
def image(tree: Path) -> Iterator[bed.Image]:
    """The system with `make install` done on top."""
    if reason := bed.missing(tree):
        pytest.skip(f"no machine can be booted here: {reason}")
    shop = bed.Workshop()
    try:
        yield bed.Image(shop, SOURCE, "make -C /usr/src/musterd install", tree)
    finally:
        shop.close()
    assert bed.left_of(shop) == []


class Submitter:
    """A client in the machine that submits all the time."""

    def __init__(self, host: "Host", socket: str) -> None:
        python = ("/opt/musterd/bin/python", f"{JOBS}/bed_submitter.py", socket)
        self._process = host.popen(*python)
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        assert first == "begun\n", first + self._process.stdout.read()

    def finish(self) -> dict[str, Any]:
        """Let it stop; what became of its tasks."""
        said, _ = self._process.communicate("", timeout=90)
        assert self._process.returncode == 0, said
        found: dict[str, Any] = msgspec.json.decode(said)
        return found


class Host(bed.Machine):
    """A machine with the workers of these tests."""

    def furnish(self) -> None:
        for name in ("bed_jobs.py", "bed_submitter.py"):
            self.write(f"{JOBS}/{name}", (HERE / name).read_text())
        for folder in FOLDERS:
            self.write(f"/etc/systemd/system/{folder}/bed.conf", DROP_IN)
        self.configure({"jobs": {"worker": "bed_jobs:Jobs", "size": 2}})

    def configure(self, pools: dict[str, Any], path: str = "musterd.toml", **settings: Any) -> None:
        """Write a configuration; settings are `section__key=value`."""
        config: dict[str, Any] = {"memory": {"enabled": False}, "pools": pools}
        for key, value in settings.items():
            section, _, name = key.partition("__")
            config.setdefault(section, {})[name] = value
        self.write(f"/etc/musterd/{path}", "".join(_toml(config)))

    def drop_in(self, text: str, unit: str = "musterd.service") -> None:
        self.write(f"/etc/systemd/system/{unit}.d/test.conf", text)
        self.run("systemctl", "daemon-reload")

    def start(self) -> None:
        self.run("systemctl", "start", "musterd")

    def main_pid(self, unit: str = "musterd.service") -> int:
        return int(self.show(unit, "MainPID"))

    def ctl(self, *words: str, **options: Any) -> bed.Done:
        return self.run("musterctl", *words, **options)

    def ask(self, *words: str) -> Any:
        return msgspec.json.decode(self.ctl(*words, "--json").stdout)

    def submit(self, task: str, *arguments: str) -> str:
        """The id of a task that was accepted."""
        return self.ctl("submit", task, *arguments).stdout.strip()

    def submitter(self, socket: str = "/run/musterd/tasks.sock") -> Submitter:
        return Submitter(self, socket)

    def task(self, task_id: str) -> Any:
        return self.ask("task", task_id)

    def daemon_processes(self) -> list[str]:
        """Everything that belongs to a daemon, and what its tasks left."""
        marks = ("musterd", "sleep 54321", "chrom")
        return [line for _, line in self.processes() if any(mark in line for mark in marks)]


def _toml(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """One line for each value."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _toml(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {msgspec.json.encode(value).decode()}\n"


@pytest.fixture
def host(image: bed.Image, request: pytest.FixtureRequest) -> Iterator[Host]:
    """A machine of its own for each test: booting takes half a second."""
    made = Host(image)
    try:
        made.furnish()
        yield made
        if getattr(request.node, "failed_call", False):
            print(made.journal("-o", "short-monotonic", "-n", "150"))
            print(made.run("systemctl", "status", "musterd*", check=False).stdout)
    finally:
        made.down()
