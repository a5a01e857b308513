"""Says to the daemon, on a pipe, where the web process listens, and then that it lives."""

import asyncio
import os

BEAT_SECONDS = 5.0  # a fraction of what the daemon waits for (core/web.py)


class DaemonGone(Exception):
    """Nobody hears us any more."""


async def beat(fd: int, address: str) -> None:
    """For as long as the event loop turns; DaemonGone when the daemon has closed its end."""
    line = f"{address}\n".encode()
    while True:
        try:
            os.write(fd, line)
        except BlockingIOError:
            pass  # a stopped daemon reads nothing: it will find enough of them
        except BrokenPipeError as error:
            raise DaemonGone from error
        line = b"\n"
        await asyncio.sleep(BEAT_SECONDS)
