"""What `musterd dev` chooses for a project, and what it leaves as configured."""

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config.load import load
from musterd.supervisor.dev import project as module
from musterd.supervisor.dev.project import NoProject, Project, find, open_project

CONFIGURATION = '[pools.bot]\nworker = "bot:Bot"\n'


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a space and a short path, which sockets need."""
    with tempfile.TemporaryDirectory(prefix="md-") as made:
        folder = Path(made, "my bot")
        folder.mkdir()
        (folder / "musterd.toml").write_text(CONFIGURATION)
        yield folder


def opened(folder: Path, *overrides: str, profile: str | None = None, **environ: str) -> Project:
    return open_project((folder / "musterd.toml",), profile, overrides, environ)


def values(project: Project, *keys: str) -> list[Any]:
    """Return values that a daemon with these arguments has."""
    words = list(project.arguments)
    given: dict[str, list[str]] = {"-c": [], "--set": [], "--profile": []}
    for option, value in zip(words[::2], words[1::2], strict=True):
        given[option].append(value)
    profile = given["--profile"][0] if given["--profile"] else None
    config: Any = load([Path(file) for file in given["-c"]], profile, given["--set"], {}).config
    found = []
    for key in keys:
        section, _, name = key.partition(".")
        found.append(getattr(getattr(config, section), name))
    return found


def test_the_configuration_of_this_folder_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert find([]) == (folder / "musterd.toml",)
    assert find([Path("other.toml")]) == (folder / "other.toml",)
    (folder / "musterd.toml").rename(folder / "musterd.json")
    assert find([]) == (folder / "musterd.json",)
    (folder / "musterd.json").unlink()
    with pytest.raises(NoProject, match=r"there is no musterd.toml in .*`musterd new NAME`"):
        find([])


def test_what_is_open_is_chosen_for_the_project(folder: Path) -> None:
    project = opened(folder)
    own = folder / ".musterd"
    assert values(project, "supervisor.runtime_dir", "supervisor.state_dir") == [
        str(own / "run"),
        str(own / "state"),
    ]
    assert values(project, "supervisor.profile", "supervisor.log_level") == ["development", "info"]
    (listen, token_file) = values(project, "http.listen", "http.token_file")
    assert listen.startswith("127.0.0.1:")
    assert Path(token_file).read_text().strip() == project.token
    assert stat.S_IMODE(Path(token_file).stat().st_mode) == 0o600
    assert project.short(project.control) == ".musterd/run/control.sock"
    assert project.is_found
    own.chmod(0o755)
    assert opened(folder).is_found
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert (own / ".gitignore").read_text() == "*\n"
    again = opened(folder)  # the open dashboard goes on
    assert (again.token, values(again, "http.listen")) == (project.token, [listen])


def test_what_is_configured_stays(folder: Path) -> None:
    token = folder / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    (folder / "musterd.toml").write_text(
        CONFIGURATION
        + '[supervisor]\nruntime_dir = "/tmp/mine"\nlog_level = "warning"\nprofile = "production"\n'
        + f'drain_timeout = "1m"\n[http]\nlisten = "127.0.0.1:1234"\ntoken_file = "{token}"\n'
    )
    project = opened(folder, "supervisor.state_dir=/tmp/state")
    assert values(project, "supervisor.runtime_dir", "supervisor.state_dir") == [
        "/tmp/mine",
        "/tmp/state",
    ]
    assert values(project, "supervisor.log_level", "supervisor.profile") == [
        "warning",
        "production",
    ]
    assert values(project, "http.listen", "http.token_file") == ["127.0.0.1:1234", str(token)]
    assert project.token == "0123456789abcdef"
    assert project.control == Path("/tmp/mine/control.sock")
    assert not project.is_found
    by_environment = opened(folder, MUSTERD_SUPERVISOR__STATE_DIR="/tmp/other")
    assert "supervisor.state_dir" not in " ".join(by_environment.arguments)
    assert values(opened(folder, profile="development"), "supervisor.profile") == ["development"]


def test_a_taken_port_is_left_to_whoever_has_it(folder: Path) -> None:
    (listen,) = values(opened(folder), "http.listen")
    with socket.create_server(("127.0.0.1", int(listen.rpartition(":")[2]))):
        (other,) = values(opened(folder), "http.listen")
    assert other != listen


def test_a_token_that_others_can_read_is_made_anew(folder: Path) -> None:
    before = opened(folder).token
    (folder / ".musterd" / "token").chmod(0o644)
    assert opened(folder).token != before


def test_sockets_of_a_long_path_are_behind_a_link(folder: Path) -> None:
    deep = folder / ("d" * 80) / "bot"
    deep.mkdir(parents=True)
    (deep / "musterd.toml").write_text(CONFIGURATION)
    (deep / ".musterd" / "run").mkdir(parents=True)
    (deep / ".musterd" / "run" / "lock").touch()  # of a path that was shorter then
    place = folder.parent
    project = opened(deep, XDG_RUNTIME_DIR=str(place))
    (runtime,) = values(project, "supervisor.runtime_dir")
    assert Path(runtime).parent == place
    assert stat.S_IMODE(Path(runtime).stat().st_mode) == 0o700
    assert project.short(project.control) == ".musterd/run/control.sock"
    assert project.is_found
    assert (deep / ".musterd" / "run").resolve() == Path(runtime).resolve()
    assert values(opened(deep, XDG_RUNTIME_DIR=str(place)), "supervisor.runtime_dir") == [runtime]
    Path(runtime).chmod(0o755)
    with pytest.raises(ConfigurationError, match="not a directory of yours alone"):
        opened(deep, XDG_RUNTIME_DIR=str(place))


def test_without_the_extra_there_is_no_dashboard_and_it_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WEB_NEEDS", ("not_there_at_all",))
    project = opened(folder)
    assert (project.no_dashboard, project.token) == ("pip install 'musterd[dev]'", "")
    assert values(project, "http.listen") == [""]


def test_a_wrong_configuration_and_a_folder_that_cannot_be_used_are_told(folder: Path) -> None:
    (folder / ".musterd").write_text("a file")
    with pytest.raises(ConfigurationError, match=r"\.musterd cannot be used: File exists"):
        opened(folder)
    (folder / "musterd.toml").write_text("[pools.bot]\nsizes = 3\n")
    with pytest.raises(ConfigurationError, match="unknown key: did you mean 'size'"):
        opened(folder)
