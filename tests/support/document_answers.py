"""The answers of a daemon by which docs/musterctl.md shows what musterctl prints."""

from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from musterd.supervisor.api import rpc
from musterd.supervisor.api.events import Event
from musterd.supervisor.api.history import ChangeItem, ChangeList
from musterd.supervisor.api.memory import (
    MachineFigures,
    MemoryStatus,
    PoolMemory,
    SourceStatus,
    WorkerMemory,
)
from musterd.supervisor.api.status import (
    BreakerList,
    BreakerStatus,
    BulkResult,
    CacheResult,
    CommandResult,
    FleetStatus,
    KeyChange,
    NewerCode,
    NodeStatus,
    OutputLine,
    PidResult,
    PoolReload,
    PoolStatus,
    PurgeResult,
    ReloadResult,
    RetryResult,
    ScheduleKeys,
    SchedulesPut,
    ScheduleStatus,
    SessionList,
    SessionStatus,
    SlotResult,
    TailResult,
    TaskFailure,
    TaskList,
    TaskStatus,
    VersionResult,
    WorkerOutput,
    WorkerStatus,
)
from musterd.supervisor.api.verdict import verdict
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.ctl.top_feed import Memory, Snapshot, Use

NOON = datetime(2025, 1, 31, 12, tzinfo=UTC).timestamp()
ID = "019a8b2c3d49f86d081e4000002a"
K, M, G = 1024, 1024**2, 1024**3
EVENTS = (
    Report("worker.ready", pool="parser", worker="parser/0"),
    Report(
        "worker.crashed",
        level="error",
        pool="parser",
        worker="parser/0",
        seconds=7.2,
        cause="exit",
        reason="exited with code 1",
        output="Traceback (most recent call last):\nMemoryError",
    ),
)


def fleet() -> FleetStatus:
    busy = WorkerStatus(
        name="parser/0",
        state="BUSY",
        pid=4711,
        uptime_seconds=7500,
        task_id=ID,
        method="extract",
        task_seconds=0.4,
        tasks_done=620,
    )
    idle = WorkerStatus(
        name="parser/1",
        state="RUNNING",
        pid=4790,
        uptime_seconds=190,
        tasks_done=584,
        restarts=1,
        lost={"oom": 1},
    )
    parser = PoolStatus(
        name="parser",
        state="RUNNING",
        size=2,
        running=2,
        busy=1,
        queued={"critical": 1, "high": 0, "normal": 9, "low": 0},
        succeeded=1204,
        failed=3,
        restarts=1,
        lost={"oom": 1},
        workers=[busy, idle],
    )
    return FleetStatus(
        version="0.1.0",
        pid=4242,
        uptime_seconds=7500,
        state="running",
        containment="pidns",
        pools=[parser],
    )


