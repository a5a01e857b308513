"""The keys of [events], and the form of an endpoint to publish on."""

import ipaddress
from collections.abc import Iterator
from typing import Annotated

from msgspec import Struct

from musterd.supervisor.config.http import SOCKET_PATH_BYTES_MAX
from musterd.supervisor.config.kinds import Choice, GroupName, Text
from musterd.supervisor.config.section import Conflict, Section

IPC, TCP = "ipc://", "tcp://"
_GIVE = 'give "ipc:///run/musterd/events.sock" or "tcp://127.0.0.1:5556"'


class Endpoint(Struct, frozen=True):
    """Where to publish: a path, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0


def parse_endpoint(text: str) -> Endpoint:
    """Parse an endpoint; ValueError continues the sentence "value X ..."."""
    if text.startswith(IPC):
        return Endpoint(path=_path(text.removeprefix(IPC)))
    if not text.startswith(TCP):
        raise ValueError(f"is not a ZeroMQ endpoint: {_GIVE}")
    host, colon, port = text.removeprefix(TCP).rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not digits or int(port) > 65535:
        raise ValueError(f"has no port: {_GIVE}")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        raise ValueError(f"has no IP address before its port: {_GIVE}") from None
    if (address.version == 6) != host.startswith("["):
        raise ValueError(f"is not an endpoint: {_GIVE}")
    if not address.is_loopback:
        raise ValueError(
            "can be reached from other machines, and events are published without passwords and "
            "encryption: publish on a loopback address or a path, and forward it by ssh or a proxy"
        )
    return Endpoint(host=bare, port=int(port))


def _path(path: str) -> str:
    if not path.startswith("/"):  # also refuses "@name", which has no owner and no mode, and "*"
        raise ValueError(f"has no absolute path: {_GIVE}")
    if len(path.encode(errors="surrogateescape")) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"is a path of over {SOCKET_PATH_BYTES_MAX} bytes: shorten it")
    if path.endswith("/"):
        raise ValueError(f"is a directory: {_GIVE}")
    return path


class PublishEndpoint(Text, frozen=True):
    """The endpoint to publish events on, or "" for none."""

    def read(self, value: object) -> str:
        text = super().read(value)
        if text:
            parse_endpoint(text)
        return text


class EventsConfig(Section, frozen=True):
    publish: Annotated[str, PublishEndpoint()] = ""
    level: Annotated[str, Choice(("debug", "info", "warning", "error"))] = "info"
    group: Annotated[str, GroupName()] = ""

    def conflicts(self) -> Iterator[Conflict]:
        if self.group and not self.publish.startswith(IPC):
            yield ("group",), "needs a socket file: publish on ipc://, or remove it"
