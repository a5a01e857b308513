"""`musterd install` and `musterd uninstall`: everything of the service but the program itself.

install() makes links to the two commands, units, completion for three shells and manual pages, all
below /usr/local, and a configuration that is never overwritten. Manual and completion are generated
from the commands and the documentation, so they cannot differ from them. Data, configuration and
the user are never removed.

Both may be stopped anywhere and run again: a step that is done already does nothing, and the
commands themselves go last.
"""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import get_completion_class

from musterd.ipc.errors import MusterdError
from musterd.supervisor.service.manpages import ManualPage
from musterd.supervisor.text.shell_line import Bash

PREFIX = "usr/local"
COMMANDS = ("musterd", "musterctl")
CONFIGURATION = "etc/musterd/musterd.toml"
DROP_INS = "etc/musterd/musterd.d"
EXAMPLES = "etc/musterd/examples"
UNITS = f"{PREFIX}/lib/systemd/system"
USER_UNITS = f"{PREFIX}/lib/systemd/user"
SERVICES = ("musterd.service", "musterd@.service")
WEB = "musterd-web.service"
UNITS_OWN = ("musterd.service", WEB, "musterd-control.socket", "musterd-tasks.socket")
UNITS_TEMPLATE = ("musterd@.service", "musterd-control@.socket", "musterd-tasks@.socket")
INSTANCE = re.compile(r"musterd@.*\.service|musterd-(control|tasks)@.*\.socket")
# Drop-ins of each service, by the first version of systemd that knows their settings.
SINCE = {254: "since-254.conf"}
# Drop-ins of earlier versions. This one made every reload succeed, whatever the configuration.
FORMER_DROP_INS = ("since-253.conf",)
# Configuration, data and logs, also of instances: never removed.
KEPT = ("etc/musterd", "var/lib/musterd", "var/lib/musterd-*", "var/log/musterd*")
TOOL_SECONDS = 60  # no tool of systemd takes longer ...
RESTART_SECONDS = 600  # ... but a service that drains its tasks may

COMPLETIONS = {
    "bash": f"{PREFIX}/share/bash-completion/completions/{{}}",
    "zsh": f"{PREFIX}/share/zsh/site-functions/_{{}}",
    "fish": f"{PREFIX}/share/fish/vendor_completions.d/{{}}.fish",
}


class InstallError(MusterdError):
    """Something could not be installed or removed."""


class Item(NamedTuple):
    """A file to be installed: its path below the root, and its text."""

    path: str
    text: str


Say = Callable[[str], None]


def install(root: Path, say: Say, manual: Sequence[ManualPage]) -> None:
    """Install everything below `root`: /, or a folder for packages and images."""
    program = Path(sys.prefix, "bin")
    with _telling(root):
        for name in COMMANDS:
            _link(root / PREFIX / "bin" / name, program / name)
        for item in items(_systemd_version(), manual):
            _write(root / item.path, item.text)
        _remove_former(root)
        _remove_empty_folders(root)
        (root / DROP_INS).mkdir(parents=True, exist_ok=True)
        kept = _configure(root / CONFIGURATION)
    running = _take_over(root)
    say(f"installed below {root / PREFIX}")
    say(f"{'kept' if kept else 'wrote'} {root / CONFIGURATION}")
    if running:
        say("restarted the running services: queued tasks go on")
    else:
        say("start it: systemctl enable --now musterd")


def uninstall(root: Path, say: Say, manual: Sequence[ManualPage]) -> None:
    """Remove what install() made, but for data, configuration and the user."""
    live = _is_live(root)
    if live:
        if running := _units_in_use():
            _tool("systemctl", "stop", *running, seconds=RESTART_SECONDS)
        known = [name for name in (*UNITS_OWN, *UNITS_TEMPLATE) if (root / UNITS / name).exists()]
        if known:  # disabling a template disables all its instances
            _tool("systemctl", "disable", *known)
    with _telling(root):
        for item in items(max(SINCE), manual):
            _remove(root / item.path)
        _remove_former(root)
        _unfinished(root / CONFIGURATION).unlink(missing_ok=True)
        foreign = _remove_empty_folders(root)
    if live:
        _tool("systemctl", "daemon-reload")
        _tool("journalctl", "--update-catalog")
    with _telling(root):  # last: they are needed to run this again
        for name in reversed(COMMANDS):
            _unlink_ours(root / PREFIX / "bin" / name, name)
    kept = [str(path) for place in KEPT for path in sorted(root.glob(place))]
    say(f"removed the service; kept {', '.join(kept) or 'nothing'} and the user musterd")
    for left in foreign:
        say(f"left {left}: it holds files that musterd did not install")
    if kept:
        say(f"to remove these too: rm -r {' '.join(kept)}; userdel musterd")


# -- what is installed ------------------------------------------------------------------------


