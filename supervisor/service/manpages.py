"""Manual pages, generated.

musterd(8) and musterctl(1) come from the commands, musterd.toml(5) from the table of keys in
docs/configuration.md. A test compares that table with the configuration itself.
"""

import inspect
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

import click

from musterd import __version__

_DAEMON_TEXT = """\
musterd keeps a fleet of worker processes alive and feeds them prioritized, durable tasks. It is
controlled by musterctl(1) and configured by musterd.toml(5).
"""
_DAEMON_SIGNALS = {
    "SIGTERM, SIGINT": "Shut down in phases. A second one ends the wait for running tasks, a third "
    "kills.",
    "SIGHUP": "Read the configuration again.",
    "SIGUSR1": "Write the state to the log.",
}
_DAEMON_CODES = {
    "0": "Stopped cleanly.",
    "69": "Another instance runs, or another node of the cluster has this one's name.",
    "70": "Internal error.",
    "71": "The system denies what is needed, such as descriptors; the message says how many.",
    "78": "The configuration or the store is wrong.",
}
_DAEMON_FILES = {
    "/etc/musterd/musterd.toml": "The configuration; drop-ins in musterd.d beside it.",
    "/run/musterd/control.sock": "For musterctl(1).",
    "/run/musterd/tasks.sock": "For clients.",
    "/var/lib/musterd/store.db": "The store: every task that has not ended, and results.",
}
_CONTROL_CODES = {
    "0": "Done.",
    "1": "Failed.",
    "2": "Usage.",
    "3": "status: not every pool is at its target size.",
    "4": "No such name; status: the daemon is unreachable.",
    "7": "Any other command: the daemon is unreachable.",
    "69": "The PostgreSQL of the cluster is unreachable.",
    "78": "No cluster is configured, or its database cannot be used.",
}
_TOML_TEXT = """\
The configuration of musterd(8). Later wins, key by key: the defaults, this file, the files in
/etc/musterd/musterd.d in the order of their names, the profile, environment variables
MUSTERD_SECTION__KEY=value, and --set section.key=value. An unknown key is an error. Durations are
written as "500ms", "30s", "5m"; sizes as "400M", "2G"; shares as "70%"; rates as "1/s". The section
target_defaults has the keys of targets.NAME, for every target.
"""
_ROW = re.compile(r"^\| `([a-z]+\.[A-Za-z_.]+)` \| (.+?) \| (.+) \|$", re.MULTILINE)


class ManualPage(NamedTuple):
    name: str
    section: int
    text: str

    @property
    def file(self) -> str:
        return f"{self.name}.{self.section}"


def pages(musterd: click.Group, musterctl: click.Group) -> Iterator[ManualPage]:
    """Yield the pages of these two commands and of the configuration."""
    yield ManualPage("musterd", 8, _daemon_page(musterd))
    yield ManualPage("musterctl", 1, _control_page(musterctl))
    yield ManualPage("musterd.toml", 5, _toml_page())


def _daemon_page(group: click.Group) -> str:
    return "\n".join(
        [
            *_head("musterd", 8, "keeps a fleet of worker processes alive", "COMMAND [OPTION...]"),
            *_part("DESCRIPTION", _text(_DAEMON_TEXT)),
            *_part("COMMANDS", *_commands(group)),
            *_part("SIGNALS", *_list(_DAEMON_SIGNALS)),
            *_part("EXIT STATUS", *_list(_DAEMON_CODES)),
            *_part("FILES", *_list(_DAEMON_FILES)),
            *_part("SEE ALSO", _text("musterctl(1), musterd.toml(5), systemd.service(5)")),
            "",
        ]
    )


def _control_page(group: click.Group) -> str:
    return "\n".join(
        [
            *_head("musterctl", 1, "control a running musterd", "[OPTION...] [COMMAND]"),
            *_part("DESCRIPTION", _help(group)),
            *_part("OPTIONS", *_options(group)),
            *_part("COMMANDS", *_commands(group)),
            *_part("EXIT STATUS", *_list(_CONTROL_CODES)),
            *_part("SEE ALSO", _text("musterd(8), musterd.toml(5)")),
            "",
        ]
    )


def _toml_page() -> str:
    table = files("musterd").joinpath("share/configuration.md").read_text()
    keys: dict[str, list[str]] = {}
    for key, default, meaning in _ROW.findall(table):
        section, _, _ = key.rpartition(".")
        text = _plain(f"{meaning}. Default: {default}." if default != "required" else meaning)
        keys.setdefault(section, []).extend(_entry(key, text))
    parts = [line for name, lines in keys.items() for line in (f'.SS "{_line(name)}"', *lines)]
    return "\n".join(
        [
            *_head("musterd.toml", 5, "configuration of musterd", ""),
            *_part("DESCRIPTION", _text(_TOML_TEXT)),
            *_part("KEYS", *parts),
            *_part("SEE ALSO", _text("musterd(8), musterctl(1)")),
            "",
        ]
    )


# -- commands ---------------------------------------------------------------------------------


def _commands(group: click.Group, before: str = "") -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        context = click.Context(command, info_name=name)
        usage = " ".join([before + name, *command.collect_usage_pieces(context)])
        yield f'.SS "{_line(usage)}"'
        yield _help(command)
        yield from _options(command)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{before}{name} ")


def _options(command: click.Command) -> Iterator[str]:
    context = click.Context(command)
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield from _entry(*record)


def _help(command: click.Command) -> str:
    return _text(inspect.cleandoc(command.help or ""))


# -- roff -------------------------------------------------------------------------------------


def _head(name: str, section: int, what: str, usage: str) -> list[str]:
    synopsis = (
        f".B {_line(name)}\n{_line(usage)}" if usage else f".I {_line('/etc/musterd/' + name)}"
    )
    return [
        f'.TH {name.upper()} {section} "" "musterd {__version__}"',
        *_part("NAME", f"{_line(name)} \\- {_line(what)}"),
        *_part("SYNOPSIS", synopsis),
    ]


def _part(title: str, *lines: str) -> list[str]:
    return [f".SH {title}", *lines]


def _list(entries: dict[str, str]) -> Iterator[str]:
    for term, text in entries.items():
        yield from _entry(term, text)


def _entry(term: str, text: str) -> list[str]:
    return [".TP", f".B {_line(term)}", _text(text or "\u00a0")]


def _text(text: str) -> str:
    """Return the text as paragraphs of roff."""
    paragraphs = [" ".join(part.split()) for part in text.replace("\b", "").split("\n\n")]
    return "\n.PP\n".join(_line(paragraph) for paragraph in paragraphs)


def _line(text: str) -> str:
    """Return a line with everything escaped that means something to roff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _plain(markdown: str) -> str:
    """Return the text without the marks of code and links."""
    return re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", markdown).replace("`", "")
