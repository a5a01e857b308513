"""Format log records: a line for people, a line of JSON, or an entry of the journal.

The format and the destination are chosen once, at the start:

    log_file given            into that file, as lines or as JSON
    log_format = "json"       standard error, as JSON
    under systemd             the journal, with fields (through systemd-python, if installed)
    else                      standard error, as lines; coloured on a terminal
"""

import logging
import os
import select
import socket
import stat
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import Any

import msgspec

from musterd.supervisor.log.message_ids import MESSAGE_IDS
from musterd.supervisor.log.writer import Target
from musterd.supervisor.text.printable import printable, printable_json

AUTO, LINES, JSON = "auto", "lines", "json"  # supervisor.log_format

LAYOUT = "\n\t"  # control characters kept in a text of several lines

FILE_BYTES_MAX = 10 * 1024 * 1024
FILES_KEPT = 5
LINES_AT_ONCE = 200
STANDARD_ERROR = 2
JOURNAL_SOCKET = "/run/systemd/journal/socket"
JOURNAL_RETRY_SECONDS = 0.05  # while journald takes nothing

_COLOURS = {
    "DEBUG": "\033[2m",
    "WARNING": "\033[33m",
    "ERROR": "\033[31m",
    "CRITICAL": "\033[31;1m",
}
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3}


# -- formats ----------------------------------------------------------------------------------


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, "fields", {})
    return found


def _traceback(record: logging.LogRecord) -> str:
    """Return the traceback that follows the line: of our own error, or of a worker's."""
    return str(record.exc_text or getattr(record, "traceback", ""))


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and " " not in text and text.isprintable() else repr(text)


def _told(record: logging.LogRecord, *, without: tuple[str, ...] = ()) -> str:
    """Return the message and its fields."""
    words = [printable(record.getMessage(), keep="\t")]
    words += [f"{k.lower()}={_quoted(v)}" for k, v in _fields(record).items() if k not in without]
    line = " ".join(words)
    trace = _traceback(record)
    return f"{line}\n{printable(trace, keep=LAYOUT)}" if trace else line


class LineFormatter(logging.Formatter):
    """`12:01:02 warning worker crashed event=worker.crashed worker=parser/0 reason=...`"""

    def __init__(self, *, colour: bool, date: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, self.datefmt)} {record.levelname.lower()} {_told(record)}"
        colour = _COLOURS.get(record.levelname) if self._colour else None
        return f"{colour}{line}\033[0m" if colour else line


class JsonFormatter(logging.Formatter):
    """One object per line: `at`, `level`, `message`, then the fields by their names."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, Any] = {
            "at": at,
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        for key, value in _fields(record).items():
            told[key.lower()] = value if isinstance(value, (str, int, float)) else str(value)
        if trace := _traceback(record):
            told["traceback"] = trace
        return printable_json(msgspec.json.encode(told).decode(), keep="")


class PrefixFormatter(logging.Formatter):
    """Lines for a standard error that goes to the journal: systemd's level prefix, no time."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_PRIORITIES.get(record.levelname, 2)}>"
        return "\n".join(prefix + line for line in _told(record).split("\n"))


def journal_text(record: logging.LogRecord) -> str:
    """Return the text for `journalctl`, which has time, level and event elsewhere."""
    fields = _fields(record)
    if fields.get("EVENT") == "worker.output":
        said = printable(record.getMessage(), keep="\t")
        return f"{fields.get('WORKER') or fields['POOL']}: {said}"
    return _told(record, without=("EVENT",))


# -- destinations -----------------------------------------------------------------------------


class StandardError(logging.Handler):
    """Writes past sys.stderr: a thread stuck in a write would hold its lock at the end."""

    lines_at_once = LINES_AT_ONCE

    def take(self, records: list[logging.LogRecord]) -> None:
        text = "".join([f"{self.format(record)}\n" for record in records])
        left = text.encode(errors="backslashreplace")
        while left:
            try:
                left = left[os.write(STANDARD_ERROR, left) :]
            except BlockingIOError:  # another process that shares it made it non-blocking
                select.select([], [STANDARD_ERROR], [])


