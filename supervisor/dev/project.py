"""What `musterd dev` runs: the configuration, and directories, port and token of its own.

They are in the folder `.musterd` beside the configuration, unless that names others. The port and
the token stay the same from run to run, so that an open dashboard goes on. The path of a socket has
at most 107 bytes: below a long path `.musterd/run` is a link to a short directory.
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import stat
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from musterd.ipc.errors import ConfigurationError, MusterdError
from musterd.ipc.wire.paths import (
    CONTROL_SOCKET,
    PROJECT_DIR,
    SOCKET_PATH_BYTES_MAX,
    TASKS_SOCKET,
    WORKERS_SOCKET,
)
from musterd.supervisor.config.http import WEB_NEEDS
from musterd.supervisor.config.load import BUILT_IN, Loaded, load
from musterd.supervisor.web.token import read_token

NAMES = ("musterd.toml", "musterd.yaml", "musterd.yml", "musterd.json")
OWN = PROJECT_DIR
RUN, STATE, TOKEN, PORT = "run", "state", "token", "port"  # in OWN
PROFILE = "development"
LOOPBACK = "127.0.0.1"
USUAL_PORT = 7717
TOKEN_BYTES = 16
# Where the configuration says nothing: what tells enough, and ends while somebody waits.
USUAL = {"supervisor.log_level": "info", "supervisor.drain_timeout": "5s"}


class NoProject(MusterdError):
    """There is nothing to run here."""


class Project(Struct, frozen=True):
    folder: Path  # of the configuration; workers are imported from here
    files: tuple[Path, ...]  # of the configuration
    arguments: tuple[str, ...]  # of `musterd run`
    runtime: Path
    token: str  # of the dashboard; "" if it needs none
    no_dashboard: str = ""  # why there is none

    @property
    def control(self) -> Path:
        return self.runtime / CONTROL_SOCKET

    @property
    def tasks(self) -> Path:
        return self.runtime / TASKS_SOCKET

    @property
    def is_found(self) -> bool:
        """Whether musterctl and clients in the folder find the daemon by themselves."""
        return self.runtime == self.folder / OWN / RUN

    def short(self, path: Path) -> str:
        """Return the path as it can be typed in the project's folder."""
        return str(path.relative_to(self.folder) if path.is_relative_to(self.folder) else path)


