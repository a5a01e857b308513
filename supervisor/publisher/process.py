"""Follow the daemon's events and publish each on a PUB socket, as two frames.

    topic   EVENT.SUBJECT in UTF-8, such as task.changed.kites, worker.fatal.parser
    body    the event as JSON, as in `musterctl events --json`

The process is a client of control.sock. libzmq is here and not in the supervisor, because it ends
its process on some input and when descriptors run out: then the daemon starts another process, and
subscribers reconnect automatically. This module creates the socket file, not libzmq: at no moment
do more users have access than configured.
"""

import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import zmq
from setproctitle import setproctitle

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.alerts.link import Following, Gone
from musterd.supervisor.api import rpc
from musterd.supervisor.config.events import Endpoint, parse_endpoint
from musterd.supervisor.settings.sidecars import PublisherSettings
from musterd.supervisor.sockets.listen import group_id_of, inode, is_listened_on, listen

EXIT_FAILED = 1
EXIT_CONFIGURATION = 78
BEAT_SECONDS = 5.0  # a fraction of what the daemon waits for (core/workers/sidecar.py)
CONNECT_SECONDS = 1.0  # between attempts to reach the daemon
# Events kept for a subscriber that does not read: some megabytes. It loses further ones.
QUEUED_MAX = 1000
SUBSCRIPTION_BYTES_MAX = 1024  # topics are shorter; peers send nothing else
# Memory of the process, where a subscriber subscribes to endless topics. libzmq ends the process at
# the limit, and the next one starts without them.
MEMORY_BYTES_MAX = 1024 * 1024 * 1024
LINGER_MS = 500  # for the last events, when the daemon ends
PING_MS, GONE_MS = 10_000, 30_000  # a peer that does not answer PINGs is dropped
DROPPED = "events.dropped"  # topic of the number of dropped events

_encode = msgspec.json.Encoder().encode


def topic_of(fields: dict[str, Any]) -> str:
    """Return the event's name and its subject: a schedule, a session, a site or a pool."""
    event = str(fields.get("event", ""))
    about = fields.get("schedule") or fields.get("session")
    about = about or (fields.get("target") if _is_of_site(event) else "")
    about = about or fields.get("pool") or str(fields.get("worker", "")).partition("/")[0]
    return f"{event}.{about}" if about else event


def _is_of_site(event: str) -> bool:
    return event.startswith("breaker.")


class FileGone(OSError):
    """The socket file is gone: the next process creates it again."""


class Ended(Exception):
    """The daemon has stopped this process, or has ended."""


def _end(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


class Publisher:
    def __init__(
        self,
        settings: PublisherSettings,
        beat_fd: int,
        sock: "zmq.Socket[bytes]",
        is_there: Callable[[], bool],
    ) -> None:
        """Publish on `sock`; `is_there` returns whether the socket file is still ours."""
        self._settings = settings
        self._beat_fd = beat_fd
        self._socket = sock
        self._is_there = is_there
        self._selector = selectors.DefaultSelector()
        self._following: Following | None = None
        self._connect_at = self._beat_at = 0.0

    def run(self, address: str) -> NoReturn:
        """Publish until Ended is raised."""
        self._follow(time.monotonic())
        self._beat(f"{address}\n".encode())
        while True:
            now = time.monotonic()
            due = [self._beat_at] if self._is_following else [self._beat_at, self._connect_at]
            for key, _ in self._selector.select(max(0.0, min(due) - now)):
                key.data()
            now = time.monotonic()
            if not self._is_following and now >= self._connect_at:
                self._follow(now)
            if now >= self._beat_at:
                if not self._is_there():
                    raise FileGone(0, "its socket file was removed or replaced")
                self._beat(b"\n")

    @property
    def _is_following(self) -> bool:
        return self._following is not None and not self._following.gone

    def _follow(self, now: float) -> None:
        self._connect_at = now + CONNECT_SECONDS
        level: Any = self._settings.level
        asked = rpc.Events(follow=True, level=level, limit=0)
        try:
            self._following = Following(
                self._settings.control, self._selector, asked, self._event, lambda: None
            )
        except Gone:
            self._following = None

    def _event(self, fields: dict[str, Any], _before: bool) -> None:
        topic = DROPPED if "dropped" in fields else topic_of(fields)
        # Never blocks: a subscriber that is too slow loses events.
        self._socket.send_multipart([topic.encode(errors="replace"), _encode(fields)])

    def _beat(self, line: bytes) -> None:
        self._beat_at = time.monotonic() + BEAT_SECONDS
        self._socket.get(zmq.EVENTS)  # libzmq processes subscriptions when it is called
        try:
            os.write(self._beat_fd, line)
        except BlockingIOError:
            return  # the pipe of a stopped daemon is full of heartbeats
        except BrokenPipeError:
            raise Ended from None


def run(settings: PublisherSettings, beat_fd: int) -> int:
    """Publish until SIGTERM and return the exit code; print errors on standard error."""
    setproctitle("musterd: events")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    endpoint = parse_endpoint(settings.publish)
    context = zmq.Context()
    sock = context.socket(zmq.PUB)
    own: tuple[int, int] | None = None
    try:
        signal.signal(signal.SIGTERM, _end)
        _configure(sock)
        if endpoint.path:
            own = _bind_file(sock, endpoint, settings.group)
        else:
            sock.setsockopt(zmq.IPV6, 1 if ":" in endpoint.host else 0)
            sock.bind(settings.publish)
        address = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        Publisher(settings, beat_fd, sock, lambda: own is None or inode(endpoint.path) == own).run(
            address
        )
    except Ended:
        return 0
    except ConfigurationError as error:
        return _fail(EXIT_CONFIGURATION, str(error))
    except (OSError, zmq.ZMQError) as error:
        return _fail(EXIT_FAILED, f"cannot publish on {settings.publish}: {error.strerror}")
    finally:
        sock.close()
        context.term()
        if own is not None and inode(endpoint.path) == own:
            os.unlink(endpoint.path)


def _configure(sock: "zmq.Socket[bytes]") -> None:
    sock.setsockopt(zmq.SNDHWM, QUEUED_MAX)
    sock.setsockopt(zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES_MAX)
    sock.setsockopt(zmq.LINGER, LINGER_MS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, GONE_MS)


def _bind_file(sock: "zmq.Socket[bytes]", endpoint: Endpoint, group: str) -> tuple[int, int] | None:
    """Publish on a socket file of our own; return its inode."""
    path = endpoint.path
    if is_listened_on(path):
        raise OSError(0, "another program listens there: set another path")
    listener = listen(path, group_id_of(group, "events.group"))
    sock.setsockopt(zmq.USE_FD, listener.fileno())
    sock.bind(f"ipc://{path}")
    listener.detach()  # libzmq closes it
    return inode(path)


def _fail(code: int, message: str) -> int:
    print(message, file=sys.stderr, flush=True)
    return code