class LogFile(RotatingFileHandler):
    def __init__(self, path: str) -> None:
        super().__init__(path, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT, encoding="utf-8")

    lines_at_once = LINES_AT_ONCE

    def take(self, records: list[logging.LogRecord]) -> None:
        text = "".join([f"{self.format(record)}\n" for record in records])
        if self.stream is None:  # closed by a rotation that failed
            self.stream = self._open()
        if self.stream.tell() + len(text) >= FILE_BYTES_MAX:
            self.doRollover()
        self.stream.write(text)
        self.stream.flush()


class Journal(logging.Handler):
    """Writes to journald, through systemd-python.

    Its send() holds the interpreter lock while it waits for journald: a stopped journald would stop
    all our threads. Hence send() must not wait: the socket that libsystemd makes with the first
    line becomes non-blocking, and this handler waits instead.
    """

    lines_at_once = 1

    def __init__(self) -> None:
        super().__init__()
        from systemd import journal  # type: ignore[attr-defined,unused-ignore]

        self._send = journal.send
        self._first = True

    def take(self, records: list[logging.LogRecord]) -> None:
        for record in records:
            self._take(record)

    def _take(self, record: logging.LogRecord) -> None:
        fields = {
            f"MUSTERD_{key}": printable(str(value), keep=LAYOUT)
            for key, value in _fields(record).items()
        }
        message_id = MESSAGE_IDS.get(_fields(record).get("EVENT", ""))
        if message_id is not None:
            fields["MESSAGE_ID"] = message_id
        before: set[int] = set()
        if self._first:
            _wait_for_journald()
            before = _datagram_sockets()
        while True:
            try:
                self._send(
                    journal_text(record),
                    PRIORITY=_PRIORITIES.get(record.levelname, 2),
                    SYSLOG_IDENTIFIER="musterd",
                    **fields,
                )
                break
            except BlockingIOError:
                time.sleep(JOURNAL_RETRY_SECONDS)
        if self._first:
            self._first = False
            for fd in _datagram_sockets() - before:
                os.set_blocking(fd, False)


def _wait_for_journald() -> None:
    """Wait until journald would take a line, without the interpreter lock."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(JOURNAL_SOCKET)
        except OSError:  # no journald: send() will not wait for it either
            return
        select.select([], [probe], [])


def _datagram_sockets() -> set[int]:
    """Return our Unix datagram sockets: libsystemd makes one."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if (each.family, each.type) == (socket.AF_UNIX, socket.SOCK_DGRAM):
                    found.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return found


def goes_to_journal(environ: Mapping[str, str]) -> bool:
    """Tell whether our standard error is the stream that systemd made for us; the variable alone is
    inherited by programs that a service starts in a terminal."""
    try:
        found = os.fstat(STANDARD_ERROR)
    except OSError:  # closed
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def coloured(environ: Mapping[str, str]) -> bool:
    try:
        terminal = os.isatty(STANDARD_ERROR)
    except OSError:
        return False
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def target(log_format: str, log_file: str, environ: Mapping[str, str]) -> Target:
    """Return the destination of the log, with its format."""
    if log_file:
        file = LogFile(log_file)
        as_json = log_format == JSON
        file.setFormatter(JsonFormatter() if as_json else LineFormatter(colour=False, date=True))
        return file
    in_journal = goes_to_journal(environ)
    if log_format == AUTO and in_journal:
        try:
            return Journal()
        except ImportError:  # musterd[systemd] was not installed
            pass
    handler = StandardError()
    if log_format == JSON:
        handler.setFormatter(JsonFormatter())
    elif in_journal:
        handler.setFormatter(PrefixFormatter())
    else:
        handler.setFormatter(LineFormatter(colour=coloured(environ), date=False))
    return handler
