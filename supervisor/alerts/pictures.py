"""Pictures that go with a message: those that the runs of its changes have left.

Runs in the courier. A picture may be gone, because too many artefacts came after it, and a service
may refuse it: the message is then sent without.
"""

import re

from msgspec import Struct

from musterd.ipc.wire.artefacts import attached_of
from musterd.supervisor.alerts.rules import Message

PICTURES_MAX = 10  # of one message: Discord takes no more
PICTURES_BYTES_MAX = 8 * 1024 * 1024  # of one message: many services take 10 MiB, mail in base64
NAME_CHARS_MAX = 80


class Picture(Struct, frozen=True):
    task: str
    name: str  # of the file, as the service shows it
    path: str
    data: bytes


def pictures_of(folder: str, message: Message) -> list[Picture]:
    """Return the pictures of a message's changes, as many as a message may have."""
    found: list[Picture] = []
    left = PICTURES_BYTES_MAX
    for change in message.changes if folder else ():
        if len(found) == PICTURES_MAX:
            break
        kept = attached_of(folder, change.task) if change.task else None
        if kept is not None and len(kept[1]) <= left:
            left -= len(kept[1])
            plain = re.sub(r"[^\w.-]", "_", change.schedule)[:NAME_CHARS_MAX]
            found.append(Picture(change.task, f"{plain}-{change.number}.png", *kept))
    return found
