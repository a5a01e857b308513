"""Read the standard output and standard error of workers: log them, and keep them for `tail`.

Each worker gets one pipe for both, which keeps their order; a fork server gets one too, under the
name of its pool. The loop always reads the other end: a worker never blocks because nobody looks.

Nor can a flood block the loop. The pipes are in an inner epoll, which is in an outer epoll. After
each turn the outer epoll ignores the inner one for PACE_NS, and a turn reads at most PIPES_PER_TURN
pipes. So the loop is woken at most a hundred times a second, and a worker that writes faster waits
in write() for a moment. The log takes a limited number of lines a second of each worker and of all
together; the others are counted, and the count is logged.
"""

import os
import select
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from musterd.ipc.wire.spoken import unmarked
from musterd.supervisor.log import log
from musterd.supervisor.log.lines import LAST_WORDS_LINES, Lines, Ring, Said, last_words, text_of
from musterd.supervisor.log.token_bucket import Allowance

READ_BYTES = 64 * 1024  # the kernel's size of a pipe
PIPES_PER_TURN = 8
PACE_NS = 10_000_000
# Enough for a worker that logs a line for each task, and for a stack of faulthandler.
LOG_LINES_PER_SECOND = 50
LOG_BURST = 500
LOG_LINES_PER_SECOND_OF_ALL = 500
LOG_BURST_OF_ALL = 2000
NEXT_WORKER = b"--- the next worker ---"


class OutputChunk(Struct, frozen=True):
    """New output of a process; one line of the stream of `tail`."""

    worker: str  # the slot, or the pool of a fork server
    lines: list[str]
    left_out: int = 0  # lines before these that were dropped


class Source:
    """A process with output, and its pipe. Leave the `with` once the process has its end."""

    def __init__(self, name: str, fd: int, write_fd: int, end: Callable[["Source"], None]) -> None:
        self.name = name
        self.fd = fd  # -1 when closed
        self.write_fd = write_fd  # -1 when given away
        self._end = end
        self.lines = Lines()
        self.last: deque[bytes] = deque(maxlen=LAST_WORDS_LINES)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        os.close(self.write_fd)
        self.write_fd = -1
        if kind is not None:  # the process was not started
            self.end()

    def end(self) -> None:
        """Read the last output of a process that is gone."""
        self._end(self)


class Speaker:
    """Everything kept under one name, over all processes of that name."""

    def __init__(self) -> None:
        self.ring = Ring()
        self.source: Source | None = None  # the newest: a successor may start before the end
        self.last_words = ""  # of the process that ended last
        self.logged = Allowance(LOG_LINES_PER_SECOND, LOG_BURST)
        self.left_out = 0  # lines left out of the log and not reported yet


