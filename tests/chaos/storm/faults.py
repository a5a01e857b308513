"""Faults of the machine and of its operators, in addition to the kills of the monkey."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random

import msgspec

from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import RpcError
from musterd.supervisor.ctl.connection import Connection, NoAnswer, Unreachable
from storm.disk import Disk
from storm.monkey import SUPERVISOR, Monkey, send, title_of
from storm.shim import Shim
from support.daemon import Muster

ASK_SECONDS = 30.0
CROWD_SECONDS_MAX = 3.0
TIGHT = {"warning": "1%", "critical": "2%", "margin": "0.5%"}
TIGHT_SECONDS_MAX = 1.5
LIMITER = """
import resource, sys
pid, which, soft = map(int, sys.argv[1:])
before, hard = resource.getrlimit(which)
try:
    before, hard = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (soft, hard))
except ProcessLookupError:
    pass
print(before)
"""
FORKLESS_SECONDS_MAX = 0.5
FULL_SECONDS_MAX = 1.0
HANGING_SECONDS_MAX = 0.5  # that the disk hangs
SLOW_SECONDS_MAX = 2.0
SYNC_SECONDS_MAX = 0.3  # that each fsync takes while the disk is slow
CLOCK_SECONDS_MAX = 6 * 3600.0  # a step of the wall clock in either direction
PAUSED_SECONDS_MAX = 0.3
SCALE_MAX = 5

# The weight of each fault.
WEIGHTS = {
    "kill worker": 12,
    "kill init": 4,
    "stop worker, let it go on": 4,
    "stop worker, kill it": 3,
    "kill fork server": 3,
    "kill spare": 2,
    "stop fork server, let it go on": 3,
    "stop fork server for good": 1,
    SUPERVISOR: 3,
    "forks fail": 3,
    "disk full": 2,
    "disk hangs": 3,
    "disk slow": 3,
    "clock step": 5,
    "scale": 4,
    "restart": 2,
    "pause": 2,
    "reset": 2,
    "reload": 3,
    "bad reload": 1,
    "memory short": 2,
    "crowd": 2,
}


class Storm(Monkey):
    """The monkey with faults of the whole machine."""

    def __init__(
        self, daemon: Muster, rng: Random, *, shim: Shim, disk: Disk | None, uid: int, pool: str
    ) -> None:
        super().__init__(daemon, rng)
        self.shim = shim
        self.disk = disk
        self.pool = pool  # the pool that is scaled, restarted and paused
        self.environment = shim.environment
        self.strikes |= {
            "kill init": lambda: self.kill("init"),
            "stop fork server, let it go on": lambda: self.stop("fork server", signal.SIGCONT),
            "stop fork server for good": self.stop_fork_server,
            "clock step": self.step_clock,
            "disk slow": self.slow_disk,
            "scale": self.scale,
            "restart": lambda: self.ask(rpc.Restart([self.pool], no_block=True)),
            "pause": self.pause,
            "reset": lambda: self.ask(rpc.Reset(["all"], no_block=True)),
            "reload": self.reload,
            "bad reload": self.reload_badly,
            "memory short": self.tighten_memory,
            "crowd": self.crowd,
        }
        if uid != 0:  # nothing limits the number of root's processes
            self.strikes["forks fail"] = self.fail_forks
        if disk is not None:
            self.strikes |= {"disk full": self.fill_disk, "disk hangs": self.hang_disk}

    def plan(self) -> Callable[[], str]:
        """Choose the next fault: at first each once, in any order, then by weight."""
        names = [name for name in WEIGHTS if name in self.strikes]
        weights = [WEIGHTS[name] for name in names]
        first = self.rng.sample(names, len(names))
        return lambda: first.pop() if first else self.rng.choices(names, weights)[0]

    # -- processes ----------------------------------------------------------------------------

    def stop_fork_server(self) -> None:
        """Stop the fork server; it is found out when a worker is requested, and replaced."""
        with self.victim("fork server") as pidfd:
            send(pidfd, signal.SIGSTOP)
        self.kill("worker")

    def fail_forks(self) -> None:
        """Make forks of the supervisor and its fork servers fail."""
        pids = [self.daemon.pid]
        pids += [pid for pid in self.children() if title_of(pid).startswith("musterd: fork server")]
        for pid in pids:
            self.limit(pid, resource.RLIMIT_NPROC, 1, self.rng.uniform(0.05, FORKLESS_SECONDS_MAX))

    def limit(self, pid: int, which: int, soft: int, seconds: float) -> None:
        """Lower a limit of a process for a while."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # it was just killed
        before = self._set_limit(pid, which, soft)

        def undo() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, 0)  # the pid still belongs to the same process
                self._set_limit(pid, which, before)
            os.close(pidfd)

        self.later(seconds, undo)

    def _set_limit(self, pid: int, which: int, soft: int) -> int:
        """Set a limit as the daemon's user, since not every root may; return the old one."""
        command = [sys.executable, "-ISc", LIMITER, str(pid), str(which), str(soft)]
        options = {key: self.daemon.popen_options.get(key) for key in ("user", "group")}
        done = subprocess.run(command, check=True, capture_output=True, text=True, **options)
        return int(done.stdout)

    # -- disk and clock -----------------------------------------------------------------------

    def fill_disk(self) -> None:
        assert self.disk is not None
        self.disk.settle()  # else the write would hang in the kernel
        self.disk.fill()
        self.later(self.rng.uniform(0.1, FULL_SECONDS_MAX), self.empty_disk)

    def empty_disk(self) -> None:
        assert self.disk is not None
        self.disk.settle()
        self.disk.empty()

    def hang_disk(self) -> None:
        assert self.disk is not None
        self.disk.settle()
        self.disk.hang(self.rng.uniform(0.05, HANGING_SECONDS_MAX))

    def slow_disk(self) -> None:
        self.shim.slow_down(self.rng.uniform(0.01, SYNC_SECONDS_MAX))
        self.later(self.rng.uniform(0.2, SLOW_SECONDS_MAX), lambda: self.shim.slow_down(0.0))

    def step_clock(self) -> None:
        self.shim.set_clock(self.rng.uniform(-CLOCK_SECONDS_MAX, CLOCK_SECONDS_MAX))

    # -- operators ----------------------------------------------------------------------------

    def ask(self, params: rpc.Params) -> bool:
        """Send an operator's request; return False if the daemon is just down."""
        with (
            contextlib.suppress(Unreachable, NoAnswer, RpcError, OSError),
            Connection(self.daemon.control_socket, timeout=ASK_SECONDS) as connection,
        ):
            connection.request(params)
            return True
        return False

    def insist(self, params: rpc.Params) -> None:
        """Repeat a request until it is done."""
        deadline = time.monotonic() + ASK_SECONDS
        while not self.ask(params):
            self.check_supervisor()
            assert time.monotonic() < deadline, f"nobody is there to take {params}"
            time.sleep(0.01)

    def reload(self) -> None:
        """Reload another configuration: some require replacing workers, some do not."""
        config = msgspec.json.decode(self.daemon.config_path.read_bytes())
        pool = config["pools"][self.pool]
        pool["max_tasks"] = self.rng.randint(100, 500)
        pool["env"] = {"CHAOS_COLOUR": self.rng.choice(("red", "green", "blue"))}
        self._hang_up(msgspec.json.encode(config))

    def reload_badly(self) -> None:
        """Reload a configuration that must be refused (no daemon would start with it)."""
        self.insist(rpc.Version())
        good = self.daemon.config_path.read_bytes()
        self._hang_up(b'{"pools": {"crowd": {"size": -1}}}')
        self.wait(self.rng.uniform(0.1, 0.3))
        self.daemon.config_path.write_bytes(good)

    def tighten_memory(self) -> None:
        """Set limits so low that the machine is always above them: the fleet has to shrink."""
        config = msgspec.json.decode(self.daemon.config_path.read_bytes())
        usual = config["memory"]
        self._hang_up(msgspec.json.encode({**config, "memory": {**usual, **TIGHT}}))

        def undo() -> None:
            config = msgspec.json.decode(self.daemon.config_path.read_bytes())
            self.insist(rpc.Version())  # the daemon is up to hear it
            self._hang_up(msgspec.json.encode({**config, "memory": usual}))

        self.later(self.rng.uniform(0.2, TIGHT_SECONDS_MAX), undo)

    def _hang_up(self, config: bytes) -> None:
        """Send SIGHUP with another configuration. Before a daemon handles SIGHUP, the signal would
        end it, like any program."""
        self.daemon.config_path.write_bytes(config)
        if self.ask(rpc.Version()):
            os.kill(self.daemon.pid, signal.SIGHUP)

    def crowd(self) -> None:
        """Open silent connections until the daemon, short of descriptors, closes some."""
        crowd: list[socket.socket] = []
        deadline = time.monotonic() + CROWD_SECONDS_MAX
        while time.monotonic() < deadline and not (crowd and _is_put_out(crowd[0])):
            caller = socket.socket(socket.AF_UNIX)
            caller.setblocking(False)
            try:
                caller.connect(self.daemon.tasks_socket)
                crowd.append(caller)
            except OSError:  # the kernel's queue is full, or the daemon is starting
                caller.close()
            time.sleep(0.001)  # so that the daemon has time to look
        for caller in crowd:
            caller.close()

    def scale(self) -> None:
        self.ask(rpc.Scale(self.pool, self.rng.randint(0, SCALE_MAX), no_block=True))
        size = rpc.Scale(self.pool, self.rng.randint(1, SCALE_MAX), no_block=True)
        self.later(self.rng.uniform(0.05, 0.5), lambda: self.insist(size))

    def pause(self) -> None:
        self.ask(rpc.Pause([self.pool]))
        seconds = self.rng.uniform(0.01, PAUSED_SECONDS_MAX)
        self.later(seconds, lambda: self.insist(rpc.Resume([self.pool])))


def _is_put_out(caller: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        while caller.recv(1000):  # the greeting of libzmq
            pass
        return True
    return False
