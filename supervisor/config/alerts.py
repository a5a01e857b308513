"""The keys of [[alerts]]: which events are reported, where and how often.

A destination is usually a secret: anyone who knows the URL of a Telegram bot can write in its name.
It is given by reference, `url_file` or `url_secret`; a `url` in the configuration is never shown,
and is refused in a file that everybody can read.
"""

import difflib
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import field

from musterd.ipc.secrets.reference import is_secret_name
from musterd.supervisor.alerts.kinds import KINDS, USUAL, matching
from musterd.supervisor.alerts.template import names_in
from musterd.supervisor.config.kinds import (
    AbsolutePath,
    ArgumentNames,
    Duration,
    Flag,
    Kind,
    Text,
    TextList,
)
from musterd.supervisor.config.section import Conflict, Section
from musterd.supervisor.text.units import SECOND_NS

# Each alert is matched against every event, and has at most one message under way.
ALERTS_MAX = 50
ALERT_NAME_LENGTH_MAX = 40
PATTERNS_MAX = 100
ARGUMENTS_MAX = 100
TEMPLATE_CHARS_MAX = 2000
# A slower delivery is stuck; while one is under way, its alert sends nothing else.
TIMEOUT_NS_MAX = 300 * SECOND_NS
DELIVERY_NS = 30 * SECOND_NS

_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
# A webhook on this machine without a login has nothing to hide.
_HARMLESS = re.compile(
    r"(json|xml|form|http)s?://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?(/[^?@]*)?",
    re.IGNORECASE,
)
_IN_PROFILE = re.compile(r"profile \S+ \((.*)\)")
_SALT = os.urandom(16)  # a hidden value cannot be guessed from its mark, nor compared elsewhere
_MARK = re.compile(r"\(hidden [0-9a-f]{6}\)")


class EventKinds(TextList, frozen=True):
    """A list of event names, or globs of them."""

    noun = "events"
    example = '"memory.critical"'
    count_max = PATTERNS_MAX

    def read(self, value: object) -> tuple[str, ...]:
        if value == []:
            raise ValueError(f"has not 1 to {PATTERNS_MAX} events: give some, or leave it out")
        return super().read(value)

    def read_one(self, text: str) -> str:
        if not matching((text,)):
            near = difflib.get_close_matches(text, KINDS, 1)
            meant = f'did you mean "{near[0]}"? ' if near else ""
            raise ValueError(
                f'has "{text[:100]}", which is no event: {meant}known are '
                f"{', '.join(sorted(KINDS))}"
            )
        return text


class Address(Kind, frozen=True):
    """An apprise URL, or "" for none; written as a mark that differs from URL to URL."""

    takes_text: ClassVar[bool] = True
    secret: ClassVar[bool] = True

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("is not text: put the URL in quotes, or name a file with url_file")
        if _MARK.fullmatch(value):
            raise ValueError("is the mark of a hidden URL: write the URL itself")
        if value and not (_URL.fullmatch(value) and value.isprintable() and len(value) <= 4096):
            raise ValueError('is not an apprise URL: give one such as "tgram://TOKEN/CHAT"')
        return value

    def write(self, value: str) -> object:
        if not value:
            return ""
        return f"(hidden {hashlib.blake2b(value.encode(), digest_size=3, key=_SALT).hexdigest()})"


class SecretName(Text, frozen=True):
    """The name of a secret, or "" for none."""

    def read(self, value: object) -> str:
        name = super().read(value)
        if name and not is_secret_name(name):
            raise ValueError(
                "is not a valid secret name: give that of an environment variable or of a "
                "systemd credential, not its value"
            )
        return name


class Template(Kind, frozen=True):
    """Text with placeholders, or "" for the usual words."""

    takes_text: ClassVar[bool] = True

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError('is not text: give a template such as "{schedule}: {summary}"')
        if len(value) > TEMPLATE_CHARS_MAX:
            raise ValueError(f"is longer than {TEMPLATE_CHARS_MAX} characters: shorten it")
        names_in(value)
        return value


