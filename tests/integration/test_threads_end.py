"""A daemon does not go on after one of its threads has ended."""

import os

import pytest

SECONDS = 60
EXIT_INTERNAL = 70

# Loaded by the daemon's interpreter first of all. The patched function raises an unexpected error
# in the thread of that name, as soon as the file exists.
SITECUSTOMIZE = """
import sys
import threading
from pathlib import Path

def spoil(module, owner, name):
    place = getattr(module, owner) if owner else module
    real = getattr(place, name)
    def spoilt(*args, **options):
        if threading.current_thread().name == {thread!r} and Path({switch!r}).exists():
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        return real(*args, **options)
    setattr(place, name, spoilt)

if sys.argv[:1] == ["-m"]:
    import musterd.supervisor.{module} as module
    spoil(module, {owner!r}, {name!r})
"""


@pytest.mark.parametrize(
    ("thread", "place"),
    [
        ("store-writer", ("store.writer", "Writer", "commit")),
        ("store-reader", ("store.sqlite", "", "answer")),
        ("memory", ("memory.probe", "Probe", "_forbearing")),  # forgives any other error
    ],
)
def test_a_daemon_whose_thread_ends_says_so_and_ends(
    jobs, tmp_path, thread: str, place: tuple[str, str, str]
) -> None:
    daemon = jobs(size=1, start=False)
    switch = tmp_path / "spoilt"
    module, owner, name = place
    (tmp_path / "sitecustomize.py").write_text(
        SITECUSTOMIZE.format(
            thread=thread, switch=str(switch), module=module, owner=owner, name=name
        )
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    daemon.popen_options["env"] = {**os.environ, "PYTHONPATH": path}
    daemon.start()
    with daemon.client() as client:
        kept = client.submit("jobs.echo", {"value": "kept"})
        assert kept.result(SECONDS) == "kept"
        switch.touch()
        late = client.submit("jobs.echo", {"value": "late"})
        if thread == "store-reader":
            daemon.ctl("task", "nobody")
        assert daemon.process.wait(SECONDS) == EXIT_INTERNAL
        log = daemon.log()
        assert f"the thread '{thread}' of the daemon ended: OverflowError" in log, log[-3000:]
        switch.unlink()
        daemon.start()
        assert client.task(kept.id).result(SECONDS) == "kept"
        assert late.result(SECONDS) == "late"
