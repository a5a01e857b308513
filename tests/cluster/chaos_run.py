"""Chaos on real daemons: work from all sides, and everything killed while it flows.

Four threads submit: one through the tasks.sock of each node, and one as a program without a daemon.
Two more strike: one PostgreSQL, one the nodes. Both strike as the work goes on, and the work waits
for them: each strike meets a cluster that is busy. Everything comes from one seed; what the kernel
makes of it is never quite the same.
"""

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import psutil
import psycopg
from chaos_audit import STATES, Audit, Limit, Record
from msgspec import Struct
from nodes import PASSWORD, Nodes, freeze, kill_all, thaw
from postgres import PORT, Server

from musterd import Client, MusterdError
from musterd.ipc.client.sync_submit import TaskHandle
from musterd.ipc.resilience.policy import MILLISECOND_NS, BackoffPolicy, BreakerPolicy, RetryPolicy
from musterd.supervisor.cluster.engine import ClusterPolicy
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy
from support.daemon import Muster, is_gone
from support.waiting import wait_for

TASKS_PER_KILL_OF_POSTGRESQL = 5_000  # 100,000 tasks: 20 kills
TASKS_PER_KILL_OF_NODES = 2_000  # 100,000 tasks: 50 kills
KILLS_MIN = 2
KILLS_PER_STOP = 5  # and a node is stopped for longer than its lease
BATCH_MAX = 60
QUEUE_SIZE = 800  # of each pool: programs wait, and no task waits long
SECONDS_PER_TASK_MAX = 0.1  # a quiet machine needs a thirtieth of it
SECONDS_MIN = 480.0
RECOVERY_SECONDS = 150.0
LOOK_SECONDS = 0.2
CLOSE_SECONDS = 1.0
POOLS = {"a": ("fetch", "parse"), "b": ("fetch", "parse", "store"), "c": ("fetch", "store")}
SITES = 24  # with limits or not ...
SMALL_SITES = 60  # ... and many with few tasks, so that rings are long
CLASS, CLASS_PLACES = "gold", 4
LIMITS = {
    **{f"narrow{n}": Limit(places=2 + n) for n in range(4)},
    **{f"slow{n}": Limit(rate=20.0 * (n + 1), burst=5) for n in range(3)},
    "both": Limit(places=3, rate=40.0, burst=8),
}
GOLDEN = ("gold0", "gold1", "gold2")
OTHERS = tuple(f"site{n}" for n in range(SITES - len(LIMITS) - len(GOLDEN)))
WELL = frozenset(("succeeded",))
WITHDRAWN = frozenset(("succeeded", "cancelled"))
TRIES = 4  # the first one, and three retries

WORKER = """
import time
from musterd import task

@task
def quick(ctx, n: int) -> int:
    return n

@task
def nap(ctx, n: int, seconds: float) -> int:
    time.sleep(seconds)
    return n

@task
def flaky(ctx, n: int, times: int) -> int:
    if ctx.attempt <= times:
        raise ValueError("not yet")
    return n
"""


def seconds_max(tasks: int) -> float:
    """Return after how long a run of so many tasks ends itself."""
    return max(SECONDS_MIN, tasks * SECONDS_PER_TASK_MAX)


def policy() -> ClusterPolicy:
    """Limits for some sites; a retry never waits for a budget, and no breaker opens."""
    free = TargetPolicy(retry_share=None)
    targets = {
        name: TargetPolicy(
            max_concurrent=each.places, rate=each.rate, burst=each.burst, retry_share=None
        )
        for name, each in LIMITS.items()
    }
    targets |= {name: TargetPolicy(policy=CLASS, retry_share=None) for name in GOLDEN}
    backoff = BackoffPolicy(base_ns=20 * MILLISECOND_NS, max_ns=500 * MILLISECOND_NS)
    return ClusterPolicy(
        retry=RetryPolicy(TRIES - 1, backoff),
        breaker=BreakerPolicy(enabled=False),
        classes={CLASS: GatePolicy(CLASS, max_concurrent=CLASS_PLACES)},
        targets=targets,
        target=free,
    )


Strike = Callable[[Random], str]  # returns what it was


class Figures(Struct, frozen=True):
    """What a run was, and what it found."""

    tasks: int
    record: Record
    strikes: dict[str, int]
    seconds: float
    fenced: int
    reaped: int