BREAKERS = BreakerList(
    breakers=[
        BreakerStatus(target="shop.example", state="closed", failures=1, running=2),
        BreakerStatus(
            target="site.example",
            state="open",
            open_seconds=24.0,
            failures=3,
            reopenings=1,
            waiting=7,
        ),
    ]
)
SESSIONS = SessionList(
    sessions=[
        SessionStatus(
            name="acme",
            kept=True,
            site="acme.example",
            bytes=1229,
            login_seconds=7500,
            saved_seconds=241,
            running=1,
            waiting=3,
        ),
        SessionStatus(name="shop"),
    ]
)
MEMORY = MemoryStatus(
    enabled=True,
    level="warning",
    stage="half",
    share=0.71,
    source="the machine's memory",
    warning=0.7,
    critical=0.85,
    sources=[
        SourceStatus(name="the machine's memory", total_bytes=24 * G, used_bytes=17 * G, share=0.71)
    ],
    stalled_some=0.03,
    stalled_full=0.01,
    age_seconds=0.4,
    machine=MachineFigures(
        cpu_share=0.38,
        cpus=8,
        load=3.1,
        disk_used_bytes=41 * G,
        disk_total_bytes=98 * G,
        disk_write_rate=M,
        network_received_rate=2 * M,
        network_sent_rate=31 * K,
        supervisor_rss_bytes=58 * M,
        supervisor_cpu_share=0.012,
    ),
    pools=[
        PoolMemory(
            name="browser",
            size=4,
            limit=2,
            held=2,
            recommended_workers=2,
            footprint_bytes=730 * M,
            memory_bytes=1452 * M,
            sacrifice=True,
        ),
        PoolMemory(
            name="parser",
            size=8,
            limit=4,
            held=4,
            recommended_workers=4,
            footprint_bytes=45 * M,
            memory_bytes=180 * M,
        ),
    ],
    workers=[
        WorkerMemory(name="browser/0", pid=4790, memory_bytes=640 * M),
        WorkerMemory(name="browser/1", pid=4711, memory_bytes=812 * M),
        WorkerMemory(name="parser/0", pid=4702, memory_bytes=58 * M),
    ],
)
TASK = TaskStatus(
    id=ID,
    name="parser.extract",
    args={"url": "https://site.example/promo"},
    state="queued",
    priority="normal",
    target="site.example",
    submitted_at=NOON,
    policy="class critical (target), timeout 10 s (class), 4 retries (class), breaker open: wait "
    "(class)",
    waits_for="breaker of site.example is open for 24 s more",
)
DONE = TaskStatus(id=ID, name="parser.extract", state="succeeded", value={"title": "Example"})
CHANGES = ChangeList(
    changes=[
        ChangeItem(
            schedule="kites",
            at=NOON + 300,
            task=ID,
            number=2,
            digest="5f2c",
            summary="price 49.00 € → 39.00 €",
            before={"price": "49.00 €"},
            after={"price": "39.00 €"},
        )
    ]
)
CHANGE = KeyChange("pools.parser.size", "5", "8", "scales")
TAIL = TailResult(
    workers=[
        WorkerOutput(
            name="parser/0",
            lines=[OutputLine(1.0, f"WARNING app.prices [{ID}] no price on the page")],
        ),
        WorkerOutput(name="parser/1", lines=[OutputLine(2.0, "retrying https://site.example/")]),
    ]
)
NODES = [
    NodeStatus(
        name="attic",
        state="alive",
        running=5,
        places=8,
        seen_seconds=0.8,
        version="0.1.0",
        pools={"browser": 3, "parser": 5},
    ),
    NodeStatus(
        name="shed",
        state="draining",
        running=2,
        places=8,
        seen_seconds=1.1,
        version="0.1.0",
        pools={"browser": 3, "parser": 5},
    ),
    NodeStatus(
        name="yard",
        state="lost",
        places=5,
        seen_seconds=7500.0,
        version="0.1.0",
        pools={"parser": 5},
    ),
]


def top() -> Snapshot:
    """Return the fleet on the screen of `musterctl top`."""
    parser = fleet().pools[0]
    memory = zip(parser.workers, (82, 79), strict=True)
    parser = structs.replace(
        parser,
        workers=[structs.replace(each, memory_bytes=size * M) for each, size in memory],
        halt="paused",
        queued={"critical": 0, "high": 1, "normal": 9, "low": 0},
        waiting=2,
        lost={"signal": 1},
    )
    worker = WorkerStatus(
        name="browser/0",
        state="RUNNING",
        pid=4801,
        uptime_seconds=7500,
        tasks_done=37,
        memory_bytes=214 * M,
    )
    browser = PoolStatus(name="browser", state="RUNNING", size=1, running=1, workers=[worker])
    whole = structs.replace(fleet(), pools=[parser, browser])
    failure = TaskFailure(kind="error", type="ValueError", message="no price")
    event = "worker.crashed"
    return Snapshot(
        at=NOON,
        fleet=whole,
        health=verdict(whole, None, []),
        events=[Event(at=NOON - 190, event=event, worker="parser/1", reason="ended by signal 9")],
        schedules=[
            ScheduleStatus(
                name="nightly",
                state="active",
                task="parser.fetch",
                when="0 4 * * *",
                next_at=NOON + 4 * 3600 + 720,
                last_state="succeeded",
            )
        ],
        dead=[structs.replace(TASK, failure=failure, finished_at=NOON - 12)],
        memory=Memory(round(2.1 * G), round(3.9 * G)),
        cpu_share=0.37,
        uses={
            "parser/0": Use(0.12),
            "parser/1": Use(0.0),
            "browser/0": Use(0.01),
        },
        done_rates={"parser": 3.0},
    )


