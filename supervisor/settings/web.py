"""What the web process is told when it starts."""

from hashlib import sha256

import msgspec
from msgspec import Struct

from musterd.supervisor.config.http import parse_address
from musterd.supervisor.config.schema import Config
from musterd.supervisor.system import directories

BUILD_DIGITS = 16
DEFAULT_LISTEN = "127.0.0.1:7717"  # of `musterd web` where nothing is configured


class WebSettings(Struct, frozen=True):
    listen: str
    control: str  # the path of control.sock
    hosts: tuple[str, ...] = ()  # names under which it may be asked for, beside its own
    group: str = ""  # of a Unix socket
    state_dir: str = ""  # whose disk is looked at
    token_file: str = ""  # "": nothing can be done through the page
    redact: tuple[str, ...] = ()  # names of arguments whose values are not shown


def settings_of(config: Config) -> WebSettings:
    """ConfigurationError for a runtime directory whose path is too long."""
    runtime = directories.runtime_dir(config.supervisor.runtime_dir)
    where = config.http.listen or DEFAULT_LISTEN
    return WebSettings(
        listen=where,
        control=str(directories.control_socket(runtime)),
        hosts=config.http.hosts,
        group=config.http.group if parse_address(where).path else "",
        state_dir=str(directories.state_dir(config.supervisor.state_dir)),
        token_file=config.http.token_file,
        redact=config.supervisor.redact,
    )


def build_of(config: Config) -> str:
    """Names what the daemon's own web process is made of; "" if it shall have none."""
    if not config.http.listen or not config.http.start:
        return ""
    encoded = msgspec.msgpack.encode(settings_of(config))
    return sha256(encoded).hexdigest()[:BUILD_DIGITS]
