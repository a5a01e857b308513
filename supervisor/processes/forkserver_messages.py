"""The messages between supervisor and fork server; forkserver.py has their order."""

import socket
import struct
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from musterd.ipc.user_code import Source
from musterd.ipc.wire.messages import Number, TaskDeclaration, Word

# Loaded by name: supervisor and workers never import each other.
RUNTIME = "musterd.workers.runtime.run"
MESSAGE_BYTES_MAX = 200_000  # what a Unix socket takes with the kernel's default buffer
# A fork server's message is bounded as a whole; these limits only keep numbers in their range.
LIST_MAX = 10_000  # tasks of a worker class, or threads that its import has started
Reason = Annotated[str, Meta(max_length=MESSAGE_BYTES_MAX)]
Sources = Annotated[tuple[Source, ...], Meta(max_length=LIST_MAX)]
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class WorkerSettings(Struct, array_like=True, frozen=True):
    """Settings of the workers of a pool."""

    health_seconds: float = 60.0  # between two calls of healthy(); 0: never
    beat_seconds: float = 2.0  # between two heartbeats
    concurrency: int = 1  # tasks that a worker runs at once
    threads: dict[str, int] = {}  # of executors, by name; others keep their default
    cache_seconds: float = 0.0  # of cached functions without a ttl; 0: their default
    cache_entries: int = 0
    sessions: bytes = b""  # ipc/secrets/sessions.py: with a key, so it is in no environment
    artefacts: bytes = b""  # ipc/wire/artefacts.py: Keep; empty: none are kept


class ForkServerSetup(Struct, array_like=True, tag="setup", frozen=True):
    pool: str
    worker: str  # dotted name, "package.module:Class"
    options: bytes
    socket: str  # workers.sock
    containment: str  # AUTO, PIDNS, CGROUP or REAPER
    worker_settings: WorkerSettings = WorkerSettings()
    runtime: str = RUNTIME
    mark: int = 0  # of the fork server and processes that the import starts (marks.py); 0: none
    group: str = ""  # where control groups of workers may be made; "" for nowhere
    group_refused: str = ""  # why nowhere
    open_files: int = 0  # the soft limit to set; 0 for none


class ForkRequest(Struct, array_like=True, tag="fork", frozen=True):
    launch: int  # the number of the process until it is called
    mark: int = 0
    group: str = ""  # its control group, which exists already; "" for none


class Call(Struct, array_like=True, frozen=True):
    """Tells a waiting process which worker it is."""

    index: int
    token: str
    temp_dir: str


class ForkServerUp(Struct, array_like=True, tag="up", frozen=True):
    declarations: Annotated[tuple[TaskDeclaration, ...], Meta(max_length=LIST_MAX)]
    containment: Word  # the mode chosen: PIDNS, CGROUP or REAPER
    why: Reason = ""  # what was refused, if anything
    # Started by the import: each worker imports for itself.
    threads: Annotated[tuple[Reason, ...], Meta(max_length=LIST_MAX)] = ()
    sources: Sources = ()  # what it has imported


class ForkServerDown(Struct, array_like=True, tag="down", frozen=True):
    reason: Reason
    sources: Sources = ()  # up to the one that failed


class Forked(Struct, array_like=True, tag="forked", frozen=True):
    launch: Number
    init_pid: Annotated[int, Meta(ge=1, le=2**22)]  # the range of the kernel


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
    """Receive a message and the pid of its sender; None when all other ends are closed.

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
