"""Artefacts: files that an attempt leaves behind, such as a picture of its page.

    FOLDER/DIGEST.ATTEMPT.TIME.BYTES.TOKEN/screenshot.png

A worker writes the files of an attempt into a directory inside its own temporary directory, which
goes with the worker, and renames that directory into FOLDER when the attempt has failed. So an
entry is whole or not there, whoever is killed. Everything that a limit needs is in the entry's
name: one look at FOLDER says what has to go. Whoever adds an entry trims; the supervisor does so at
its start and once a minute.

An attempt that succeeds leaves only ATTACHED, where its schedule asks for a picture. The entry is
there before the supervisor hears of the result, which may be a change; the supervisor removes the
picture of a result that is none.
"""

import os
import re
import secrets
import shutil
import stat
from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from msgspec import Struct

FOLDER = "artefacts"  # in the supervisor's state_dir
ATTACHED = "attached.png"  # goes with the alert about a change
ATTACHED_BYTES_MAX = 4 * 1024 * 1024  # services take 8 MiB and more, also in base64
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
FILES_MAX = 16  # of one attempt
FILE_BYTES_MAX = 16 * 1024 * 1024
ATTEMPT_BYTES_MAX = 32 * 1024 * 1024
BLOCK_BYTES = 4096  # what a file takes on a disk is a multiple of this
TOKEN_BYTES = 4
FUTURE_NS = 60 * 10**9  # an entry so far ahead is from a time when the clock was wrong
PNG_END = b"IEND\xaeB`\x82"  # the last bytes of a PNG: a power failure may have cut it short
_ENTRY = re.compile(r"([0-9a-f]{32})\.(\d{1,10})\.(\d{1,20})\.(\d{1,12})\.([0-9a-f]{8})")


class Keep(Struct, array_like=True, frozen=True):
    """Where artefacts are kept, and how many."""

    folder: str
    count: int  # attempts that have some
    bytes: int
    age_ns: int


class Entry(Struct, frozen=True):
    """The artefacts of one attempt."""

    path: str
    digest: str  # of the task's id, which may have any characters
    attempt: int
    wall_ns: int
    bytes: int
    token: str


class Artefact(Struct, frozen=True):
    """One file; `name` is unique among those of its task."""

    name: str
    attempt: int
    wall_ns: int
    bytes: int
    path: str


def disk_bytes(size: int) -> int:
    """Return what a file of this size takes on a disk."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def publish(keep: Keep, task_id: str, attempt: int, staged: Path, now_ns: int) -> None:
    """Make a directory of files the artefacts of a failed attempt, and trim; OSError if it cannot
    be renamed."""
    size = sum(disk_bytes(each.stat().st_size) for each in staged.iterdir())
    token = secrets.token_hex(TOKEN_BYTES)
    name = f"{_digest(task_id)}.{attempt}.{now_ns}.{size}.{token}"
    staged.rename(Path(keep.folder, name))
    trim(keep, now_ns)


def trim(keep: Keep, now_ns: int) -> int:
    """Remove the oldest entries beyond a limit; return how many. Others may do so meanwhile.

    Entries of the future are the first to go: else new ones would, until their time has come.
    """
    found = [
        (each.wall_ns <= now_ns + FUTURE_NS, each.wall_ns, each) for each in entries(keep.folder)
    ]
    found.sort(key=lambda each: each[:2], reverse=True)
    total, removed = 0, 0
    for number, (_, wall_ns, each) in enumerate(found, 1):
        too_old = now_ns - wall_ns > keep.age_ns
        if number > keep.count or total + each.bytes > keep.bytes or too_old:
            _remove(each)
            removed += 1
        else:
            total += each.bytes
    return removed


def remove(folder: str, task_ids: list[str]) -> None:
    """Remove all artefacts of these tasks."""
    digests = {_digest(each) for each in task_ids}
    for each in entries(folder):
        if each.digest in digests:
            _remove(each)


def remove_attached(folder: str, task_id: str) -> None:
    """Remove the pictures that would go with an alert about this task."""
    for each in _of(folder, task_id):
        if os.path.lexists(os.path.join(each.path, ATTACHED)):
            _remove(each)


def remove_before(folder: str, wall_ns: int) -> None:
    """Remove all artefacts that are older than this time of day."""
    for each in entries(folder):
        if each.wall_ns < wall_ns:
            _remove(each)


def entries(folder: str) -> list[Entry]:
    """Return what is kept; nothing where there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        if parts := _ENTRY.fullmatch(name):
            digest, attempt, wall_ns, size, token = parts.groups()
            path = os.path.join(folder, name)
            found.append(Entry(path, digest, int(attempt), int(wall_ns), int(size), token))
    return found


def artefacts_of(folder: str, task_id: str) -> list[Artefact]:
    """Return the files of a task's attempts, the oldest attempt first."""
    own = _of(folder, task_id)
    # A task that was run again by hand counts its attempts from 1 again.
    times = Counter(each.attempt for each in own)
    found = []
    for each in own:
        prefix = f"attempt-{each.attempt}."
        if times[each.attempt] > 1:
            prefix += f"{each.token}."
        with suppress(OSError):  # trimmed meanwhile
            for file in sorted(os.scandir(each.path), key=lambda entry: entry.name):
                if FILE_NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                    size = file.stat(follow_symlinks=False).st_size
                    name = prefix + file.name
                    found.append(Artefact(name, each.attempt, each.wall_ns, size, file.path))
    return found


def attached_of(folder: str, task_id: str) -> tuple[str, bytes] | None:
    """Return path and content of the newest picture for the alert about this task; None if there
    is none, or none that can be sent."""
    try:
        own = artefacts_of(folder, task_id)
        found = [each for each in own if os.path.basename(each.path) == ATTACHED]
        if not found:
            return None
        picture = read(found[-1], 0, ATTACHED_BYTES_MAX + 1)
    except OSError:  # trimmed meanwhile
        return None
    whole = len(picture) <= ATTACHED_BYTES_MAX and picture.endswith(PNG_END)
    return (found[-1].path, picture) if whole else None


def read(artefact: Artefact, offset: int, size: int) -> bytes:
    """Return a part of a file; OSError if it is gone, or no file of ours."""
    descriptor = os.open(artefact.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{artefact.path} is no file")
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)


def _of(folder: str, task_id: str) -> list[Entry]:
    """Return the entries of a task, the oldest first."""
    digest = _digest(task_id)
    own = [each for each in entries(folder) if each.digest == digest]
    return sorted(own, key=lambda each: (each.wall_ns, each.token))


def _digest(task_id: str) -> str:
    return blake2b(task_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _remove(entry: Entry) -> None:
    if os.path.islink(entry.path) or os.path.isfile(entry.path):  # not of our making
        with suppress(OSError):
            os.unlink(entry.path)
    else:
        shutil.rmtree(entry.path, ignore_errors=True)
