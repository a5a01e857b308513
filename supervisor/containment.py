"""Which containment works here: tried once, the whole way, in processes made for it.

    pidns    a PID namespace for each worker: the kernel kills what is in it with its init
    reaper   the worker's init is child subreaper and kills its descendants one by one

`auto` is the first of them that is not refused. What was refused and why is told to people.
"""

import os

import msgspec
from msgspec import Struct

from musterd.ipc.errors import SpawnError
from musterd.supervisor.init import PIDNS, REAPER
from musterd.supervisor.linux import mount_own_proc, unshare_processes

AUTO = "auto"
CONTAINMENTS = (AUTO, PIDNS, REAPER)
ANSWER_BYTES_MAX = 10_000


class _Trial(Struct, array_like=True, frozen=True):
    """What came of entering namespaces once, in a child made for it."""

    refused: str = ""
    note: str = ""


def choose(wanted: str) -> tuple[str, str, bool]:
    """The mode in force, what the operator should know about it, and whether it needs a user
    namespace. SpawnError if what is wanted is refused."""
    if wanted == REAPER:
        return REAPER, "", False
    # Root may lack the capability in a container, where a user namespace can still be allowed.
    trials = []
    for user in (False, True) if os.geteuid() == 0 else (True,):
        trials.append(_try_namespaces(user))
        if not trials[-1].refused:
            return PIDNS, trials[-1].note, user
    refused = "; ".join(trial.refused for trial in trials)
    if wanted == PIDNS:
        raise SpawnError(
            f"containment = {PIDNS!r} is refused here ({refused}): "
            f"allow namespaces, or set containment to {AUTO!r} or {REAPER!r}"
        )
    return REAPER, f"PID namespaces are refused here: {refused}", False


def _try_namespaces(user: bool) -> _Trial:
    """Goes the whole way of a worker once, in processes made for it."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            unshare_processes(user=user)
            init_pid = os.fork()
            if init_pid:
                os.waitpid(init_pid, 0)
            else:
                os.write(write_fd, msgspec.msgpack.encode(_try_proc()))
        except OSError as error:
            os.write(write_fd, msgspec.msgpack.encode(_Trial(refused=str(error))))
        finally:
            os._exit(0)
    os.close(write_fd)
    answer = os.read(read_fd, ANSWER_BYTES_MAX)
    os.close(read_fd)
    os.waitpid(child, 0)
    if not answer:
        return _Trial(refused="the trial ended without an answer")
    return msgspec.msgpack.decode(answer, type=_Trial)


def _try_proc() -> _Trial:
    try:
        mount_own_proc()
    except OSError as error:
        return _Trial(note=f"workers see the /proc of the host: {error}")
    return _Trial()
