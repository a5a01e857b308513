"""docs/tutorial.md, typed from start to end with a real daemon and the shop on loopback."""

import re
import socket
import tomllib
from pathlib import Path

from support.walk import Walk

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_tutorial_works_as_it_is_printed(short_folder: Path) -> None:
    runtime = short_folder / "run"
    walk = Walk(
        PAGE,
        short_folder,
        {"8700": str(free_port())},
        MUSTERD_SUPERVISOR__RUNTIME_DIR=str(runtime),
        MUSTERD_SUPERVISOR__STATE_DIR=str(short_folder / "state"),
        MUSTERD_MEMORY__ENABLED="false",  # other programs of this machine decide nothing
        MUSTERD_CONTROL=str(runtime / "control.sock"),
        MUSTERD_TASKS=str(runtime / "tasks.sock"),
    )
    try:
        walk.type_all()
    finally:
        walk.close()
    assert len(walk.typed) > 25
    assert walk.exit_codes[:2] == [0, 0], "the daemon ends well at each Ctrl-C"
    assert not runtime.exists() or not list(runtime.glob("*.sock"))


def test_what_is_installed_has_the_extras_that_the_tutorial_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"pip install '?musterd\[([\w,]+)\]", PAGE.read_text())
    assert len(named) == 2
    assert set(",".join(named).split(",")) <= set(project["optional-dependencies"])