def _slots(*slots: SlotResult) -> CommandResult:
    return CommandResult(slots=list(slots))


def _about(name: str, state: str, reason: str = "", pid: int = 0) -> SlotResult:
    return SlotResult(name=name, ok=True, state=state, reason=reason, pid=pid)


def _schedule(name: str, state: str = "active", when: str = "every 5m") -> ScheduleStatus:
    return ScheduleStatus(name=name, state=state, task="parser.extract", when=when)


def answer(params: rpc.Params) -> Any:  # noqa: PLR0911 - one for each
    """Return what the daemon answers to the commands of the document."""
    match params:
        case rpc.Start():
            return _slots(_about("parser/1", "RUNNING", pid=4790))
        case rpc.Pause():
            return _slots(_about("parser", "paused", "2 still running"))
        case rpc.Drain():
            waits = _about("parser", "drained", "12 tasks wait in its queue")
            return _slots(_about("browser", "drained"), waits)
        case rpc.Resume():
            return _slots(_about("browser", "resumed"), _about("parser", "resumed"))
        case rpc.PutSchedule(name=name, keys=keys):
            return _schedule(name, when=f"every {keys['every']}")
        case rpc.GetSchedule(name=name):
            return ScheduleKeys(
                name=name, state="active", task="parser.extract", when="every 5m",
                keys={"task": "parser.extract", "every": "5m"},
            )  # fmt: skip
        case rpc.PauseSchedule(name=name):
            return _schedule(name, "paused")
        case rpc.Reload(names=names):
            if not names:
                return ReloadResult(changes=[CHANGE], pools=[PoolReload("parser", "scales")])
            newer = [NewerCode(pool=name, files=[f"{name}.py"]) for name in names]
            return ReloadResult(pools=[PoolReload(name, "rolls") for name in names], newer=newer)
        case rpc.SubmitTask():
            return DONE
        case rpc.SetBreaker(target=target):
            return BreakerStatus(target=target, state="closed")
    if isinstance(params, rpc.RetryTasks) and params.where is not None:
        return BulkResult(matched=33_334, done=0 if params.dry_run else 33_334)
    return _ANSWERS.get(type(params), CommandResult())


_ANSWERS: dict[type[rpc.Params], Any] = {
    rpc.Status: fleet(),
    rpc.ListBreakers: BREAKERS,
    rpc.ListSessions: SESSIONS,
    rpc.ShowMemory: MEMORY,
    rpc.Tail: TAIL,
    rpc.GetTask: TASK,
    rpc.ListChanges: CHANGES,
    rpc.Reread: ReloadResult(changes=[CHANGE]),
    rpc.InvalidateCache: CacheResult(forgotten=12),
    rpc.PutSchedules: SchedulesPut(),
    rpc.Version: VersionResult(version="0.1.0", pid=4242),
    rpc.ListTasks: TaskList(tasks=[TASK]),
    rpc.ListDead: TaskList(tasks=[]),
    rpc.CancelTasks: TaskList(tasks=[]),
    rpc.RetryTasks: RetryResult(retried=[ID]),
    rpc.PurgeTasks: PurgeResult(purged=3),
    rpc.Pid: PidResult(supervisor=2**22),
}
