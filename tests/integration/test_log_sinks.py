"""A log that nobody reads holds up nothing in a real daemon."""

import fcntl
import os
from collections.abc import Iterator

import pytest

from musterd import TaskFailed

PIPE_BYTES = 4096
TASKS = 300


@pytest.fixture
def full_pipe(jobs) -> Iterator[tuple]:
    """Make a daemon whose standard error is a small pipe that nobody reads."""
    daemon = jobs(start=False)
    fifo = daemon.folder / "stderr"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    daemon._launcher = ["sh", "-c", f'exec "$@" 2>{fifo}', "sh"]
    daemon.start()
    yield daemon, reader
    os.close(reader)


def fail_many(daemon) -> None:
    """Run tasks that fail; each one causes a log line."""
    with daemon.client() as client:
        handles = [client.submit("jobs.fail", {"text": "x" * 50}) for _ in range(TASKS)]
        for handle in handles:
            with pytest.raises(TaskFailed):
                handle.result(30)


def read_until(reader: int, text: bytes, waiting) -> bytes:
    found = bytearray()

    def has_text() -> bool:
        try:
            found.extend(os.read(reader, 65536))
        except BlockingIOError:
            return False
        return text in found

    waiting(f"{text!r} is in the log", has_text)
    return bytes(found)


def test_a_pipe_that_nobody_reads_holds_up_no_task_and_loses_no_line_it_has_room_for(
    full_pipe, waiting
):
    daemon, reader = full_pipe
    fail_many(daemon)
    assert daemon.ctl("status").returncode == 0
    log = read_until(reader, b"event=task.failed", waiting)
    assert b"musterd is starting" in log  # everything since the start had waited for a reader


def test_a_daemon_whose_log_nobody_takes_ends_all_the_same(full_pipe):
    daemon, _reader = full_pipe
    fail_many(daemon)
    assert daemon.stop() == 0
