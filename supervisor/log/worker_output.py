"""What workers write to standard output and standard error: into the log, and kept for `tail`.

Each worker gets one pipe for both, so that their order is kept; a fork server gets one too, under
the name of its pool. The other end is read here, in the loop, whether anybody looks or not: a
worker is never held up because nobody reads.

Nor can one that floods hold up the loop. The pipes are behind two epolls, one in the other. After
each turn the outer one looks away for PACE_NS, and a turn reads at most PIPES_PER_TURN portions.
So the loop is woken at most a hundred times a second, and whoever writes faster than that waits in
write() for a moment. The log takes so many lines a second of one worker and of all of them; the
others are counted, and the count is logged.
"""

import os
import select
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from musterd.supervisor.log import log
from musterd.supervisor.log.lines import LAST_WORDS_LINES, Lines, Ring, Said, last_words, text_of
from musterd.supervisor.log.token_bucket import Allowance

READ_BYTES = 64 * 1024  # a whole pipe, as the kernel makes it
PIPES_PER_TURN = 8
PACE_NS = 10_000_000
# A worker that logs a line for each of its tasks is well within; a stack of faulthandler is too.
LOG_LINES_PER_SECOND = 50
LOG_BURST = 500
LOG_LINES_PER_SECOND_OF_ALL = 500
LOG_BURST_OF_ALL = 2000
NEXT_WORKER = b"--- the next worker ---"


class OutputChunk(Struct, frozen=True):
    """What a process said just now; one line of the stream of `tail`."""

    worker: str  # its slot, or of a fork server its pool
    lines: list[str]
    left_out: int = 0  # lines before these that nobody keeps


class Source:
    """A process that says something, and its pipe. To be left (`with`) when it has got its end."""

    def __init__(self, name: str, fd: int, write_fd: int, end: Callable[["Source"], None]) -> None:
        self.name = name
        self.fd = fd  # -1 once it is closed
        self.write_fd = write_fd  # -1 once it was given away
        self._end = end
        self.lines = Lines()
        self.last: deque[bytes] = deque(maxlen=LAST_WORDS_LINES)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        os.close(self.write_fd)
        self.write_fd = -1
        if kind is not None:  # the process was not made
            self.end()

    def end(self) -> None:
        """The process is gone: what it has said to the end is taken in."""
        self._end(self)


class Speaker:
    """All that is kept under one name, whoever bears it now."""

    def __init__(self) -> None:
        self.ring = Ring()
        self.source: Source | None = None  # the newest: a successor may be there before the end
        self.last_words = ""  # of the one that ended last
        self.logged = Allowance(LOG_LINES_PER_SECOND, LOG_BURST)
        self.left_out = 0  # of the log, and nobody was told yet


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
        """Readable when serve() has something to do."""
        return self._gate.fileno()

    # -- the pipes ----------------------------------------------------------------------------

    def open(self, name: str, *, known: bool = True) -> Source:
        """A pipe for a new process of this name, or of one that is introduced later and till then
        is heard under this name. OSError if there are no descriptors left."""
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
        """This process bears that name from now on."""
        source.name = name
        speaker = self._speakers.setdefault(name, Speaker())
        if len(speaker.ring):
            speaker.ring.add(time.time(), [NEXT_WORKER])
        speaker.source = source

    def _end(self, source: Source) -> None:
        if source.fd < 0:
            return
        self._read(source)  # as much as a pipe holds, so all of it
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
        """Reads what is there, in bounded amounts, and then looks away for a while."""
        for fd, _ in self._pipes.poll(0, PIPES_PER_TURN):
            self._read(self._sources[fd])
        self._gate.modify(self._pipes.fileno(), 0)
        self._open_again_ns = now_ns + PACE_NS

    def next_deadline(self) -> int | None:
        """When tick() is due, or None."""
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

    # -- what is said -------------------------------------------------------------------------

    def _read(self, source: Source) -> None:
        try:
            data = os.read(source.fd, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._heard(source, *source.lines.feed(data))
        else:  # everybody who could write is gone
            self._close(source)

    def _heard(self, source: Source, lines: list[bytes], left_out: int) -> None:
        if not lines:
            return
        at = time.time()
        speaker = self._speakers[source.name]
        speaker.ring.add(at, lines)
        speaker.left_out += left_out
        source.last.extend(lines[-LAST_WORDS_LINES:])
        texts = [text_of(line) for line in lines]
        now_ns = time.monotonic_ns()
        for number, text in enumerate(texts):
            if not speaker.logged.take(now_ns) or not self._logged.take(now_ns):
                speaker.left_out += len(texts) - number
                break
            log.say(source.name, text)
        self.publish(OutputChunk(source.name, texts, left_out), at)

    # -- for whoever looks --------------------------------------------------------------------

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
        """Who has said something."""
        return [name for name, speaker in self._speakers.items() if len(speaker.ring)]

    def tail(self, name: str, count: int) -> list[Said]:
        """Its last lines, and what it has said of the next one."""
        speaker = self._speakers.get(name)
        if speaker is None:
            return []
        said = speaker.ring.last(count)
        begun = speaker.source.lines.begun if speaker.source is not None else b""
        if begun and count:
            said = [*said, Said(time.time(), text_of(begun))][-count:]
        return said

    def last_words(self, name: str) -> str:
        """What the process of this name that ended last had said at its end."""
        speaker = self._speakers.get(name)
        return "" if speaker is None else speaker.last_words
