"""Settings of the process that speaks to the cluster, from the configuration."""

import socket

from msgspec import Struct

from musterd.supervisor.config.schema import Config
from musterd.supervisor.settings.sessions import sessions_of
from musterd.supervisor.system import directories


class NodeSettings(Struct, frozen=True):
    tasks_socket: str
    node_socket: str
    local_socket: str
    state_dir: str  # holds the node's identity
    node: str  # its name
    lease_ns: int
    keep_ns: int  # how long results stay
    url: str = ""
    url_file: str = ""
    url_secret: str = ""
    redact: tuple[str, ...] = ()  # arguments that must be references to secrets
    sessions: dict[str, tuple[str, ...]] = {}  # by pool: names that its tasks may use here
    # Of one start.
    token: str = ""  # for node.sock
    tasks_fd: int = -1  # listens on tasks.sock


def node_settings(config: Config) -> NodeSettings:
    """Return what each process is started with.

    ConfigurationError for a runtime directory whose path is too long.
    """
    runtime = directories.runtime_dir(config.supervisor.runtime_dir)
    cluster = config.cluster
    return NodeSettings(
        tasks_socket=str(directories.tasks_socket(runtime)),
        node_socket=str(directories.node_socket(runtime)),
        local_socket=str(directories.local_socket(runtime)),
        state_dir=str(directories.state_dir(config.supervisor.state_dir)),
        node=cluster.node or socket.gethostname(),
        lease_ns=cluster.lease_ns,
        keep_ns=config.store.keep_results_ns,
        url=cluster.url,
        url_file=cluster.url_file,
        url_secret=cluster.url_secret,
        redact=config.supervisor.redact,
        sessions={
            name: tuple(sessions_of(name, pool, config))
            for name, pool in config.pools.items()
            if pool.enabled and config.cluster.shares(name)
        },
    )
