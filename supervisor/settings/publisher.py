"""Settings of the process that publishes events, from the configuration."""

from msgspec import Struct

from musterd.supervisor.config.schema import Config
from musterd.supervisor.system import directories


class PublisherSettings(Struct, frozen=True):
    publish: str  # the endpoint
    control: str  # the path of control.sock
    level: str = "info"  # the lowest level that is published
    group: str = ""  # of a socket file; "": the group of the daemon


def settings_of(config: Config) -> PublisherSettings:
    """Return what the process is started with.

    ConfigurationError for a runtime directory whose path is too long.
    """
    runtime = directories.runtime_dir(config.supervisor.runtime_dir)
    supervisor = config.supervisor
    return PublisherSettings(
        publish=config.events.publish,
        control=str(directories.control_socket(runtime)),
        level=config.events.level,
        # Those who may look at events on control.sock.
        group=config.events.group or supervisor.view_group or supervisor.control_group,
    )


def wanted(config: Config) -> bool:
    """Whether the daemon publishes events."""
    return bool(config.events.publish)
