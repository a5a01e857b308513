"""Choose the containment of workers: try each once, all the way, in processes made for the trial.

    pidns    a PID namespace for each worker: the kernel kills the namespace with its init
    cgroup   a control group for each worker, killed as a whole by the worker's init
    reaper   the worker's init is child subreaper and kills its descendants one by one

`auto` is the first that works. Operators are told which were refused and why.
"""

import os
import signal
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from musterd.ipc.errors import SpawnError
from musterd.supervisor.processes import cgroups, marks
from musterd.supervisor.processes.forkserver_messages import ForkServerSetup
from musterd.supervisor.processes.init import CGROUP, PIDNS, REAPER
from musterd.supervisor.system.linux import mount_own_proc, unshare_processes

AUTO = "auto"
CONTAINMENTS = (AUTO, PIDNS, CGROUP, REAPER)
ANSWER_BYTES_MAX = 10_000

NO_NAMESPACES = "PID namespaces are refused here"
NO_GROUPS = "control groups are refused here"


class Choice(NamedTuple):
    mode: str
    why: str  # what the operator should know
    user: bool = False  # whether the mode needs a user namespace


class _Trial(Struct, array_like=True, frozen=True):
    """The result of a trial, sent by the child made for it."""

    refused: str = ""
    note: str = ""


def choose(setup: ForkServerSetup) -> Choice:
    """Choose the mode for this fork server. SpawnError if the configured mode is refused."""
    choice = _first_that_works(setup)
    if setup.mark:
        try:
            marks.put_on(setup.mark)
        except OSError as error:
            unmarked = f"processes that a killed daemon leaves cannot be found: {error}"
            return choice._replace(why="; ".join(filter(None, (choice.why, unmarked))))
    return choice


def _first_that_works(setup: ForkServerSetup) -> Choice:
    refused = []
    if setup.containment in (AUTO, PIDNS):
        # Root may lack the capability in a container, where a user namespace may still be allowed.
        trials = []
        for user in (False, True) if os.geteuid() == 0 else (True,):
            trials.append(_try_namespaces(user))
            if not trials[-1].refused:
                return Choice(PIDNS, trials[-1].note, user)
        refused.append(f"{NO_NAMESPACES}: " + "; ".join(trial.refused for trial in trials))
    if setup.containment in (AUTO, CGROUP):
        trial = _try_group(setup)
        if not trial.refused:
            return Choice(CGROUP, "; ".join(refused))
        refused.append(f"{NO_GROUPS}: {trial.refused}")
    if setup.containment in (AUTO, REAPER):
        return Choice(REAPER, "; ".join(refused))
    allow = {PIDNS: "allow namespaces", CGROUP: "give the daemon a delegated group"}
    raise SpawnError(
        f"containment = {setup.containment!r} does not work: {refused[0]}: "
        f"{allow[setup.containment]}, or set containment to {AUTO!r} or {REAPER!r}"
    )


def _try_namespaces(user: bool) -> _Trial:
    """Go all the way of a worker once, in processes made for the trial."""
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
    trial = _answer(read_fd)
    os.waitpid(child, 0)
    return trial


def _try_proc() -> _Trial:
    try:
        mount_own_proc()
    except OSError as error:
        return _Trial(note=f"workers see the /proc of the host: {error}")
    return _Trial()


def _try_group(setup: ForkServerSetup) -> _Trial:
    """Make a group, let a process enter it and kill the process by its group."""
    if not setup.group:
        return _Trial(refused=setup.group_refused)
    parent = Path(setup.group)
    group = parent / f"trial-{os.getpid()}"
    try:
        parent.mkdir(exist_ok=True)  # the spawner removes it at its end
        group.mkdir()
    except OSError as error:
        return _Trial(refused=str(error))
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            cgroups.enter(group)
            os.write(write_fd, msgspec.msgpack.encode(_Trial()))
            while True:
                signal.pause()
        except OSError as error:
            os.write(write_fd, msgspec.msgpack.encode(_Trial(refused=str(error))))
        finally:
            os._exit(0)
    os.close(write_fd)
    trial = _answer(read_fd)
    if not trial.refused and not cgroups.clear(group):
        trial = _Trial(refused=f"{group}: its processes cannot be killed, or it cannot be removed")
    os.kill(child, signal.SIGKILL)  # dead or not, the pid is not reused before waitpid()
    os.waitpid(child, 0)
    cgroups.remove(group)
    return trial


def _answer(read_fd: int) -> _Trial:
    answer = os.read(read_fd, ANSWER_BYTES_MAX)
    os.close(read_fd)
    if not answer:
        return _Trial(refused="the trial ended without an answer")
    return msgspec.msgpack.decode(answer, type=_Trial)
