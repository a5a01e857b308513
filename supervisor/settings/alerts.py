"""Settings of the process that sends alerts, from the configuration."""

from musterd.supervisor.alerts.rules import Rule
from musterd.supervisor.alerts.settings import AlertSettings, Destination
from musterd.supervisor.config.schema import Config
from musterd.supervisor.system import directories

STATE_FILE = "alerts.json"  # in state_dir


def settings_of(config: Config) -> AlertSettings:
    """Return what the process is started with.

    ConfigurationError for a runtime directory whose path is too long.
    """
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


def wanted(config: Config) -> bool:
    """Whether there is anything to send."""
    return any(alert.enabled for alert in config.alerts.values())
