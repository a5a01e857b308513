"""What the publisher of events is told when it starts."""

from hashlib import sha256

import msgspec
from msgspec import Struct

from musterd.supervisor.config.schema import Config
from musterd.supervisor.system import directories

BUILD_DIGITS = 16


class PublisherSettings(Struct, frozen=True):
    publish: str  # the endpoint
    control: str  # the path of control.sock
    level: str = "info"  # the lowest that is published
    group: str = ""  # of a socket file; "": the group of the daemon


def settings_of(config: Config) -> PublisherSettings:
    """ConfigurationError for a runtime directory whose path is too long."""
    runtime = directories.runtime_dir(config.supervisor.runtime_dir)
    supervisor = config.supervisor
    return PublisherSettings(
        publish=config.events.publish,
        control=str(directories.control_socket(runtime)),
        level=config.events.level,
        # Whoever may look at events on control.sock.
        group=config.events.group or supervisor.view_group or supervisor.control_group,
    )


def build_of(config: Config) -> str:
    """Names what the publisher is made of; "" if there shall be none."""
    if not config.events.publish:
        return ""
    encoded = msgspec.msgpack.encode(settings_of(config))
    return sha256(encoded).hexdigest()[:BUILD_DIGITS]
