"""Settings of the web process, from the configuration."""

from msgspec import Struct

from musterd.supervisor.config.http import parse_address
from musterd.supervisor.config.schema import Config
from musterd.supervisor.system import directories

DEFAULT_LISTEN = "127.0.0.1:7717"  # of `musterd web` where nothing is configured


class WebSettings(Struct, frozen=True):
    listen: str
    control: str  # the path of control.sock
    hosts: tuple[str, ...] = ()  # accepted in Host, beside the address itself
    group: str = ""  # of a Unix socket
    state_dir: str = ""  # its disk's free space is shown
    token_file: str = ""  # "": the page shows and changes nothing
    redact: tuple[str, ...] = ()  # names of arguments whose values are not shown


def settings_of(config: Config) -> WebSettings:
    """Return what the process is started with.

    ConfigurationError for a runtime directory whose path is too long.
    """
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


def wanted(config: Config) -> bool:
    """Whether the daemon has a web process of its own."""
    return bool(config.http.listen and config.http.start)
