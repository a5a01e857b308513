"""Makes worker processes, watches them, ends them. The supervisor's only place that does.

Each pool has a nursery (forkserver.py) that forks its workers under an init (init.py). The spawner
tells what happened as events of the core, and never blocks: everything it waits for is in one
epoll, whose descriptor the daemon polls.

    spawn() ── ForkRequest ──► nursery ── forks ──► init
               ◄── Forked ────                        the init is now our child: pidfd, GO, Call
               ◄── WorkerPid ──────────── worker      WorkerForked
               ◄── ALONE ──────────────── init        WorkerExited: nothing of it is left
               pidfd of the init readable             the same, if it was not told before

A worker whose fork was not reported yet has run nothing: ending it means never saying GO. Its
init sees the line close, ends by itself and is reaped as an orphan. A nursery is asked for a few
workers at a time, the others wait their turn; and before a slot gets a new worker, the census
(orphans.py) looks for what is left of the old one. Where a nursery has a spare (spares.py), that
one is called, and nothing is forked.

The supervisor is child subreaper, so it also inherits processes it never made. Those are told
from the daemon's own children by their session: a child the daemon starts elsewhere must stay in
the daemon's session, or its exit status may be taken here.

All methods are for the main thread: the kernel ends nurseries and inits with the *thread* that is
their parent.
"""

import functools
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from musterd.ipc.errors import SpawnError
from musterd.ipc.wire.scoreboard import Pulse, Reading
from musterd.supervisor.core.model.events import (
    LeftoversEnded,
    NurseryExited,
    NurseryFailed,
    NurseryReady,
    SpawnFailed,
    WorkerExited,
)
from musterd.supervisor.log import log
from musterd.supervisor.log.worker_output import Outputs
from musterd.supervisor.processes.containment import AUTO, CONTAINMENTS
from musterd.supervisor.processes.epoll import Watch
from musterd.supervisor.processes.forkserver_messages import (
    RUNTIME,
    Forked,
    ForkFailed,
    Habits,
    NurseryDown,
    NurseryMessage,
    NurseryUp,
    WorkerPid,
)
from musterd.supervisor.processes.handles import (
    Containment,
    Event,
    NurseryProcess,
    how_it_ended,
    send_signal,
)
from musterd.supervisor.processes.launcher import Midwife
from musterd.supervisor.processes.oom import OomWatch
from musterd.supervisor.processes.orphans import NURSERY, Census
from musterd.supervisor.processes.previous_run import Estate
from musterd.supervisor.processes.registry import ENDS, Wards
from musterd.supervisor.processes.spares import Keys
from musterd.supervisor.processes.tempdirs import Janitor
from musterd.supervisor.system.linux import become_subreaper, kill_inherited, reap_inherited

CLOSE_SECONDS_MAX = 10.0  # what is not dead so long after SIGKILL is stuck in the kernel
# Asked of one nursery and not reported yet. Its channel holds less than 300 requests, and a
# nursery forks one after the other: more of them on their way would gain nothing.
BIRTHS_AT_ONCE_MAX = 32

HABITS = Habits()