def find(files: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files of the configuration: those given, else the one in this folder."""
    if files:
        return tuple(Path(os.path.abspath(file)) for file in files)
    for name in NAMES:
        if Path(name).is_file():
            return (Path(os.path.abspath(name)),)
    raise NoProject(
        f"there is no {NAMES[0]} in {os.getcwd()}: change into the folder of your project, name a "
        "file with -c, or make a project with `musterd new NAME`"
    )


def open_project(
    files: tuple[Path, ...],
    profile: str | None,
    overrides: Sequence[str],
    environ: Mapping[str, str],
) -> Project:
    """Read the configuration and choose what it leaves open; ConfigurationError if it is wrong.

    The working directory is the folder of the configuration.
    """
    loaded = load(list(files), profile, list(overrides), environ)
    if profile is None and loaded.origins.get("supervisor.profile") == BUILT_IN:
        profile = PROFILE
        loaded = load(list(files), profile, list(overrides), environ)
    folder = files[0].parent
    try:
        own = _own_folder(folder)
        chosen = _chosen(loaded, own, environ)
        token, no_dashboard = _dashboard(loaded, own, chosen)
    except OSError as error:
        raise ConfigurationError(
            f"{folder / OWN} cannot be used: {error.strerror or error}: make {folder} writable, or "
            "give supervisor.runtime_dir and supervisor.state_dir"
        ) from error
    given = [*overrides, *(f"{key}={value}" for key, value in chosen.items())]
    runtime = chosen.get("supervisor.runtime_dir") or loaded.config.supervisor.runtime_dir
    return Project(
        folder,
        files,
        arguments=(
            *(word for file in files for word in ("-c", str(file))),
            *(("--profile", profile) if profile is not None else ()),
            *(word for each in given for word in ("--set", each)),
        ),
        runtime=_shown_runtime(own, Path(runtime)),
        token=token,
        no_dashboard=no_dashboard,
    )


def _own_folder(folder: Path) -> Path:
    own = folder / OWN
    own.mkdir(mode=0o700, exist_ok=True)
    own.chmod(0o700)  # musterctl and clients trust a daemon in a folder of the user's alone
    (own / ".gitignore").write_text("*\n")
    return own


def _chosen(loaded: Loaded, own: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values that the configuration leaves open, by key."""
    chosen = {"supervisor.log_format": "json", "supervisor.log_file": ""}
    for key, value in USUAL.items():
        if _is_open(loaded, key):
            chosen[key] = value
    if _is_open(loaded, "supervisor.state_dir"):
        chosen["supervisor.state_dir"] = str(own / STATE)
    if _is_open(loaded, "supervisor.runtime_dir"):
        chosen["supervisor.runtime_dir"] = str(_runtime_dir(own, environ))
    return chosen


def _is_open(loaded: Loaded, key: str) -> bool:
    return loaded.origins.get(key) in (None, BUILT_IN, f"profile {PROFILE} ({BUILT_IN})")


# -- sockets --------------------------------------------------------------------------------------


def _runtime_dir(own: Path, environ: Mapping[str, str]) -> Path:
    run = own / RUN
    if len(os.fsencode(run / WORKERS_SOCKET)) <= SOCKET_PATH_BYTES_MAX:
        if run.is_symlink():  # the project was moved here from a longer path
            run.unlink()
        return run
    place = environ.get("XDG_RUNTIME_DIR", "")
    root = Path(place if place.startswith("/") else tempfile.gettempdir())
    short = root / f"musterd-dev-{os.geteuid()}-{zlib.crc32(os.fsencode(run)):08x}"
    with contextlib.suppress(FileExistsError):
        short.mkdir(mode=0o700)
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigurationError(f"{short} is not a directory of yours alone: remove it")
    if run.is_symlink():
        run.unlink()
    elif run.is_dir():
        shutil.rmtree(run)  # of a shorter path, before the project was moved here
    run.symlink_to(short)
    return short


def _shown_runtime(own: Path, runtime: Path) -> Path:
    """Return the directory by the name that is shorter to type."""
    link = own / RUN
    return link if link.is_symlink() and link.readlink() == runtime else runtime


# -- the dashboard --------------------------------------------------------------------------------


def _dashboard(loaded: Loaded, own: Path, chosen: dict[str, str]) -> tuple[str, str]:
    """Return the token of the dashboard, and why there is no dashboard. Choose what it needs."""
    http = loaded.config.http
    if not http.start:
        return "", "http.start = false: see `musterd web`"
    if any(importlib.util.find_spec(name) is None for name in WEB_NEEDS):
        return "", "pip install 'musterd[dev]'"
    if not http.listen:
        chosen["http.listen"] = f"{LOOPBACK}:{_free_port(own / PORT)}"
    token_file = http.token_file
    if not token_file:
        token_file = chosen["http.token_file"] = str(_token_file(own / TOKEN))
    return read_token(token_file), ""


def _free_port(remembered: Path) -> int:
    """Return the port of the last run if it is free, else the usual one, else any free one."""
    ports = [USUAL_PORT, 0]
    with contextlib.suppress(OSError, ValueError):
        ports.insert(0, int(remembered.read_text()))
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError, OverflowError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            probe.listen()
            found: int = probe.getsockname()[1]
            remembered.write_text(f"{found}\n")
            return found
    raise ConfigurationError(f"no port of {LOOPBACK} is free: give http.listen")


def _token_file(path: Path) -> Path:
    """Return the file of the token; make it at the first time, or if it is no use."""
    try:
        read_token(str(path))
    except ConfigurationError:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(f"{secrets.token_hex(TOKEN_BYTES)}\n")
    return path
