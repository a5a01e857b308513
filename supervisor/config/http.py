"""The keys of [http], and the form of an address to listen on."""

import importlib.util
import ipaddress
import re
from collections.abc import Iterator
from typing import Annotated

from msgspec import Struct

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.secrets.reference import is_secret_name
from musterd.supervisor.config.kinds import Flag, GroupName, Text, TextList
from musterd.supervisor.config.section import Conflict, Section

HOSTS_MAX = 100
SOCKET_PATH_BYTES_MAX = 107  # sun_path on Linux
UNIX = "unix:"
WEB_NEEDS = ("starlette", "uvicorn", "prometheus_client")  # the extra `web`

_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


class Address(Struct, frozen=True):
    """Where to listen: a path, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach the address."""
        return bool(self.path) or ipaddress.ip_address(self.host).is_loopback

    @property
    def url(self) -> str:
        if self.path:
            return f"{UNIX}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse an address; ValueError continues the sentence "value X ..."."""
    give = 'give "127.0.0.1:7717", "[::1]:7717" or "unix:/run/musterd/http.sock"'
    if text.startswith(UNIX):
        return Address(path=socket_path(text.removeprefix(UNIX), give))
    if text.startswith("localhost:"):
        text = text.replace("localhost", "127.0.0.1")
    host, port = host_and_port(text, give)
    return Address(host=host, port=port)


def socket_path(path: str, give: str) -> str:
    """Return the path of a socket file if it can be one; ValueError as parse_address()."""
    if not path.startswith("/"):
        raise ValueError(f"has no absolute path: {give}")
    if len(path.encode(errors="surrogateescape")) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"is a path of over {SOCKET_PATH_BYTES_MAX} bytes: shorten it")
    if path.endswith("/"):
        raise ValueError(f"is a directory: {give}")
    return path


def host_and_port(text: str, give: str) -> tuple[str, int]:
    """Return the IP address, without brackets, and the port; ValueError as parse_address()."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not digits or int(port) > 65535:
        raise ValueError(f"has no port: {give}")
    try:
        version = ipaddress.ip_address(bare).version
    except ValueError:
        raise ValueError(f"has no IP address before its port: {give}") from None
    if (version == 6) != host.startswith("["):
        raise ValueError(f"is not an address: {give}")
    return bare, int(port)


class ListenAddress(Text, frozen=True):
    """The address that the web process listens on, or "" for none."""

    def read(self, value: object) -> str:
        text = super().read(value)
        if text:
            parse_address(text)
        return text


class HostNames(TextList, frozen=True):
    noun = "names"
    example = '"fleet.example"'
    count_max = HOSTS_MAX

    def read_one(self, text: str) -> str:
        if not _HOST_NAME.fullmatch(text.lower()):
            raise ValueError(f'has "{text[:200]}", which is not a host name: correct it')
        return text.lower()


class TokenFile(Text, frozen=True):
    """An absolute path, the name of a systemd credential, or "" for none."""

    def read(self, value: object) -> str:
        name = super().read(value)
        if name and not name.startswith("/") and not is_secret_name(name):
            raise ValueError(
                "is neither an absolute path nor the name of a systemd credential: give the "
                "file that holds the token, never the token itself"
            )
        return name


class HttpConfig(Section, frozen=True):
    listen: Annotated[str, ListenAddress()] = ""
    start: Annotated[bool, Flag()] = True
    allow_remote: Annotated[bool, Flag()] = False
    hosts: Annotated[tuple[str, ...], HostNames()] = ()
    group: Annotated[str, GroupName()] = ""
    token_file: Annotated[str, TokenFile()] = ""

    def conflicts(self) -> Iterator[Conflict]:
        if not self.listen:
            return
        address = parse_address(self.listen)
        if not address.is_local and not self.allow_remote:
            yield (
                ("listen",),
                "can be reached from other machines, where anyone can see the fleet: put a proxy "
                "with TLS and passwords in front of a loopback address, or give "
                "allow_remote = true",
            )
        if self.group and not address.path:
            yield (
                ("group",),
                "needs a Unix socket: listen on unix:/..., or remove it",
            )


def check_extra(http: HttpConfig) -> None:
    """Raise ConfigurationError where [http] is used and its packages are missing."""
    missing = [name for name in WEB_NEEDS if importlib.util.find_spec(name) is None]
    if http.listen and missing:
        raise ConfigurationError(
            f"key 'http.listen': value \"{http.listen}\": {', '.join(missing)} not installed: "
            "pip install 'musterd[web]'"
        )
