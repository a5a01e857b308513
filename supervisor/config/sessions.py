"""The keys of [sessions] and [sessions.NAME]: cookies and storage that outlive tasks."""

import ipaddress
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

from msgspec import field

from musterd.ipc.secrets.sessions import KEEP_NS
from musterd.ipc.wire.messages import SESSION_CHARS_MAX
from musterd.supervisor.config.alerts import SecretName
from musterd.supervisor.config.kinds import (
    AbsolutePath,
    Duration,
    FunctionName,
    OptionalTaskName,
    Options,
    TextList,
    Whole,
)
from musterd.supervisor.config.redact import problem_of
from musterd.supervisor.config.section import Conflict, Section
from musterd.supervisor.text.units import SECOND_NS

# Each is told to every worker that may use it, and has a row in the store.
SESSIONS_MAX = 1000
CONCURRENT_MAX = 1000
PATTERNS_MAX = 100
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]+(\.[a-z0-9_-]+)*")
EVERY_SESSION = ("*",)  # default of pools.NAME.sessions
KEEP_NS_MIN = 60 * SECOND_NS
FAILURES_MAX = 1000
LOGIN_PAUSE_NS = 15 * 60 * SECOND_NS  # sites that lock accounts do so for about as long


class SessionPatterns(TextList, frozen=True):
    """A list of names of sessions; they may have wildcards."""

    noun = "names of sessions"
    example = '"shop-*"'
    count_max = PATTERNS_MAX

    def read_one(self, text: str) -> str:
        if not 0 < len(text) <= SESSION_CHARS_MAX or not text.isprintable():
            raise ValueError(f'has "{text[:100]}", which is no name and no pattern of one')
        return text


class AddressPatterns(TextList, frozen=True):
    """A list of addresses of pages, with wildcards."""

    noun = "addresses"
    example = '"https://shop.example/login*"'
    count_max = PATTERNS_MAX

    def read_one(self, text: str) -> str:
        if "://" not in text and not text.startswith("*"):
            raise ValueError(
                f'has "{text[:100]}", which fits no address: write it whole, such as '
                '"https://shop.example/login*", or begin it with *'
            )
        return text


class SiteNames(TextList, frozen=True):
    """A list of hosts, each with those below it; as cookies have them: in lower case, IDNA."""

    noun = "hosts"
    example = '"shop.example"'
    count_max = PATTERNS_MAX

    def read_one(self, text: str) -> str:
        host = text.strip("[]").rstrip(".").lower()
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            pass
        with suppress(UnicodeError):  # else it is no name
            host = host.encode("idna").decode()
        if not _HOST.fullmatch(host):
            raise ValueError(
                f'has "{text[:100]}", which is no host: write it without scheme, port and '
                f"wildcards, such as {self.example}; hosts below it belong to it"
            )
        return host


class SessionConfig(Section, frozen=True):
    entries_max = SESSIONS_MAX
    name_is = "the name of a session"
    name_length_max = SESSION_CHARS_MAX
    login: Annotated[str, FunctionName()] = ""
    login_task: Annotated[str, OptionalTaskName()] = ""
    args: Annotated[dict[str, Any], Options()] = {}
    concurrent: Annotated[int, Whole(1, CONCURRENT_MAX)] = 1
    logged_out: Annotated[tuple[str, ...], AddressPatterns()] = ()
    sites: Annotated[tuple[str, ...], SiteNames()] = ()
    keep_ns: Annotated[int, Duration(KEEP_NS_MIN)] = field(name="keep", default=KEEP_NS)
    login_failures: Annotated[int, Whole(0, FAILURES_MAX)] = 3
    login_pause_ns: Annotated[int, Duration(SECOND_NS)] = field(
        name="login_pause", default=LOGIN_PAUSE_NS
    )

    def conflicts(self) -> Iterator[Conflict]:
        if self.login and self.login_task:
            yield ("login_task",), "is given beside login: remove one of them"
        if self.args and not self.login and not self.login_task:
            yield ("args",), "has no effect without login or login_task: give what they are for"


class SessionsConfig(Section, frozen=True):
    flattens = "named"
    key_secret: Annotated[str, SecretName()] = ""
    key_file: Annotated[str, AbsolutePath()] = ""
    named: dict[str, SessionConfig] = {}

    @property
    def has_shared_key(self) -> bool:
        """Whether other machines can have the key too: it was not generated on this one."""
        return bool(self.key_secret or self.key_file)

    def conflicts(self) -> Iterator[Conflict]:
        if self.key_secret and self.key_file:
            yield ("key_file",), "is given beside key_secret: remove one of them"


def args_problem(name: str, session: SessionConfig, redact: tuple[str, ...]) -> str:
    """Return what is wrong with the arguments of a login; "" for nothing."""
    return problem_of(f"the login of {name}", session.args, redact)
