"""What the process that sends alerts is told, by the configuration."""

from hashlib import sha256

import msgspec

from musterd.supervisor.alerts.rules import Rule
from musterd.supervisor.alerts.settings import AlertSettings, Destination
from musterd.supervisor.config.schema import Config
from musterd.supervisor.system import directories

BUILD_DIGITS = 16
STATE_FILE = "alerts.json"  # in state_dir


def settings_of(config: Config) -> AlertSettings:
    """ConfigurationError for a runtime directory whose path is too long."""
    runtime = directories.runtime_dir(config.supervisor.runtime_dir)
    state_dir = directories.state_dir(config.supervisor.state_dir)
    enabled = {name: alert for name, alert in config.alerts.items() if alert.enabled}
    return AlertSettings(
        control_socket=str(directories.control_socket(runtime)),
        state_file=str(state_dir / STATE_FILE),
        rules=[
            Rule(
                name,
                alert.on,
                alert.pools,
                alert.targets,
                alert.for_ns,
                alert.group_ns,
                alert.every_ns,
                alert.resolved,
            )
            for name, alert in enabled.items()
        ],
        destinations={
            name: Destination(
                alert.url, alert.url_file, alert.url_secret, alert.command, alert.timeout_ns
            )
            for name, alert in enabled.items()
        },
    )


def build_of(config: Config) -> str:
    """Names what the process is made of; "" if there is nothing to send."""
    settings = settings_of(config)
    if not settings.rules:
        return ""
    return sha256(msgspec.msgpack.encode(settings)).hexdigest()[:BUILD_DIGITS]