class Outputs:
    def __init__(self) -> None:
        self.publish: Callable[[OutputChunk, float], None] = lambda _chunk, _at: None
        self._pipes = select.epoll()
        self._gate = select.epoll()
        self._gate.register(self._pipes.fileno(), select.EPOLLIN)
        self._open_again_ns: int | None = None
        self._sources: dict[int, Source] = {}
        self._speakers: dict[str, Speaker] = {}
        self._logged = Allowance(LOG_LINES_PER_SECOND_OF_ALL, LOG_BURST_OF_ALL)

    def fileno(self) -> int:
        """Return the descriptor that is readable when serve() has work."""
        return self._gate.fileno()

    # -- the pipes ----------------------------------------------------------------------------

    def open(self, name: str, *, known: bool = True) -> Source:
        """Open a pipe for a new process of this name; if not `known`, introduce() gives the name
        later. OSError if no descriptors are left."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        source = Source(name, read_fd, write_fd, self._end)
        self._speakers.setdefault(name, Speaker())
        if known:
            self.introduce(source, name)
        self._sources[read_fd] = source
        self._pipes.register(read_fd, select.EPOLLIN)
        return source

    def introduce(self, source: Source, name: str) -> None:
        """Give a process its name."""
        source.name = name
        speaker = self._speakers.setdefault(name, Speaker())
        if len(speaker.ring):
            speaker.ring.add(time.time(), [NEXT_WORKER])
        speaker.source = source

    def _end(self, source: Source) -> None:
        if source.fd < 0:
            return
        self._read(source)  # a read takes all that a pipe holds
        if source.fd >= 0:
            self._close(source)

    def _close(self, source: Source) -> None:
        self._pipes.unregister(source.fd)
        del self._sources[source.fd]
        os.close(source.fd)
        source.fd = -1
        self._heard(source, source.lines.finish(), 0)
        self._speakers[source.name].last_words = last_words(source.last)

    def serve(self, now_ns: int) -> None:
        """Read a bounded amount, then ignore the pipes for PACE_NS."""
        for fd, _ in self._pipes.poll(0, PIPES_PER_TURN):
            self._read(self._sources[fd])
        self._gate.modify(self._pipes.fileno(), 0)
        self._open_again_ns = now_ns + PACE_NS

    def next_deadline(self) -> int | None:
        """Return when tick() is due, or None."""
        return self._open_again_ns

    def tick(self, now_ns: int) -> None:
        if self._open_again_ns is not None and now_ns >= self._open_again_ns:
            self._open_again_ns = None
            self._gate.modify(self._pipes.fileno(), select.EPOLLIN)

    def close(self) -> None:
        for source in list(self._sources.values()):
            source.end()
        self._gate.close()
        self._pipes.close()

    # -- output -------------------------------------------------------------------------------

    def _read(self, source: Source) -> None:
        try:
            data = os.read(source.fd, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._heard(source, *source.lines.feed(data))
        else:  # all writers are gone
            self._close(source)

    def _heard(self, source: Source, lines: list[bytes], left_out: int) -> None:
        if not lines:
            return
        at = time.time()
        speaker = self._speakers[source.name]
        spoken = [unmarked(line) for line in lines]
        plain = [each.line for each in spoken]
        speaker.ring.add(at, plain)
        speaker.left_out += left_out
        source.last.extend(plain[-LAST_WORDS_LINES:])
        texts = [text_of(line) for line in plain]
        now_ns = time.monotonic_ns()
        for number, (text, each) in enumerate(zip(texts, spoken, strict=True)):
            if not speaker.logged.take(now_ns) or not self._logged.take(now_ns):
                speaker.left_out += len(texts) - number
                break
            log.say(source.name, text, each.task, each.level)
        self.publish(OutputChunk(source.name, texts, left_out), at)

    # -- for `musterctl tail` and reports -----------------------------------------------------

    def keep_house(self, names: set[str]) -> None:
        """Once a second: tell what the log left out, and forget whom these do not name."""
        open_names = {source.name for source in self._sources.values()}  # also those of spares
        for name, speaker in list(self._speakers.items()):
            if speaker.left_out:
                log.note("worker.flood", "warning", worker=name, count=speaker.left_out)
                speaker.left_out = 0
            if name not in names and name not in open_names:
                del self._speakers[name]

    @property
    def names(self) -> list[str]:
        """The names with output."""
        return [name for name, speaker in self._speakers.items() if len(speaker.ring)]

    def tail(self, name: str, count: int) -> list[Said]:
        """Return the last lines of a name, and the beginning of the next line."""
        speaker = self._speakers.get(name)
        if speaker is None:
            return []
        said = speaker.ring.last(count)
        begun = unmarked(speaker.source.lines.begun) if speaker.source is not None else None
        if begun is not None and begun.line and count:
            said = [*said, Said(time.time(), text_of(begun.line))][-count:]
        return said

    def last_words(self, name: str) -> str:
        """Return the last output of the process of this name that ended last."""
        speaker = self._speakers.get(name)
        return "" if speaker is None else speaker.last_words