def items(version: int, manual: Sequence[ManualPage] = ()) -> Iterator[Item]:
    """Yield every file to install for this version of systemd."""
    with as_file(files("musterd").joinpath("share/systemd")) as folder:
        for unit in sorted([*folder.glob("*.service"), *folder.glob("*.socket")]):
            yield Item(f"{UNITS}/{unit.name}", unit.read_text())
        for unit in sorted((folder / "user").glob("*.*")):
            yield Item(f"{USER_UNITS}/{unit.name}", unit.read_text())
        for since, name in SINCE.items():
            if version >= since:
                text = (folder / name).read_text()
                for place in _drop_in_folders():
                    yield Item(f"{place}/{name}", text)
        for name, place in {
            "musterd.sysusers": "lib/sysusers.d/musterd.conf",
            "musterd.tmpfiles": "lib/tmpfiles.d/musterd.conf",
            "musterd.catalog": "lib/systemd/catalog/musterd.catalog",
        }.items():
            if (folder / name).exists():
                yield Item(f"{PREFIX}/{place}", (folder / name).read_text())
    with as_file(files("musterd").joinpath("share/examples")) as folder:
        for example in sorted(folder.glob("*.toml")):
            yield Item(f"{EXAMPLES}/{example.name}", example.read_text())
    for page in manual:
        yield Item(f"{PREFIX}/share/man/man{page.section}/{page.file}", page.text)
    for command in COMMANDS:
        for shell, place in COMPLETIONS.items():
            yield Item(place.format(command), completion(command, shell))


def _drop_in_folders() -> list[str]:
    """Return the folders of the services' drop-ins."""
    services = [*(f"{UNITS}/{each}" for each in SERVICES), f"{USER_UNITS}/{SERVICES[0]}"]
    return [f"{service}.d" for service in services]


def completion(command: str, shell: str) -> str:
    """Return the script by which a shell asks the command for completions."""
    ours = command == "musterctl" and shell == Bash.name  # musterd completes no names
    kind = Bash if ours else get_completion_class(shell)
    assert kind is not None, shell
    script = kind(click.Command(command), {}, command, f"_{command.upper()}_COMPLETE")
    # Not source(): for bash that checks the version of the bash on this machine first.
    return script.source_template % script.source_vars() + "\n"


def _configure(path: Path) -> bool:
    """Write the shipped configuration unless there is one; whether there was."""
    if path.exists():
        return True
    _write(path, files("musterd").joinpath("share/musterd.toml").read_text())
    return False


# -- the file system --------------------------------------------------------------------------


@contextlib.contextmanager
def _telling(root: Path) -> Iterator[None]:
    """Turn errors of files into an InstallError that says what to do."""
    try:
        yield
    except OSError as error:
        why = f"{error.filename or root}: {error.strerror}"
        raise InstallError(f"{why}: run it as root, or give another --root") from None


def _write(path: Path, text: str) -> None:
    """Write a file at once or not at all, readable for everybody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _unfinished(path)
    new.write_text(text)
    new.chmod(0o644)
    new.rename(path)


def _unfinished(path: Path) -> Path:
    """Return the name of a file while it is being written."""
    return path.with_name(f".{path.name}.new")


def _remove(path: Path) -> None:
    """Remove a file, and the rest of a write of it that was stopped."""
    path.unlink(missing_ok=True)
    _unfinished(path).unlink(missing_ok=True)


def _remove_former(root: Path) -> None:
    for name in FORMER_DROP_INS:
        for folder in _drop_in_folders():
            _remove(root / folder / name)


def _remove_empty_folders(root: Path) -> list[Path]:
    """Remove those of our folders that are empty; return the others."""
    full = []
    for folder in (root / name for name in (*_drop_in_folders(), EXAMPLES)):
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            full.append(folder)
    return full


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_symlink():
        raise InstallError(f"{path} is in the way and is not a link of musterd: remove it")
    new = _unfinished(path)
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.rename(path)


def _unlink_ours(path: Path, name: str) -> None:
    _unfinished(path).unlink(missing_ok=True)
    if path.is_symlink() and os.readlink(path).endswith(f"/bin/{name}"):
        path.unlink()


# -- systemd ----------------------------------------------------------------------------------


def _is_live(root: Path) -> bool:
    """Whether `root` is this machine, and systemd runs it."""
    return root == Path("/") and Path("/run/systemd/system").is_dir()


def _systemd_version() -> int:
    """Return the version of this machine's systemd; 0 if there is none."""
    said = _tool("systemctl", "--version", quiet=True).split()
    return int(said[1].partition(".")[0]) if len(said) > 1 and said[1][:1].isdecimal() else 0


def _take_over(root: Path) -> bool:
    """Have systemd load what is new; whether a daemon ran and was restarted."""
    if root != Path("/"):
        return False
    _tool("systemd-sysusers", f"/{PREFIX}/lib/sysusers.d/musterd.conf")
    _tool("systemd-tmpfiles", "--create", f"/{PREFIX}/lib/tmpfiles.d/musterd.conf", quiet=True)
    if any(item.path.endswith(".catalog") for item in items(0)):
        _tool("journalctl", "--update-catalog")
    if not _is_live(root):
        return False
    _tool("systemctl", "daemon-reload")
    running = [name for name in _units_in_use("--state=running") if name.endswith(".service")]
    if running:
        _tool("systemctl", "restart", *running, seconds=RESTART_SECONDS)
    return bool(running)


def _units_in_use(*options: str) -> list[str]:
    """Return our units that are active, whether or not their files are still there."""
    words = ("systemctl", "list-units", "--full", "--plain", "--no-legend", *options)
    lines = [line.split() for line in _tool(*words).splitlines()]
    return [
        name
        for name, _load, state, *_ in lines
        if (name in UNITS_OWN or INSTANCE.fullmatch(name)) and state not in ("inactive", "failed")
    ]


def _tool(*words: str, quiet: bool = False, seconds: float = TOOL_SECONDS) -> str:
    """Run a program of systemd, if there is one; return its output. `quiet`: ignore its failure."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"{' '.join(words)}: not done after {seconds:g} s") from None
    if done.returncode != 0 and not quiet:
        raise InstallError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
