"""Run the web server: listen, serve, send heartbeats to the daemon, until SIGTERM."""

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys

from setproctitle import setproctitle

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config.http import WEB_NEEDS, Address, parse_address
from musterd.supervisor.settings.sidecars import WebSettings
from musterd.supervisor.sockets.listen import OWN_GROUP_MODE, bind_file, group_id_of, is_listened_on

EXIT_FAILED = 1
EXIT_CONFIGURATION = 78
BACKLOG = 64
GRACE_SECONDS = 1  # for answers under way at shutdown
NO_BEAT = -1
BEAT_SECONDS = 5.0  # a fraction of what the daemon waits for (core/workers/sidecar.py)


class NotNow(Exception):
    """The server cannot listen now; a retry may help."""


class DaemonGone(Exception):
    """The daemon has closed its end of the pipe."""


def run(settings: WebSettings, beat_fd: int = NO_BEAT) -> int:
    """Serve until SIGTERM and return the exit code; print errors on standard error."""
    try:
        for name in WEB_NEEDS:
            importlib.import_module(name)
    except ImportError as error:
        return _fail(
            EXIT_CONFIGURATION,
            f"{error.name} is not installed: install musterd[web] (pip install 'musterd[web]')",
        )
    setproctitle("musterd: web")
    try:
        listener, address = listen(settings)
    except ConfigurationError as error:
        return _fail(EXIT_CONFIGURATION, str(error))
    except NotNow as error:
        return _fail(EXIT_FAILED, str(error))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)  # uvicorn handles them, and raises them again at its end
    try:
        return asyncio.run(_serve(settings, listener, address.url, beat_fd))
    finally:
        listener.close()
        _unlink(address.path)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: uvicorn has shut down already."""


def _fail(code: int, message: str) -> int:
    print(f"musterd web: {message}", file=sys.stderr, flush=True)
    return code


async def _serve(settings: WebSettings, listener: socket.socket, url: str, beat_fd: int) -> int:
    import uvicorn

    from musterd.supervisor.web import protocol
    from musterd.supervisor.web.app import make_app

    app, live = make_app(settings)
    config = uvicorn.Config(
        app,
        http=protocol.PatientProtocol,
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=protocol.ANSWERED_MAX,
        backlog=BACKLOG,
        timeout_keep_alive=protocol.KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            live.end()  # uvicorn would wait for open pages
            await super().shutdown(sockets)

    server = Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    if beat_fd == NO_BEAT:
        print(f"musterd web: listening on {url}", file=sys.stderr, flush=True)
        await serving
        return 0
    beating = asyncio.create_task(beat(beat_fd, url))
    await asyncio.wait((serving, beating), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError, DaemonGone):
        await beating
    await serving
    return 0


async def beat(fd: int, address: str) -> None:
    """Send the address, then heartbeats while the loop runs; DaemonGone if nobody reads them."""
    line = f"{address}\n".encode()
    while True:
        try:
            os.write(fd, line)
        except BlockingIOError:
            pass  # the pipe of a stopped daemon is full of heartbeats
        except BrokenPipeError as error:
            raise DaemonGone from error
        line = b"\n"
        await asyncio.sleep(BEAT_SECONDS)


def listen(settings: WebSettings) -> tuple[socket.socket, Address]:
    """Return the socket and its address (port 0: any free one); ConfigurationError or NotNow."""
    address = parse_address(settings.listen)
    if address.path:
        return _listen_at(address.path, group_id_of(settings.group, "http.group")), address
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets created as TCP; without it an answer of two writes
    # takes 40 ms longer.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)  # from here on callers wait instead of being refused
    except PermissionError as error:
        sock.close()
        raise ConfigurationError(
            f"cannot listen on {settings.listen}: {error.strerror}: give a port above 1023"
        ) from error
    except OSError as error:
        sock.close()
        raise NotNow(
            f"cannot listen on {settings.listen}: {error.strerror}: another program may use it: "
            "set another address in http.listen"
        ) from error
    return sock, Address(host=address.host, port=sock.getsockname()[1])


def _listen_at(path: str, group_id: int | None) -> socket.socket:
    if is_listened_on(path):
        raise NotNow(f"another program listens on {path}: set another path in http.listen")
    try:
        return bind_file(path, group_id, OWN_GROUP_MODE, BACKLOG)
    except OSError as error:
        raise NotNow(f"cannot listen on {path}: {error.strerror}: check its directory") from error


def _unlink(path: str) -> None:
    if path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
