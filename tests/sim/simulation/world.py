"""The world: a clock, a heap of future happenings, and the real core in the middle.

Nothing happens at once: orders of the core are carried out after a random delay, and happenings
reach the core after a random delay, each channel in its own order. `World(seed).run()` is one
scenario: a time of faults, then a calm in which everything must end, then a shutdown.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from random import Random
from typing import Any

from musterd.ipc.wire.messages import SUCCEEDED, Outcome
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.shutdown import Phase
from musterd.supervisor.core.tasks import bulk, logins
from musterd.supervisor.core.tasks.outage import PATIENCE_NS
from simulation.bulk_retry import BulkRetry
from simulation.clients import CALLER, WIRE_NS, Client
from simulation.debugging import People
from simulation.door import ask
from simulation.invariants import Watch
from simulation.logins import Logins
from simulation.profile import MS, SEC, SESSIONS, US, Profile, policy_of, profile_of
from simulation.reloads import Reloads
from simulation.store import READ_NS, Store
from simulation.weather import Weather
from simulation.wide_workers import WideWorker
from simulation.workers import SIGKILL, ForkServer, Worker

TRACE_LENGTH = 40
STEPS_MAX = 30_000  # a scenario needs a few hundred: more means an endless loop
CALM_LIMIT_NS = 400 * SEC  # by then everything has ended, or never will
CARE_NS = 5 * SEC  # how often the operator looks after the fleet in the calm


class World:
    _run_min = bulk.RUN_MIN
    _ended_max = logins.ENDED_MAX

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.profile: Profile = profile_of(seed, self.rng)
        self.policy = policy_of(self.profile, self.rng)
        bulk.RUN_MIN = 1 if seed % 2 else self._run_min  # smaller submits are no bulk
        logins.ENDED_MAX = 2 if seed % 3 else self._ended_max
        self.pool_names = tuple(pool.name for pool in self.policy.pools)
        self.now_ns = self.rng.randrange(1, 10**15)
        self.wall_offset_ns = self.rng.randrange(10**18)
        self.trace: deque[tuple[int, str, Any]] = deque(maxlen=TRACE_LENGTH)
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.logins = Logins(self)
        self.people = People(self)
        self.bulk_retry = BulkRetry(self)
        self.poison: dict[str, None] = {}
        self.cancelled: dict[str, None] = {}
        self._requests = self._callers = 0
        self.is_calm = False
        self.life = 0  # odd while a supervisor is up, even between two
        self.lives = 0
        self.up = False
        self.fleet: Fleet
        self.workers: dict[int, Worker] = {}
        self.fork_servers: dict[tuple[str, str], ForkServer] = {}  # by pool and build
        self.store = Store(self)
        self.reloads = Reloads(self)
        self.watch = Watch(self)
        self.clients = [Client(self, number) for number in range(self.profile.clients)]
        self.weather = Weather(self) if self.profile.memory else None
        self.sockets_survive = (
            False  # the shutdown under way leaves new tasks to the next supervisor
        )
        self._last = False  # the shutdown under way is the one that ends the scenario
        self.over = False

    # -- time ---------------------------------------------------------------------------------

    def delay(self, low_ns: int, high_ns: int) -> int:
        return low_ns + int(self.rng.random() * (high_ns - low_ns))

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        self._push(delay_ns, 0, call, args)

    def in_life(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        """Call it later, unless the supervisor dies before."""
        self._push(delay_ns, self.life, call, args)

    def _push(
        self, delay_ns: int, life: int, call: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._order, life, call, args))

    def run(self) -> None:
        self._plan()
        heap = self._heap
        while not self.over:
            deadline_ns = self.fleet.next_deadline() if self.up else None
            if deadline_ns is not None and (not heap or deadline_ns <= heap[0][0]):
                # A poll that sleeps wakes up a little late.
                self.now_ns = max(self.now_ns, deadline_ns + self.delay(0, 100 * US))
                if heap and heap[0][0] < self.now_ns:
                    self.now_ns = max(deadline_ns, heap[0][0])
                self.tell(events.Ticked())
                continue
            when_ns, _, life, call, args = heapq.heappop(heap)
            self.now_ns = max(self.now_ns, when_ns)
            if life in (0, self.life):
                call(*args)

    # -- the scenario -------------------------------------------------------------------------

    def _plan(self) -> None:
        profile, rng = self.profile, self.rng
        share = -(-profile.tasks // profile.clients)
        for client in self.clients:
            client.plan(share)
        faults = (
            (profile.kills, self._kill_worker),
            (profile.fork_server_kills, self._kill_fork_server),
            (profile.freezes, self._freeze_worker),
            (profile.sick, self._make_sick),
            (profile.fork_server_stalls, self._stall_fork_server),
            (profile.reconnects, self._drop_client),
            (profile.orders, self._give_order),
            (profile.crashes, self._crash),
            (profile.reloads, self.reloads.at_random),
            (profile.shutdowns, self._ask_shutdown),
            (profile.full_disks, self._fill_disk),
            (profile.retries_by_hand, self._retry_by_hand),
            (profile.pauses, self._pause),
            (profile.breaker_orders, self._command_breaker),
            (profile.forgets, self._forget_session),
            (2 * profile.logins, self._reset_session),
            (profile.calls, self._call),
            (profile.looks, self.people.look),
        )
        for count, call in faults:
            for _ in range(rng.randint(0, count)):
                self.after(self.delay(0, profile.faults_ns), call)
        if self.weather is not None:
            self.weather.plan()
        self.bulk_retry.plan()
        self.after(profile.faults_ns + 1, self._calm_down)
        self._begin_life()

    def _begin_life(self) -> None:
        self.life += 1
        self.lives += 1
        self.up = True
        self.sockets_survive = False
        self.workers = {}
        self.fork_servers = {}
        self.fleet = Fleet(self.policy, Random(self.rng.random()), self.store.last_seq)
        self.watch.new_life()
        self.people.new_life()
        self.bulk_retry.new_life()
        pages = self.store.recover()
        for page in pages:
            self.watch.recovered(page)
        for kind in self.fleet.fact_kinds:
            self.tell(events.FactsRecovered(kind, self.store.facts(kind)))
        for page in pages:
            self.tell(page)
        if self.weather is not None:
            self.weather.new_life()
        self.tell(events.Started())
        for client in self.clients:
            self.in_life(self.delay(*WIRE_NS), client.welcome)

    def _end_life(self) -> None:
        """End this life: only what is on disk is left."""
        self.watch.supervisor_died()
        for worker in self.workers.values():
            worker.alive = False
        for task in self.fleet.tasks.values():
            task.debt = None
        for pool in self.fleet.pools.values():
            # Tasks are hidden from the garbage collector, so the containers are emptied by hand.
            for slot in pool.slots:
                slot.leases.clear()
            for level in pool.queue.levels:
                for lane in level.lanes.values():
                    lane.tasks.clear()
        self.up = False
        self.life += 1  # calls scheduled within the last life do not happen any more
        self.store.lose_power()
        if not self.over:
            self.after(self.delay(5 * MS, 500 * MS), self._begin_life)

    def _calm_down(self) -> None:
        self.is_calm = True
        self._care(self.now_ns + CALM_LIMIT_NS)

    def _care(self, limit_ns: int) -> None:
        """Put the fleet in order as the operator, until all is done; then end the scenario."""
        if self.up and self.fleet.phase == Phase.UP:
            if self._settled():
                self._last = True
                self.watch.handler_requests.over()
                self.watch.debugging.over()
                self.tell(events.ShutdownRequested("the end"))
                return
            self._put_in_order()
        if self.now_ns >= limit_ns:
            raise AssertionError(f"not everything ended: {self._unsettled()}")
        self.after(CARE_NS, self._care, limit_ns)

    def _put_in_order(self) -> None:
        """Do what needs a person; everything else has to come back by itself."""
        self.reloads.put_in_order()
        for pool in self.fleet.pools.values():
            if pool.scaler is not None:
                if pool.scaler.manual:
                    self.tell(events.AutoscaleRequested(pool.name))
            elif pool.size < 1:
                self.tell(events.ScaleRequested(pool.name, 1, self.new_caller()))
            states = [(slot.index, slot.state) for slot in pool.slots if not slot.held]
            for index, state in states:
                if state == SlotState.FATAL:
                    self.tell(events.ResetRequested(((pool.name, index),)))
                elif state == SlotState.STOPPED:
                    self.tell(events.StartRequested(((pool.name, index),)))
        if self.profile.pauses:
            self.tell(events.ResumeRequested(tuple((name, -1) for name in self.pool_names)))
        for target in list(self.watch.breakers.held):
            self.tell(events.BreakerCommanded(target, "reset"))

    def _settled(self) -> bool:
        return (
            not self.fleet.tasks
            and not self.fleet.on_disk
            and self.reloads.settled
            and all(client.content for client in self.clients)
            and all(
                slot.state == SlotState.RUNNING
                for pool in self.fleet.pools.values()
                for slot in pool.slots
            )
        )

    def _unsettled(self) -> str:
        if not self.up:
            return "there is no supervisor"
        slots = [
            (slot.name, slot.shown_state, slot.reason)
            for pool in self.fleet.pools.values()
            for slot in pool.slots
        ]
        clients = [
            (client.number, client.unacknowledged, client.refused, client.waits_for)
            for client in self.clients
            if not client.content
        ]
        return f"phase {self.fleet.phase}, {slots}, {list(self.fleet.tasks.values())}, {clients}"

    def _finish(self) -> None:
        self.over = True
        store = self.store
        assert not store.live, f"still live on disk: {list(store.live.values())}"
        for id_ in self.watch.acknowledged:
            assert id_ in store.finished, f"acknowledged task {id_} has no end"

    # -- faults and orders --------------------------------------------------------------------

    def _kill_worker(self) -> None:
        alive = [worker for worker in self.workers.values() if worker.alive]
        if alive:
            self.rng.choice(alive).die(-SIGKILL)

    def _freeze_worker(self) -> None:
        alive = [worker for worker in self.workers.values() if worker.alive]
        if alive:
            self.rng.choice(alive).freeze()

    def _make_sick(self) -> None:
        ready = [worker for worker in self.workers.values() if worker.alive and worker.ready]
        if ready:
            self.rng.choice(ready).fall_ill()

    def _kill_fork_server(self) -> None:
        if self.up and self.fleet.phase == Phase.UP:
            for fork_server in self._some_fork_server():
                fork_server.die()

    def _stall_fork_server(self) -> None:
        if self.up:
            for fork_server in self._some_fork_server():
                fork_server.stalled = True

    def _some_fork_server(self) -> list[ForkServer]:
        pool = self.rng.choice(self.pool_names)
        found = [
            fork_server for (name, _), fork_server in self.fork_servers.items() if name == pool
        ]
        return [self.rng.choice(found)] if len(found) > 1 else found

    def _fork_server(
        self, action: act.StartForkServer | act.StopForkServer | act.SpawnWorker
    ) -> ForkServer:
        key = (action.pool, action.build)
        if key not in self.fork_servers:
            self.fork_servers[key] = ForkServer(self, *key)
        return self.fork_servers[key]

    def _drop_client(self) -> None:
        if self.up:
            self.rng.choice(self.clients).lose_connection()

    def _crash(self) -> None:
        if self.up:
            self.trace.append((self.now_ns, "!!", "the supervisor is killed"))
            self._end_life()

    def _ask_shutdown(self) -> None:
        if not self.up:
            return
        self.store.stuck = self.rng.random() < self.profile.stuck_disk
        # Every other supervisor leaves its socket, and with it new tasks, to the next.
        self.sockets_survive = bool((self.seed + self.lives) % 2)
        self.tell(events.ShutdownRequested("asked", self.sockets_survive))
        again = events.ShutdownRequested("asked again", self.sockets_survive)
        while self.rng.random() < 0.5:
            self.in_life(self.delay(0, 2 * SEC), self.tell, again)

    def _fill_disk(self) -> None:
        if self.up and not self.store.full:
            self.store.full = True
            # Often for about as long as the core waits.
            times = ((10 * MS, 20 * SEC), (PATIENCE_NS, PATIENCE_NS + 2 * SEC))
            self.after(self.delay(*self.rng.choice(times)), self._make_room)

    def _make_room(self) -> None:
        self.store.full = False

    def _retry_by_hand(self) -> None:
        if not self.up:
            return
        rng, finished = self.rng, self.store.finished
        ids = [id_ for id_, outcome in finished.items() if outcome.state != SUCCEEDED]
        ids = rng.sample(ids, min(len(ids), 5)) + rng.sample(list(finished), min(len(finished), 2))
        alive = [*self.fleet.tasks, *self.fleet.on_disk]
        ids += [*rng.sample(alive, min(len(alive), 2)), "no-such-task"]
        wall_ns = self.now_ns + self.wall_offset_ns
        self.tell(events.RetryRequested(self.new_caller(), 0, ids, wall_ns))

    def _give_order(self) -> None:
        if not self.up:
            return
        rng = self.rng
        pool = rng.choice(self.pool_names)
        if self.profile.scaling and rng.random() < 0.25:
            self.tell(events.AutoscaleRequested(pool))
            return
        if rng.random() < 0.25:
            self.tell(events.ScaleRequested(pool, rng.randint(0, 4), self.new_caller()))
            return
        kind = rng.choice(
            (
                events.StartRequested,
                events.StopRequested,
                events.RestartRequested,
                events.ResetRequested,
            )
        )
        self.tell(kind(((pool, rng.choice((-1, -1, 0, 1, 2))), ("nowhere", -1))))

    def _pause(self) -> None:
        rng = self.rng
        pool = rng.choice(self.pool_names)
        kinds = (events.PauseRequested, events.DrainRequested, events.ResumeRequested)
        names = ((pool, rng.choice((-1, -1, 0, 1, 2))), ("nowhere", -1))
        self.tell(rng.choice(kinds)(names))

    def _command_breaker(self) -> None:
        """Command a breaker. The shell refuses to close or reset one of an unknown site."""
        if not self.up:
            return
        target = f"site{self.rng.randrange(self.profile.targets + 1)}"
        known = target in self.fleet.sites
        command = self.rng.choice(("open", "close", "reset", "disable") if known else ("open",))
        self.tell(events.BreakerCommanded(target, command))

    def _forget_session(self) -> None:
        if self.up:
            self.tell(events.SessionForgotten(self.rng.choice((*SESSIONS, "unheard-of"))))

    def _reset_session(self) -> None:
        if self.up:
            self.tell(events.SessionReset(self.rng.choice(tuple(SESSIONS))))

    def _call(self) -> None:
        """Submit a task as a person with musterctl: without a number (control/commands)."""
        if self.up:
            spec = self.rng.choice(self.clients).make_task()
            wall_ns = self.now_ns + self.wall_offset_ns
            self.tell(events.TasksSubmitted(self.new_caller(), 0, [spec], wall_ns, resend=True))

    def new_request(self) -> int:
        """Return the shell's token of a client's request: each is unique."""
        self._requests += 1
        return self._requests

    def new_caller(self) -> bytes:
        """Return the name of a person who waits for one answer, and gives no token."""
        self._callers += 1
        return CALLER + b"%d" % self._callers

    # -- the core -----------------------------------------------------------------------------

    def tell(self, event: Any) -> None:
        if not self.up:
            return
        watch = self.watch
        assert watch.steps < STEPS_MAX, f"more than {STEPS_MAX} steps"
        self.trace.append((self.now_ns, "->", event))
        before = watch.before(event)
        self.bulk_retry.before(event)
        actions = ask(self.fleet, self.now_ns, event)
        for action in actions:
            self.trace.append((self.now_ns, "  ", action))
        watch.handled(event, actions, before)
        self.bulk_retry.handled(event, actions)
        if self.weather is not None:
            self.weather.handled(event, actions)
        for action in actions:
            self.carried_out[type(action)](self, action)

    def _acknowledge(self, action: act.Acknowledge) -> None:
        client = self.client_of(action.peer)
        if client is not None and action.request in client.unacknowledged:
            self.in_life(self.delay(*WIRE_NS), client.accepted, action.request, action.rejected)

    def client_of(self, peer: bytes) -> Client | None:
        if not peer or peer.startswith(CALLER):
            return None
        client = self.clients[int(peer.partition(b"/")[0])]
        return client if client.peer == peer else None

    def send_outcomes(self, peer: bytes, outcomes: list[Outcome]) -> None:
        client = self.client_of(peer)
        if client is not None and outcomes:
            self.in_life(self.delay(*WIRE_NS), self._hear, client, peer, outcomes)

    def _hear(self, client: Client, peer: bytes, outcomes: list[Outcome]) -> None:
        if client.peer == peer:
            client.outcomes(outcomes)

    def drop_connection(self, peer: bytes) -> None:
        """End the connection of a client whose request cannot be answered."""
        client = self.client_of(peer)
        if client is not None:
            client.lose_connection()

    def _tell_missing(self, action: act.TellMissing) -> None:
        self.watch.missing(action.ids)
        client = self.client_of(action.peer)
        if client is not None:
            self.in_life(self.delay(*WIRE_NS), client.missing, action.ids)

    def _find_state(self, action: act.FindState) -> None:
        self.in_life(self.delay(*READ_NS), self._read_state, action)

    def _read_state(self, action: act.FindState) -> None:
        if not self.store.unreadable():  # else the answer is an error
            self.watch.handler_requests.read(action, self.store.fact(action.kind, action.key))
        self._order_worker(action.worker, "asks.state_answered", action.request)

    def _spawn(self, action: act.SpawnWorker) -> None:
        worker = self._make_worker(action)
        self.workers[action.worker] = worker
        self._fork_server(action).spawn(worker)

    def _make_worker(self, action: act.SpawnWorker) -> Worker:
        width = self.rng.randint(1, self.profile.width) if self.profile.width > 1 else 1
        if width == 1:
            return Worker(self, action.worker, action.pool, action.index)
        return WideWorker(self, action.worker, action.pool, action.index, width)

    def _kill(self, action: act.KillWorker) -> None:
        worker = self.workers[action.worker]
        worker.doomed = True
        if worker.fork_reported or worker.ready:  # its hello may overtake the report of its fork
            self.in_life(self.delay(10 * US, 5 * MS), worker.die, -SIGKILL)

    def _recall(self, action: act.RecallLeases) -> None:
        self.workers[action.worker].recalled = True
        self._order_worker(action.worker, "recall")

    def _terminate(self, action: act.TerminateWorker) -> None:
        self.workers[action.worker].doomed = True
        self._order_worker(action.worker, "terminate")

    def _clean_up(self, _: act.RunCleanup) -> None:
        if self.is_calm or self.rng.random() < 0.8:
            finished = events.CleanupFinished("clean-up failed" if self.lives % 2 else "")
            self.in_life(self.delay(1 * MS, 2 * SEC), self.tell, finished)

    def _exit(self, _: act.Exit) -> None:
        for pool, fork_server in self.fork_servers.items():
            assert not fork_server.alive, f"the fork server of {pool} outlives the exit"
        late = ask(self.fleet, self.now_ns, events.Ticked())
        assert not any(isinstance(each, act.Exit) for each in late), "it exits twice"
        if self._last:
            self._finish()
        self._end_life()

    def _read_boards(self, action: act.ReadBoards) -> None:
        self.in_life(10 * US, self._show_boards, action.workers)

    def _show_boards(self, numbers: list[int]) -> None:
        alive = [self.workers[number] for number in numbers if self.workers[number].alive]
        self.tell(events.BoardsRead([worker.look() for worker in alive]))

    def _order_worker(self, number: int, name: str, *args: Any) -> None:
        worker = self.workers[number]
        worker.order(attrgetter(name)(worker), *args)

    carried_out: dict[type, Callable[[World, Any], None]] = {  # noqa: RUF012  # a table, never changed
        act.Persist: lambda self, action: self.store.write(action),
        act.CheckResent: lambda self, action: self.store.check_resent(action),
        act.Withdraw: lambda self, action: self.store.withdraw(action),
        act.FindEnded: lambda self, action: self.store.find_ended(action),
        act.TellProgress: lambda self, action: None,
        act.TellChanges: lambda self, action: None,
        act.ForgetPicture: lambda self, action: None,
        act.FindState: _find_state,
        act.AnswerState: lambda self, a: self._order_worker(
            a.worker, "asks.state_answered", a.request
        ),
        act.AnswerWait: lambda self, a: self._order_worker(a.worker, "nested.answered", a.request),
        act.AnswerLock: lambda self, a: self._order_worker(
            a.worker, "asks.lock_answered", a.request, a.taken
        ),
        act.ReadDiskTasks: lambda self, action: self.store.read_disk_tasks(action),
        act.LookUp: lambda self, action: self.store.look_up(action),
        act.TellMissing: _tell_missing,
        act.Acknowledge: _acknowledge,
        act.DropRequest: lambda self, a: self.in_life(
            self.delay(*WIRE_NS), self.drop_connection, a.peer
        ),
        act.Deliver: lambda self, action: self.send_outcomes(action.peer, action.outcomes),
        act.FindStranded: lambda self, action: self.store.find_stranded(action),
        act.StartForkServer: lambda self, action: self._fork_server(action).start(),
        act.StopForkServer: lambda self, action: self._fork_server(action).stop(),
        act.Declare: lambda self, action: None,
        act.KeepSpares: lambda self, action: None,
        act.SpawnWorker: _spawn,
        act.AssignLeases: lambda self, a: self._order_worker(a.worker, "assign", a.leases),
        act.RecallLeases: _recall,
        act.CancelRunning: lambda self, a: self._order_worker(a.worker, "cancel", a.lease),
        act.StopWorker: lambda self, action: self._order_worker(action.worker, "stop"),
        act.TerminateWorker: _terminate,
        act.KillWorker: _kill,
        act.AnswerDebugger: lambda self, a: self._order_worker(
            a.worker, "breakpoints.answered", a.request, a.line
        ),
        act.BreakIntoHandler: lambda self, a: self._order_worker(
            a.worker, "breakpoints.break_in", a.lease, a.leave
        ),
        act.ShowDebugger: lambda self, action: self.people.shown(action),
        act.CloseDebugger: lambda self, action: self.people.closed(action),
        act.ReadBoard: lambda self, action: self._order_worker(action.worker, "read_board"),
        act.ReadBoards: _read_boards,
        act.Report: lambda self, action: None,
        act.RunCleanup: _clean_up,
        act.Exit: _exit,
    }
