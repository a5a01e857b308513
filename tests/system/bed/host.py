"""A machine with musterd installed, for the tests of the service."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bed import Done, Machine

HERE = Path(__file__).parent
JOBS = "/srv/bed"
# Added to the unit: the path of the tests' workers, and a short RestartSec.
DROP_IN = f"""
[Service]
Environment=PYTHONPATH={JOBS}
RestartSec=100ms
"""
FOLDERS = ("musterd.service.d", "musterd@.service.d")


class Submitter:
    """A client in the machine that submits all the time."""

    def __init__(self, host: "Host", socket: str) -> None:
        python = ("/opt/musterd/bin/python", f"{JOBS}/bed_submitter.py", socket)
        self._process = host.popen(*python)
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        assert first == "begun\n", first + self._process.stdout.read()

    def finish(self) -> dict[str, Any]:
        """Stop submitting; return the outcome of each task."""
        said, _ = self._process.communicate("", timeout=90)
        assert self._process.returncode == 0, said
        found: dict[str, Any] = msgspec.json.decode(said)
        return found


class Host(Machine):
    """A machine with the workers of these tests."""

    def furnish(self) -> None:
        for name in ("bed_jobs.py", "bed_submitter.py"):
            self.write(f"{JOBS}/{name}", (HERE.parent / name).read_text())
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

    def ctl(self, *words: str, **options: Any) -> Done:
        return self.run("musterctl", *words, **options)

    def ask(self, *words: str) -> Any:
        return msgspec.json.decode(self.ctl(*words, "--json").stdout)

    def status(self) -> Any:
        """Return the status, also while it exits with 3 because workers start."""
        return msgspec.json.decode(self.ctl("status", "--json", check=False).stdout)

    def submit(self, task: str, *arguments: str) -> str:
        """Submit a task; return its id once it is accepted."""
        return self.ctl("submit", task, *arguments).stdout.strip()

    def submitter(self, socket: str = "/run/musterd/tasks.sock") -> Submitter:
        return Submitter(self, socket)

    def task(self, task_id: str) -> Any:
        return self.ask("task", task_id)

    def daemon_processes(self) -> list[str]:
        """Return the processes of the daemon, and those that its tasks left."""
        marks = ("musterd", "sleep 54321", "chrom")
        return [line for _, line in self.processes() if any(mark in line for mark in marks)]


def _toml(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Return one line for each value."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _toml(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {msgspec.json.encode(value).decode()}\n"
