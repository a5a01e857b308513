"""Accept what users of supervisorctl type, or say what to type instead.

names      group:*  group:  group:name_00      POOL, POOL, POOL/0
commands   help, ?, quit, exit                 as in the shell
           tail NAME stderr, update all        without the last word
           commands we do not have             an error that names ours
"""

import re

from musterd.ipc.errors import MusterdError

_SUPERVISOR_NAME = re.compile(r"([^:/]+):(?:\*|(?:.*_)?0*(\d+))?")
_BYTES = re.compile(r"-(\d+)")
_STREAMS = ("stdout", "stderr")
HELP = ("help", "?")
LEAVE = ("quit", "exit")


class Instead(MusterdError):
    """musterctl has no such command; the message says what to type."""


def name_of(word: str) -> str:
    """Translate a name of supervisorctl: `parser:*` is parser, `parser:parser_00` parser/0."""
    found = _SUPERVISOR_NAME.fullmatch(word)
    if found is None:
        return word
    pool, number = found.groups()
    return pool if number is None else f"{pool}/{number}"


def without_stream(names: tuple[str, ...]) -> tuple[str, ...]:
    """Drop the stream of `tail NAME stderr`: both streams of a worker are one output here."""
    return names[:-1] if len(names) > 1 and names[-1] in _STREAMS else names


def meant(words: list[str]) -> list[str]:
    """Translate a command of supervisorctl and its arguments; Instead if we have none for it."""
    command, rest = words[0], words[1:]
    if command == "tail":
        for word in rest:
            if number := _BYTES.fullmatch(word):
                others = " ".join(name_of(each) for each in rest if each != word)
                raise Instead(
                    f"tail {word} counts bytes in supervisorctl, musterctl counts lines: type "
                    f"musterctl tail -n {number[1]} {others}".rstrip()
                )
    if command == "update":
        return _update(rest)
    if command in _INSTEAD:
        name = name_of(rest[-1]) if rest else "NAME"
        raise Instead(f"there is no command {command}: {_INSTEAD[command].format(name=name)}")
    return words


def _update(rest: list[str]) -> list[str]:
    names = [word for word in rest if not word.startswith("-") and word != "all"]
    if names:
        raise Instead(
            "update applies the whole configuration and touches only what has changed: type "
            f"musterctl update; for new code in a pool, musterctl reload {' '.join(names)}"
        )
    return ["update", *[word for word in rest if word != "all"]]


_INSTEAD = {
    "maintail": "the daemon's log is in the journal, or in supervisor.log_file: type "
    "journalctl -u musterd -f, or musterctl events -f",
    "fg": "a worker reads nothing from a terminal: type musterctl tail -f {name} to see its output",
    "clear": "the kept output of a worker is bounded and needs no clearing: type "
    "musterctl tail -f -n 0 {name} to see new output only",
    "avail": "type musterctl status for the pools that run, musterctl reread for what a reload "
    "would change, musterd show-config for the whole configuration",
    "add": "write [pools.{name}] into the configuration, then type musterctl update",
    "remove": "take [pools.{name}] out of the configuration, then type musterctl update; or "
    "musterctl stop {name} to stop its workers",
    "open": "type musterctl -s SOCKET COMMAND for the daemon at another control.sock",
}
