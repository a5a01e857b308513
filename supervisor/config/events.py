"""The keys of [events], and the form of an endpoint to publish on."""

import ipaddress
from collections.abc import Iterator
from typing import Annotated

from msgspec import Struct

from musterd.supervisor.config.http import host_and_port, socket_path
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
    if text.startswith(IPC):  # "@name", which has no owner and no mode, is no absolute path
        return Endpoint(path=socket_path(text.removeprefix(IPC), _GIVE))
    if not text.startswith(TCP):
        raise ValueError(f"is not a ZeroMQ endpoint: {_GIVE}")
    host, port = host_and_port(text.removeprefix(TCP), _GIVE)
    if not ipaddress.ip_address(host).is_loopback:
        raise ValueError(
            "can be reached from other machines, and events are published without passwords and "
            "encryption: publish on a loopback address or a path, and forward it by ssh or a proxy"
        )
    return Endpoint(host=host, port=port)


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
