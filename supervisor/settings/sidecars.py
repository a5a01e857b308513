"""Settings of the sidecars, from the configuration: what each process is started with.

ConfigurationError for a runtime directory whose path is too long.
"""

from msgspec import Struct

from musterd.ipc.wire.artefacts import FOLDER
from musterd.supervisor.alerts.rules import Rule
from musterd.supervisor.alerts.settings import AlertSettings, Destination
from musterd.supervisor.config.http import parse_address
from musterd.supervisor.config.schema import Config
from musterd.supervisor.system import directories

DEFAULT_LISTEN = "127.0.0.1:7717"  # of `musterd web` where nothing is configured
ALERTS_FILE = "alerts.json"  # in state_dir


class WebSettings(Struct, frozen=True):
    listen: str
    control: str  # the path of control.sock
    hosts: tuple[str, ...] = ()  # accepted in Host, beside the address itself
    group: str = ""  # of a Unix socket
    state_dir: str = ""  # its disk's free space is shown
    token_file: str = ""  # "": the page shows and changes nothing
    redact: tuple[str, ...] = ()  # names of arguments whose values are not shown


class PublisherSettings(Struct, frozen=True):
    publish: str  # the endpoint
    control: str  # the path of control.sock
    level: str = "info"  # the lowest level that is published
    group: str = ""  # of a socket file; "": the group of the daemon


def web_settings(config: Config) -> WebSettings:
    where = config.http.listen or DEFAULT_LISTEN
    return WebSettings(
        listen=where,
        control=_control(config),
        hosts=config.http.hosts,
        group=config.http.group if parse_address(where).path else "",
        state_dir=str(directories.state_dir(config.supervisor.state_dir)),
        token_file=config.http.token_file,
        redact=config.supervisor.redact,
    )


def publisher_settings(config: Config) -> PublisherSettings:
    supervisor = config.supervisor
    return PublisherSettings(
        publish=config.events.publish,
        control=_control(config),
        level=config.events.level,
        # Those who may look at events on control.sock.
        group=config.events.group or supervisor.view_group or supervisor.control_group,
    )


def alert_settings(config: Config) -> AlertSettings:
    enabled = {name: alert for name, alert in config.alerts.items() if alert.enabled}
    state_dir = directories.state_dir(config.supervisor.state_dir)
    return AlertSettings(
        control_socket=_control(config),
        state_file=str(state_dir / ALERTS_FILE),
        pictures=str(state_dir / FOLDER) if config.artefacts.enabled else "",
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
                alert.url,
                alert.url_file,
                alert.url_secret,
                alert.command,
                alert.timeout_ns,
                alert.title,
                alert.body,
            )
            for name, alert in enabled.items()
        },
    )


def _control(config: Config) -> str:
    runtime = directories.runtime_dir(config.supervisor.runtime_dir)
    return str(directories.control_socket(runtime))