class Chaos:
    """One run. `run` returns what it found; AssertionError where something does not hold."""

    def __init__(self, server: Server, nodes: Nodes, seed: int, tasks: int) -> None:
        self._server = server
        self._nodes = nodes
        self._seed = seed
        self._tasks = tasks
        self._deadline = time.monotonic() + seconds_max(tasks)
        self._numbers = itertools.count()
        self._lock = threading.Condition()
        self._asked = self._acknowledged = 0
        self._expected: dict[str, frozenset[str]] = {}
        self._attempts: dict[str, int] = {}  # of tasks that need so many
        self._handles: list[TaskHandle] = []
        self._told: dict[str, tuple[str, int]] = {}  # final state and attempts, as clients heard
        self._strikes: Counter[str] = Counter()
        self._plans: dict[str, tuple[int, int]] = {}  # of who strikes: how many are done, of all
        self._errors: list[BaseException] = []
        self._clients: list[Client] = []
        self._all: list[Muster] = []
        self._url = ""

    def run(self) -> Figures:
        began = time.monotonic()
        database = self._nodes.database
        database.keep_real_time()
        audit = Audit(database)
        database.sql(f"CREATE ROLE u_program LOGIN PASSWORD '{PASSWORD}' IN ROLE musterd_submit")
        self._url = (
            f"postgresql://u_program:{PASSWORD}@/{database.name}"
            f"?host={self._server.folder}&port={PORT}"
        )
        engine = database.engine()
        engine.apply(policy(), engine.policy().version)
        database.close()
        self._start()
        try:
            self._work()
            self._hear()
        finally:
            self._close_clients()
        for node in self._all:
            assert node.stop() == 0, node.log()[-3000:]
        record = audit.check(self._expected, LIMITS, {CLASS: CLASS_PLACES})
        self._check_told()
        self._check_left()
        assert "deadlock detected" not in self._server.log
        logs = [node.log() for node in self._all]
        return Figures(
            len(self._expected),
            record,
            dict(self._strikes),
            time.monotonic() - began,
            sum(log.count("cluster.fenced") for log in logs),
            sum(log.count("cluster.node_lost") for log in logs),
        )

    def _start(self) -> None:
        pool = {"aging": "1d", "queue_size": QUEUE_SIZE, "max_crashes": 100}
        for name, pools in POOLS.items():
            self._all.append(self._nodes.make(name, worker=WORKER, pools=pools, pool=pool))
            self._all[-1].start(wait=False)
        for node in self._all:
            self._nodes.wait_for(node)

    # -- threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Submit everything, strike as planned, and wait for the end of all tasks."""
        kills = max(KILLS_MIN, self._tasks // TASKS_PER_KILL_OF_POSTGRESQL)
        of_nodes = max(KILLS_MIN, self._tasks // TASKS_PER_KILL_OF_NODES)
        kills_of_nodes = (
            self._kill_machine, self._kill_sidecar, self._kill_daemon, self._kill_worker
        )  # fmt: skip
        plan = [kills_of_nodes[n % len(kills_of_nodes)] for n in range(of_nodes)]
        plan += [self._stop] * (of_nodes // KILLS_PER_STOP)
        Random(f"{self._seed} plan").shuffle(plan)
        crashes = [self._kill_backend if n % 3 == 1 else self._kill_server for n in range(kills)]
        self._plans = {"PostgreSQL": (0, kills), "nodes": (0, len(plan))}
        sockets = [*(node.tasks_socket for node in self._all), self._url]
        works: list[Callable[[], None]] = [
            partial(self._submit, place, number) for number, place in enumerate(sockets)
        ]
        works += [
            partial(self._strike, "PostgreSQL", crashes),
            partial(self._strike, "nodes", plan),
        ]
        threads = [threading.Thread(target=self._guard, args=(each,)) for each in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(LOOK_SECONDS)
                if self._errors or not self._seconds_left():
                    self._close_clients()  # who waits for an answer waits no longer
        if self._errors:
            raise self._errors[0]
        while not self._is_empty():
            assert self._seconds_left(), f"not every task has ended: {self._rest()}"
            time.sleep(LOOK_SECONDS)

    def _close_clients(self) -> None:
        for client in self._clients:
            with contextlib.suppress(MusterdError, TimeoutError):
                client.close(timeout=CLOSE_SECONDS)

    def _rest(self) -> object:
        """Return what stands where, for people who look for a reason."""
        schema = self._nodes.database.schema
        queries = (
            "SELECT l.*, v.state, count(*), min(v.id) FROM {}.live v JOIN {}.lane l USING (lane) "
            "GROUP BY l.lane, v.state LIMIT 20",
            "SELECT name, tenure, beat, epoch, draining FROM {}.node",
            "SELECT clock_timestamp()",
        )
        return [self._look(each.replace("{}", schema)) for each in queries]

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread of the test
            with self._lock:
                self._errors.append(error)
                self._lock.notify_all()

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for what other threads do; the lock is held."""
        met = self._lock.wait_for(lambda: self._errors or condition(), self._seconds_left())
        assert met, f"too late: {what}"
        assert not self._errors, "another thread has failed"

    def _is_empty(self) -> bool:
        return self._look(f"SELECT FROM {self._nodes.database.schema}.live LIMIT 1") == []

    def _look(self, query: str, *parameters: object) -> list[tuple[object, ...]] | None:
        """Return what a query finds; None while PostgreSQL is away."""
        try:
            return self._nodes.database.sql(query, *parameters)
        except psycopg.OperationalError:
            return None

    # -- work -------------------------------------------------------------------------------------

    def _may_submit(self) -> bool:
        """Tell whether those who strike are as far as the work is."""
        return all(
            self._asked < self._tasks * (done + 1) / total for done, total in self._plans.values()
        ) or all(done == total for done, total in self._plans.values())

    def _submit(self, place: str, number: int) -> None:
        rng = Random(f"{self._seed} {number}")
        client = Client(place, connect_timeout=self._seconds_left())
        with self._lock:
            self._clients.append(client)
        while True:
            with self._lock:
                self._wait("strikes", lambda: self._asked >= self._tasks or self._may_submit())
                count = min(rng.randint(1, BATCH_MAX), self._tasks - self._asked)
                self._asked += count
            if count == 0:
                return
            requests = [self._request(rng) for _ in range(count)]
            handles = client.submit_many([request for request, _, _ in requests])
            withdrawn = [
                handle
                for handle, (_, states, _) in zip(handles, requests, strict=True)
                if states is WITHDRAWN
            ]
            for handle in withdrawn:
                handle.cancel()
            with self._lock:
                for handle, (_, states, attempts) in zip(handles, requests, strict=True):
                    self._expected[handle.id] = states
                    if attempts:
                        self._attempts[handle.id] = attempts
                    self._handles.append(handle)
                self._acknowledged += count
                self._lock.notify_all()

    def _request(
        self, rng: Random
    ) -> tuple[tuple[str, dict[str, object], dict[str, object]], frozenset[str], int]:
        """Return a request, the states by which it may end, and its attempts if they are known."""
        n = next(self._numbers)
        pool = rng.choice(("fetch", "fetch", "parse", "store"))
        options: dict[str, object] = {"wait": True, "priority": rng.randrange(4)}
        site = rng.random()
        if site < 0.8:
            options["target"] = rng.choice((*LIMITS, *GOLDEN, *OTHERS))
        elif site < 0.9:
            options["target"] = f"small{rng.randrange(SMALL_SITES)}"
        kind = rng.random()
        if kind < 0.05:  # fails, and succeeds at last
            times = rng.randint(1, TRIES - 1)
            return (f"{pool}.flaky", {"n": n, "times": times}, options), WELL, times + 1
        if kind < 0.06:  # fails each time
            arguments: dict[str, object] = {"n": n, "times": TRIES}
            return (f"{pool}.flaky", arguments, options), frozenset(("failed",)), TRIES
        if kind < 0.12:
            options["key"] = f"{pool}{rng.randrange(40)}"
        elif kind < 0.14:
            options["delay"] = rng.uniform(0.05, 2.0)
        elif kind < 0.15:
            options["expires"] = rng.uniform(0.2, 5.0)
            states = frozenset(("succeeded", "expired"))
            return (f"{pool}.quick", {"n": n}, options), states, 0
        states = WITHDRAWN if rng.random() < 0.03 else WELL
        if kind < 0.4 and "key" not in options:
            seconds = rng.uniform(0.001, 0.03)
            return (f"{pool}.nap", {"n": n, "seconds": seconds}, options), states, 0
        return (f"{pool}.quick", {"n": n}, options), states, 0

    def _hear(self) -> None:
        """Wait until each client was told how each of its tasks ended."""
        for handle in self._handles:
            outcome = handle.outcome(timeout=self._seconds_left())
            self._told[handle.id] = (outcome.state, outcome.attempts)

    def _check_told(self) -> None:
        """Check that clients were told what PostgreSQL has."""
        schema = self._nodes.database.schema
        found = {
            str(id_): (STATES[int(str(state))], int(str(attempts)))
            for id_, state, attempts in self._nodes.database.sql(
                f"SELECT id, state, attempts FROM {schema}.done"
            )
        }
        wrong = [(id_, told, found.get(id_)) for id_, told in self._told.items()
                 if told != found.get(id_)]  # fmt: skip
        assert not wrong, f"clients were told something else: {wrong[:10]}"
        odd = [(id_, found[id_], n) for id_, n in self._attempts.items() if found[id_][1] != n]
        assert not odd, f"attempts that count twice, or not at all: {odd[:10]}"

    # -- strikes ----------------------------------------------------------------------------------

    def _strike(self, whom: str, plan: Sequence[Strike]) -> None:
        rng = Random(f"{self._seed} {whom}")
        for number, strike in enumerate(plan):
            due = self._tasks * (number + rng.random()) / len(plan)
            self._wait_for_work(min(due, self._tasks - BATCH_MAX))
            kind = strike(rng)
            with self._lock:
                self._strikes[kind] += 1
                self._plans[whom] = (number + 1, len(plan))
                self._lock.notify_all()

    def _wait_for_work(self, tasks: float) -> None:
        with self._lock:
            self._wait("work", lambda: self._acknowledged >= tasks)

    def _kill_server(self, rng: Random) -> str:
        """Kill PostgreSQL as a whole, and start it again."""
        self._server.kill()
        time.sleep(rng.choice((0.0, 0.0, rng.uniform(0.0, 3.0))))
        self._server.start()
        return "PostgreSQL killed"

    def _kill_backend(self, rng: Random) -> str:
        if self._server.kill_one():
            return "a process of PostgreSQL killed"
        return self._kill_server(rng)  # no node is connected

    def _kill_machine(self, rng: Random) -> str:
        """Kill all processes of a node; start it at once, or when its tasks are lost."""
        node = rng.choice(self._all)
        kill_all(node)
        if rng.random() < 0.5:
            self._until_lost(node.folder.name)
        self._restart(node)
        return "node killed"

    def _kill_daemon(self, rng: Random) -> str:
        node = rng.choice(self._all)
        node.kill()
        self._restart(node)
        return "daemon killed"

    def _kill_sidecar(self, rng: Random) -> str:
        self._kill_one(rng, "cluster")
        return "sidecar killed"

    def _kill_worker(self, rng: Random) -> str:
        self._kill_one(rng, "worker")
        return "worker killed"

    def _kill_one(self, rng: Random, what: str) -> None:
        node = rng.choice(self._all)

        def killed() -> bool:
            with contextlib.suppress(psutil.Error):
                found = [
                    each
                    for each in node.processes()
                    if f"musterd: {what}" in " ".join(each.cmdline())
                ]
                for process in rng.sample(found, min(len(found), 1)):
                    process.kill()
                    return True
            return False

        wait_for(f"there is a {what} to kill", killed, RECOVERY_SECONDS)

    def _stop(self, rng: Random) -> str:
        """Stop a node until the others have taken its tasks; let it go on."""
        node = rng.choice(self._all)
        freeze(node)
        self._until_lost(node.folder.name)
        thaw(node)
        return "node stopped beyond its lease"

    def _until_lost(self, name: str) -> None:
        query = f"SELECT FROM {self._nodes.database.schema}.node WHERE name = %s AND tenure <> 0"
        wait_for(f"{name} is lost", lambda: self._look(query, name) == [], RECOVERY_SECONDS)

    def _restart(self, node: Muster) -> None:
        node.start(wait=False)
        wait_for("the daemon is up", node._is_up, RECOVERY_SECONDS)

    def _check_left(self) -> None:
        """Check that no process, socket or temporary file is left."""
        for node in self._all:
            wait_for("no process is left", lambda each=node: not each.processes())  # type: ignore[misc]
            sockets = [path.name for path in node.runtime.glob("*.sock")]
            assert not sockets, f"sockets left behind: {sockets}"
            files = list((node.state / "tmp").glob("*"))
            assert not files, f"temporary files left behind: {files}"
        ours = psutil.Process().children(recursive=True)
        left = [each for each in ours if "musterd: direct" in " ".join(each.cmdline())]
        wait_for("no gateway is left", lambda: all(map(is_gone, left)))
