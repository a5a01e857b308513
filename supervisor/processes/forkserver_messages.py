"""What supervisor and fork server say to each other; see forkserver.py for the order of it."""

import socket
import struct
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from musterd.ipc.wire.messages import Number, TaskDeclaration, Word

RUNTIME = (
    "musterd.workers.runtime.run"  # loaded by name: supervisor and workers never import another
)
MESSAGE_BYTES_MAX = 200_000  # what a Unix socket takes with the kernel's default buffer
# Of what a fork server says: the message as a whole is bounded, these only keep numbers in their
# range.
LIST_MAX = 10_000  # tasks of a worker class, or threads that its import has started
Reason = Annotated[str, Meta(max_length=MESSAGE_BYTES_MAX)]
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class WorkerSettings(Struct, array_like=True, frozen=True):
    """How a worker of the pool works: how much at once, and what it does while it is idle."""

    health_seconds: float = 60.0  # from one question to its healthy() to the next; 0: never
    beat_seconds: float = 2.0  # from one sign of life to the next
    concurrency: int = 1  # tasks it runs at once
    threads: dict[str, int] = {}  # of its executors, by name; those not named: as they are
    cache_seconds: float = 0.0  # of its cached functions that say no ttl; 0: as they are
    cache_entries: int = 0


class ForkServerSetup(Struct, array_like=True, tag="setup", frozen=True):
    pool: str
    worker: str  # dotted name, "package.module:Class"
    options: bytes
    socket: str  # workers.sock
    containment: str  # AUTO, PIDNS, CGROUP or REAPER
    worker_settings: WorkerSettings = WorkerSettings()
    runtime: str = RUNTIME
    mark: int = 0  # of the fork server and what the import starts (marks.py); 0 for none
    group: str = ""  # where the control groups of workers may be made; "" for nowhere
    group_refused: str = ""  # why nowhere
    open_files: int = 0  # the soft limit to set; 0 for none


class ForkRequest(Struct, array_like=True, tag="fork", frozen=True):
    launch: int  # names the process until it is called
    mark: int = 0
    group: str = ""  # its control group, which is there already; "" for none


class Call(Struct, array_like=True, frozen=True):
    """Tells a process that waits for it which worker it is."""

    index: int
    token: str
    temp_dir: str


class ForkServerUp(Struct, array_like=True, tag="up", frozen=True):
    declarations: Annotated[tuple[TaskDeclaration, ...], Meta(max_length=LIST_MAX)]
    containment: Word  # what is in force: PIDNS, CGROUP or REAPER
    why: Reason = ""  # what was refused, if anything
    threads: Annotated[
        tuple[Reason, ...], Meta(max_length=LIST_MAX)
    ] = ()  # started by the import: each worker imports for itself


class ForkServerDown(Struct, array_like=True, tag="down", frozen=True):
    reason: Reason


class Forked(Struct, array_like=True, tag="forked", frozen=True):
    launch: Number
    init_pid: Annotated[int, Meta(ge=1, le=2**22)]  # as the kernel numbers them


class ForkFailed(Struct, array_like=True, tag="failed", frozen=True):
    launch: Number
    reason: Reason


class WorkerPid(Struct, array_like=True, tag="pid", frozen=True):
    launch: Number


ForkServerMessage = ForkServerUp | ForkServerDown | Forked | ForkFailed | WorkerPid

encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(ForkServerSetup).decode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_request = msgspec.msgpack.Decoder(ForkRequest).decode
_decode = msgspec.msgpack.Decoder(ForkServerMessage).decode


def receive(channel: socket.socket) -> tuple[ForkServerMessage, int] | None:
    """A message and the pid of its sender, None when all other ends are closed.

    BlockingIOError if there is none, msgspec.DecodeError if it is malformed.
    """
    try:
        frame, ancillary, _, _ = channel.recvmsg(
            MESSAGE_BYTES_MAX, socket.CMSG_SPACE(_CREDENTIALS.size)
        )
    except ConnectionResetError:
        return None
    if not frame:
        return None
    return _decode(frame), _CREDENTIALS.unpack(ancillary[0][2])[0]
