"""musterctl task ID --save DIR: write the artefacts of a failed task as files."""

import os
import re
from contextlib import suppress
from pathlib import Path

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import ArtefactPart, ArtefactStatus
from musterd.supervisor.ctl.app import Settings, connect

# The daemon's answer names files here: nothing that leads out of the directory.
_NAME = re.compile(r"attempt-[a-z0-9._-]{1,90}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotSaved(MusterdError):
    """Artefacts cannot be written here."""


def save(settings: Settings, task_id: str, found: list[ArtefactStatus], folder: str) -> list[str]:
    """Write each artefact into the folder, which is made if it is missing; return their paths.

    Nothing that is there is overwritten, and no link is followed. NotSaved says why not.
    """
    directory = _open(folder)
    try:
        _check(found, directory, folder)
        with connect(settings, waits=True) as connection:
            for each in found:
                with os.fdopen(os.open(each.name, _NEW_FILE, 0o600, dir_fd=directory), "wb") as out:
                    try:
                        offset, size = 0, rpc.ARTEFACT_PART_BYTES
                        while size == rpc.ARTEFACT_PART_BYTES:
                            asked = rpc.ReadArtefact(id=task_id, name=each.name, offset=offset)
                            data = connection.get(asked, ArtefactPart).data
                            out.write(data)
                            size = len(data)
                            offset += size
                        out.flush()
                    except BaseException:  # also Ctrl-C: half a picture helps nobody
                        with suppress(OSError):
                            os.unlink(each.name, dir_fd=directory)
                        raise
    except OSError as error:
        raise NotSaved(f"cannot write to {folder}: {error.strerror}") from error
    finally:
        os.close(directory)
    return [str(Path(folder, each.name)) for each in found]


def _open(folder: str) -> int:
    try:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        return os.open(folder, _DIRECTORY)
    except OSError as error:
        raise NotSaved(
            f"--save {folder}: {error.strerror}: give a directory that you may write, and no link "
            "to one"
        ) from error


def _check(found: list[ArtefactStatus], directory: int, folder: str) -> None:
    """Raise NotSaved before anything is written, where not all can be."""
    there = set(os.listdir(directory))
    for each in found:
        if not _NAME.fullmatch(each.name):
            raise NotSaved(
                f"the daemon names an artefact {each.name!r}, which is no name of a file"
            )
        if each.name in there:
            raise NotSaved(
                f"{Path(folder, each.name)} exists already, and nothing is overwritten: give "
                "another directory"
            )
