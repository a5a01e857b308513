"""Extraction at a bounded cost, whatever the page and the selectors are.

    reader = PageReader()
    await reader.extract(html, selectors) -> the values, or PageTooCostly
    reader.close()

Parsing HTML is quadratic in the depth of a page and in the number of attributes of an element, and
matching a selector is exponential in its length: a page of 3 kB and a selector of five words take
minutes. Neither engine can be interrupted. So a process beside the worker does what is not surely
cheap, and the kernel ends that process when it has used its CPU time; the next page gets a new
process. The process is started when it is first needed, and stays.

Run as a program, this module is that process: it reads requests from its standard input, a socket,
until there are no more.
"""

import asyncio
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from musterd.ipc.errors import MusterdError
from musterd.workers.authoring.base import Permanent
from musterd.workers.pages.extraction import (
    ExtractTooLarge,
    InvalidSelector,
    PageTooDeep,
    Selector,
    Value,
    extract,
)

CPU_SECONDS_MAX = 2  # for one page; an honest one of 10 MB takes a third of a second
ADDRESS_BYTES_MAX = 2 * 1024**3  # of the process: selections may multiply a page
CHEAP_BYTES_MAX = 64 * 1024  # the worst page of this size takes half a second
CHEAP_SELECTORS_MAX = 50
_LENGTH = struct.Struct("!Q")

# Selectors whose cost is at most the number of elements times their depth: for CSS one combinator
# at most, for XPath one path from the root with comparisons of attributes.
_COMPARED = r"[~|^$*]?=\s*(?:\"[^\"]*\"|'[^']*'|[\w-]+)\s*"
_COMPOUND = rf"(?:[\w-]+|\*)?(?:[.#][\w-]+|\[\s*[\w-]+\s*(?:{_COMPARED})?\])*"
_CHEAP_CSS = re.compile(rf"{_COMPOUND}(?:\s*[> ]\s*{_COMPOUND})?")
_STEP = r"(?:[\w-]+|\*)(?:\[@[\w-]+=(?:\"[^\"]*\"|'[^']*')\])?"
_CHEAP_XPATH = re.compile(rf"//?{_STEP}(?:/{_STEP})*(?:/text\(\)|/@[\w-]+)?")


class PageTooCostly(Permanent):
    """The page or a selector takes more time than any honest one."""


class ReaderLost(MusterdError):
    """The reader process ended for no reason of the page; another try may help."""


class _Request(Struct, array_like=True):
    html: str
    selectors: list[Selector]


class _Answer(Struct, array_like=True):
    values: dict[str, Value] = {}
    error: str = ""  # name of the error's class
    reason: str = ""


_ERRORS = {each.__name__: each for each in (ExtractTooLarge, InvalidSelector, PageTooDeep)}


def is_cheap(html: str, selectors: Sequence[Selector]) -> bool:
    """Tell whether this page is surely cheap, however it is made."""
    return (
        len(html) <= CHEAP_BYTES_MAX
        and len(selectors) <= CHEAP_SELECTORS_MAX
        and all(
            (_CHEAP_XPATH if each.xpath else _CHEAP_CSS).fullmatch(each.query) for each in selectors
        )
    )


class PageReader:
    """Extracts in a process of its own where necessary. One page at a time; others wait."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def extract(self, html: str, selectors: list[Selector]) -> dict[str, Value]:
        """Return the value of each selector by its name."""
        if is_cheap(html, selectors):
            return extract(html, selectors)
        # Lone surrogates (from scripts in a browser) cannot be encoded.
        text = html.encode("utf-8", "replace").decode()
        request = msgspec.msgpack.encode(_Request(text, selectors))
        async with self._turn:
            if self._socket is None:
                self._open()
            try:
                data = await self._ask(request)
            except OSError:
                raise self._ended() from None
            except BaseException:  # cancelled: nobody needs its work any more
                self.close()
                raise
        answer = msgspec.msgpack.decode(data, type=_Answer)
        if answer.error:
            raise _ERRORS.get(answer.error, PageTooCostly)(answer.reason)
        return answer.values

    async def _ask(self, request: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        await loop.sock_sendall(self._socket, _LENGTH.pack(len(request)) + request)
        (size,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
        return await self._receive(size)

    async def _receive(self, size: int) -> bytes:
        assert self._socket is not None
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            piece = await loop.sock_recv(self._socket, min(size - len(data), 2**20))
            if not piece:
                raise ConnectionResetError
            data += piece
        return bytes(data)

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "musterd.workers.pages.page_reader"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        self._socket = ours

    def _ended(self) -> Exception:
        """Return the error for a process that has closed its end."""
        assert self._process is not None
        code = self._process.wait()
        self.close()
        if code != -signal.SIGXCPU:
            return ReaderLost(f"the process that reads pages ended by itself ({code})")
        return PageTooCostly(
            f"the page takes over {CPU_SECONDS_MAX} s to read: it is nested too deeply, has too "
            "many attributes, or a selector has too many steps; select with fewer"
        )

    def close(self) -> None:
        """End the process, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


# -- the process --------------------------------------------------------------------------------


def _grant_cpu() -> None:
    """Grant the next page its CPU time; the kernel ends us with SIGXCPU after it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS_MAX
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _answer(request: bytes) -> bytes:
    try:
        asked = msgspec.msgpack.decode(request, type=_Request)
        answer = _Answer(extract(asked.html, asked.selectors))
    except Permanent as error:
        answer = _Answer({}, type(error).__name__, str(error))
    except MemoryError:
        answer = _Answer({}, "PageTooCostly", "the page and its selection take too much memory")
    return msgspec.msgpack.encode(answer)


def main() -> None:
    """Answer until the worker closes its end."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES_MAX, ADDRESS_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGXCPU would leave a core file
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # whatever the worker does with signals
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rb") as requests:
        while len(head := requests.read(_LENGTH.size)) == _LENGTH.size:
            _grant_cpu()
            answer = _answer(requests.read(_LENGTH.unpack(head)[0]))
            connection.sendall(_LENGTH.pack(len(answer)) + answer)


if __name__ == "__main__":
    main()