class Spawner:
    """Nurseries and workers of one supervisor."""

    def __init__(
        self,
        workers_socket: str,
        temp_root: Path,
        containment: str = AUTO,
        *,
        runtime: str = RUNTIME,
        oom: OomWatch | None = None,
        outputs: Outputs | None = None,
    ) -> None:
        if containment not in CONTAINMENTS:
            raise SpawnError(
                f"containment = {containment!r} is unknown: use one of {', '.join(CONTAINMENTS)}"
            )
        become_subreaper()
        self._janitor = Janitor()
        self._watch = Watch()
        self._nurseries: dict[tuple[str, str], NurseryProcess] = {}  # that serve, or are loading
        self._living: set[NurseryProcess] = set()  # the same and those that were stopped
        self._happened: list[Event] = []
        self._estate = Estate(temp_root.with_name(temp_root.name + ".run"))
        directories = self._janitor.empty(temp_root)
        if self._estate.former.processes or directories:
            self._found("", NURSERY, self._estate.former.processes, directories)
        self._midwife = Midwife(
            workers_socket,
            containment,
            runtime,
            temp_root=temp_root,
            estate=self._estate,
            outputs=outputs or Outputs(),
            is_doomed=self._janitor.removes,
        )
        self._census = Census(self._estate.run, self._watch, self._janitor, temp_root, self._found)
        self._wards = Wards(
            self._watch,
            self._midwife,
            self._census,
            self._janitor,
            oom or OomWatch(),
            tell=self._tell,
            hear=self._drain,
        )

    def fileno(self) -> int:
        """Readable when events() has something to tell."""
        return self._watch.fileno()

    # -- nurseries ----------------------------------------------------------------------------

    def start_nursery(
        self,
        pool: str,
        worker: str,
        options: bytes = b"",
        env: Mapping[str, str] | None = None,
        habits: Habits = HABITS,
        *,
        build: str = "",
    ) -> None:
        """Begins to load the worker class; NurseryReady, NurseryFailed or NurseryExited follows."""
        assert (pool, build) not in self._nurseries, f"pool {pool!r} has a nursery"
        try:
            nursery = self._midwife.open_nursery(pool, worker, options, env or {}, habits)
        except OSError as error:
            self._tell(NurseryExited(pool, f"the nursery cannot be started: {error}", build))
            return
        nursery.build = build
        self._nurseries[nursery.key] = nursery
        self._living.add(nursery)
        self._watch.add(nursery.channel.fileno(), functools.partial(self._channel_ready, nursery))
        self._watch.add(nursery.pidfd, functools.partial(self._nursery_ended, nursery))

    def stop_nursery(self, pool: str, build: str = "") -> None:
        """Ends it at once; its workers live on and no event follows."""
        nursery = self._nurseries.pop((pool, build), None)
        if nursery is not None:
            send_signal(nursery.pidfd, signal.SIGKILL)

    def keep_spares(self, kept: Keys) -> None:
        """The nurseries, by pool and build, that have a process ready for their next worker."""
        self._wards.spares.keep(kept)

    def next_deadline(self) -> int | None:
        """When events() is to be called although nothing is readable, or None."""
        return self._wards.spares.next_deadline(self._nurseries.values())

    def is_due(self, now_ns: int) -> bool:
        """Whether that time has come."""
        due_ns = self.next_deadline()
        return due_ns is not None and due_ns <= now_ns

    def containment(self) -> dict[str, Containment]:
        """What is in force, for each pool whose nursery is up."""
        nurseries = self._nurseries.values()
        return {each.pool: each.containment for each in nurseries if each.containment is not None}

    # -- workers ------------------------------------------------------------------------------

    def spawn(self, worker: int, pool: str, index: int, build: str = "") -> None:
        """Asks the pool's nursery for a worker; WorkerForked or SpawnFailed follows."""
        nursery = self._nurseries.get((pool, build))
        if nursery is None:
            self._tell(SpawnFailed(worker, f"pool {pool!r} has no nursery"))
            return
        nursery.wanted[worker] = index
        self._ask_for_wanted()

    def terminate(self, worker: int) -> None:
        """SIGTERM to the worker alone."""
        self.signal(worker, signal.SIGTERM)

    def signal(self, worker: int, signum: int) -> bool:
        """Sends it to the worker alone; False if there is no such process any more or not yet."""
        record = self._wards.workers.get(worker)
        if record is None:
            return signum in ENDS and self._call_off(worker, signum)
        return self._wards.signal(record, signum)

    def kill(self, worker: int) -> None:
        """SIGKILL to the worker and everything it started."""
        record = self._wards.workers.get(worker)
        if record is None:
            self._call_off(worker, signal.SIGKILL)
        else:
            self._wards.end(record)

    def board(self, worker: int) -> Reading | None:
        """A look at its scoreboard; None when it is gone."""
        record = self._wards.workers.get(worker)
        return record.board.read() if record is not None else None

    def pulse(self, worker: int) -> Pulse | None:
        """A short look at the same."""
        record = self._wards.workers.get(worker)
        return record.board.pulse() if record is not None else None

    def inits(self) -> dict[int, int]:
        """The pid of the process that each worker and all it started are below."""
        workers = self._wards.workers
        return {number: record.init_pid for number, record in workers.items() if record.pid}

    def pid(self, worker: int) -> int:
        """The worker's pid as the host sees it; 0 when it is gone or not known yet."""
        record = self._wards.workers.get(worker)
        return record.pid if record is not None else 0

    def worker_of(self, token: str) -> int | None:
        """Whose token this is. Answers once: after that the token is worth nothing."""
        return self._wards.worker_of(token)

    # -- what happened ------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """What happened since the last call. To be called now and then also when not readable,
        because orphans are reaped here."""
        self._watch.turn()
        if self._census.check_due:
            self._wards.look_around()
        self._ask_for_wanted()
        self._wards.spares.tend(self._nurseries.values())
        if not any(nursery.awaited for nursery in self._living):
            # Else an orphan may be an init that is about to be reported.
            reap_inherited(self._known())
            if self._wards.strays_due:
                self._wards.strays_due = kill_inherited(self._known())
        happened, self._happened = self._happened, []
        return happened

    def close(self) -> None:
        """Kills and reaps everything that is left and removes the temporary directories."""
        for key in list(self._nurseries):
            self.stop_nursery(*key)
        self._wards.end_all()
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        while self._anyone_left() and (left := deadline - time.monotonic()) > 0:
            self._watch.wait(left)
            self.events()
        while kill_inherited(self._known()) and time.monotonic() < deadline:
            reap_inherited(self._known())
            time.sleep(0.005)  # there is no descriptor to wait on for processes we never made
        self._wards.forget_all()
        for nursery in list(self._living):
            self._close_channel(nursery)
        self._census.close()
        self._estate.close()
        self._midwife.close()
        self._watch.close()
        self._janitor.close()

    # -- births -------------------------------------------------------------------------------

    def _ask_for_wanted(self) -> None:
        """Passes on what was asked of us, as far as nurseries and the census let it."""
        ready = [
            nursery
            for nursery in self._nurseries.values()
            if nursery.wanted and len(nursery.awaited) < BIRTHS_AT_ONCE_MAX
        ]
        due = self._census.due()
        if any((each.pool, index) in due for each in ready for index in each.wanted.values()):
            self._wards.look_around()
        for nursery in ready:
            for worker, index in list(nursery.wanted.items()):
                if len(nursery.awaited) == BIRTHS_AT_ONCE_MAX:
                    break
                if not self._census.ending(nursery.pool, index):
                    del nursery.wanted[worker]
                    self._wards.ask(nursery, worker, index)

    def _call_off(self, worker: int, signum: int) -> bool:
        """Ends a worker that was not even asked for; False if it is none of those."""
        for nursery in self._living:
            if nursery.wanted.pop(worker, None) is not None:
                self._tell(WorkerExited(worker, -signum, 0))
                return True
        return False

    # -- handlers of descriptors --------------------------------------------------------------

    def _found(self, pool: str, index: int, processes: int, directories: int) -> None:
        self._tell(LeftoversEnded(pool, index, processes, directories))

    def _tell(self, event: Event) -> None:
        self._happened.append(event)
        self._watch.wake()

    def _channel_ready(self, nursery: NurseryProcess) -> None:
        messages, closed = nursery.hear()
        for message, sender in messages:
            self._heard(nursery, message, sender)
        if closed:
            self._close_channel(nursery)

    def _heard(self, nursery: NurseryProcess, message: NurseryMessage, sender: int) -> None:
        match message:
            case NurseryUp():
                nursery.containment = Containment(message.containment, message.why)
                if self._nurseries.get(nursery.key) is nursery:  # else stopped meanwhile
                    if message.threads:
                        names = ", ".join(message.threads)
                        log.note("nursery.threads", "warning", pool=nursery.pool, threads=names)
                    self._tell(NurseryReady(nursery.pool, message.declarations, nursery.build))
            case NurseryDown(reason):
                if self._nurseries.get(nursery.key) is nursery:
                    self.stop_nursery(*nursery.key)
                    self._tell(NurseryFailed(nursery.pool, reason, nursery.build))
            case Forked(birth, init_pid):
                nursery.awaited.discard(birth)
                self._wards.forked(birth, init_pid)
            case ForkFailed(birth, reason):
                nursery.awaited.discard(birth)
                self._wards.unborn({birth}, reason)
            case WorkerPid(birth):
                self._wards.named(birth, sender)

    def _nursery_ended(self, nursery: NurseryProcess) -> None:
        self._drain(nursery)
        self._watch.remove(nursery.pidfd)
        code = nursery.reap()
        if nursery.channel.fileno() < 0:
            self._living.discard(nursery)
        reason = f"the nursery {how_it_ended(code)}"
        if nursery.containment is None:
            reason += " while it loaded the worker class"
        if self._nurseries.get(nursery.key) is nursery:
            del self._nurseries[nursery.key]
            self._tell(NurseryExited(nursery.pool, reason, nursery.build))  # first: all ends here
        self._wards.spares.drop(nursery)
        self._wards.unborn(nursery.awaited, reason)
        nursery.awaited.clear()
        for worker in nursery.wanted:
            self._tell(SpawnFailed(worker, reason))
        nursery.wanted.clear()
        self._census.departed(nursery.mark, nursery.pool, NURSERY)
        self._wards.look_around()

    # -- endings ------------------------------------------------------------------------------

    def _drain(self, nursery: NurseryProcess) -> None:
        if nursery.channel.fileno() >= 0:
            self._channel_ready(nursery)

    def _close_channel(self, nursery: NurseryProcess) -> None:
        if nursery.channel.fileno() >= 0:
            self._watch.remove(nursery.channel.fileno())
            nursery.channel.close()
        if nursery.pidfd < 0:
            self._living.discard(nursery)

    def _anyone_left(self) -> bool:
        return bool(self._wards) or any(nursery.pidfd >= 0 for nursery in self._living)

    def _known(self) -> set[int]:
        """The children that we made."""
        known = {nursery.process.pid for nursery in self._living if nursery.pidfd >= 0}
        return known | self._wards.init_pids