class CommandLine(Kind, frozen=True):
    """A program and its arguments, or [] for none."""

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError('is not a command: give a list such as ["/usr/local/bin/tell", "me"]')
        if len(value) > ARGUMENTS_MAX:
            raise ValueError(f"has more than {ARGUMENTS_MAX} words: shorten it")
        if value and not value[0].startswith("/"):
            raise ValueError("does not begin with an absolute path: PATH is not searched")
        if any("\0" in each for each in value):
            raise ValueError("contains a NUL character: remove it")
        return tuple(value)

    def write(self, value: tuple[str, ...]) -> object:
        return list(value)


class AlertConfig(Section, frozen=True):
    """Written as [[alerts]] with a `name`, or as [alerts.NAME]."""

    entries_max = ALERTS_MAX
    name_is = "the name of an alert"
    name_length_max = ALERT_NAME_LENGTH_MAX
    enabled: Annotated[bool, Flag()] = True
    on: Annotated[tuple[str, ...], EventKinds()] = USUAL
    pools: Annotated[tuple[str, ...], ArgumentNames()] = ()
    targets: Annotated[tuple[str, ...], ArgumentNames()] = ()
    for_ns: Annotated[int, Duration()] = field(name="for", default=0)
    group_ns: Annotated[int, Duration()] = field(name="group", default=10 * SECOND_NS)
    every_ns: Annotated[int, Duration()] = field(name="every", default=3600 * SECOND_NS)
    resolved: Annotated[bool, Flag()] = True
    timeout_ns: Annotated[int, Duration(SECOND_NS)] = field(name="timeout", default=DELIVERY_NS)
    title: Annotated[str, Template()] = ""
    body: Annotated[str, Template()] = ""
    url: Annotated[str, Address()] = ""
    url_file: Annotated[str, AbsolutePath()] = ""
    url_secret: Annotated[str, SecretName()] = ""
    command: Annotated[tuple[str, ...], CommandLine()] = ()

    def conflicts(self) -> Iterator[Conflict]:
        given = [key for key in DESTINATIONS if getattr(self, key)]
        if len(given) > 1:  # not at the key: its value would be shown
            yield (), f"has {' and '.join(given)}: give one destination, remove the others"
        elif not given:
            yield (), "has no destination: give url_file, url_secret, url or command"
        if self.timeout_ns > TIMEOUT_NS_MAX:
            yield ("timeout",), f"is longer than {TIMEOUT_NS_MAX // SECOND_NS} s: lower it"


DESTINATIONS = ("url", "url_file", "url_secret", "command")


def exposed(
    alerts: Mapping[str, AlertConfig], origins: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield URLs that others can read: the origin, the alert's name, and what to do."""
    for name, alert in alerts.items():
        if not alert.url or _HARMLESS.fullmatch(alert.url):
            continue
        for origin, problem in exposure_of(origins.get(f"alerts.{name}.url", "")):
            yield origin, name, problem


def exposure_of(origin: str) -> Iterator[tuple[str, str]]:
    """Yield the origin of a secret URL and what to do, if others can read it there."""
    within = _IN_PROFILE.fullmatch(origin)
    path = within[1] if within else origin
    if path.startswith("--set"):
        yield origin, "is visible to everybody who lists processes: use url_file"
    elif _all_may_read(Path(path)):
        yield (
            origin,
            "holds a secret, and everybody can read this file: chmod o-r it, or put the URL "
            "into a file of its own and name that with url_file",
        )


def _all_may_read(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & 0o004)
    except OSError:  # removed meanwhile
        return False


def machine_problems(alerts: Mapping[str, AlertConfig]) -> Iterator[str]:
    """Yield problems that depend on this machine."""
    for name, alert in alerts.items():
        if not alert.enabled:
            continue
        if alert.url_file and (problem := file_problem(alert.url_file)):
            yield f"key 'alerts.{name}.url_file': value \"{alert.url_file}\": {problem}"
        if alert.command and not os.access(alert.command[0], os.X_OK):
            program = alert.command[0]
            yield f"key 'alerts.{name}.command': \"{program}\" cannot be run: correct the path"
        elif not alert.command and importlib.util.find_spec("apprise") is None:
            yield f"key 'alerts.{name}': apprise is not installed: install musterd[alerts]"


def file_problem(path: str) -> str:
    """Return why a url_file cannot be used, or ""."""
    try:
        mode = Path(path).stat().st_mode
        with Path(path).open("rb"):
            pass
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "can be read by everybody: chmod o-r it" if mode & 0o004 else ""
