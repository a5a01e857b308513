"""The systems that are measured: how each one runs, and its description."""

import sys
from pathlib import Path

from fleet import ROOT, BenchError
from msgspec import Struct

VENVS = ROOT / ".venv-peers"
THROUGHPUT, ROUNDTRIP, MEMORY = "throughput", "roundtrip", "memory"
KILLED, URGENT, SURVIVAL = "killed", "urgent", "survival"
MEASURES = (THROUGHPUT, ROUNDTRIP, MEMORY, KILLED, URGENT, SURVIVAL)
NOWHERE = "no"  # for systems without a disk


class System(Struct, frozen=True, kw_only=True):
    key: str
    label: str
    script: str  # in bench/versus
    venv: str = ""  # "": the interpreter of the benchmark
    environment: dict[str, str] = {}
    redis: bool = False
    disk: str = NOWHERE  # when a task is synced to disk; "redis": as the server is configured
    urgent_by: str = "none"  # the system's way for urgent tasks
    settings: str  # its settings, in a line
    measures: tuple[str, ...] = MEASURES

    def python(self) -> str:
        if not self.venv:
            return sys.executable
        path = VENVS / self.venv / "bin" / "python"
        if not path.exists():
            raise BenchError(f"{self.label} is not installed: make bench-peers does that")
        return str(path)

    def path(self) -> Path:
        return ROOT / "bench" / "versus" / self.script


SYSTEMS = (
    System(
        key="musterd",
        label="musterd",
        script="musterd_peer.py",
        disk="each commit",
        urgent_by='priority "critical"',
        settings='durability = "full"; submit_many of 1,000',
    ),
    System(
        key="musterd-single",
        label="musterd, single submits",
        script="musterd_peer.py",
        environment={"BENCH_SUBMIT": "single"},
        disk="each commit",
        settings='durability = "full"; submit, pipelined',
        measures=(THROUGHPUT,),
    ),
    System(
        key="musterd-memory",
        label="musterd, in memory",
        script="musterd_peer.py",
        environment={"BENCH_DURABILITY": "memory"},
        settings='durability = "memory"; submit_many of 1,000',
        measures=(THROUGHPUT, ROUNDTRIP),
    ),
    System(
        key="celery",
        label="Celery",
        script="celery_peer.py",
        venv="celery",
        redis=True,
        disk="redis",
        urgent_by="priority 0, queue_order_strategy",
        settings="prefork, Redis as broker and result backend, task_acks_late, "
        "task_reject_on_worker_lost, no gossip, no mingle",
    ),
    System(
        key="dramatiq",
        label="Dramatiq",
        script="dramatiq_peer.py",
        venv="dramatiq",
        redis=True,
        disk="redis",
        urgent_by="priority and a queue of its own",
        settings="Redis as broker and result backend, one thread per process",
    ),
    System(
        key="rq",
        label="RQ",
        script="rq_peer.py",
        venv="rq",
        redis=True,
        disk="redis",
        urgent_by="a queue that is looked into first",
        settings="worker-pool, a process forked per job, enqueue_many of 1,000, Retry(max=3)",
    ),
    System(
        key="huey-redis",
        label="Huey, Redis",
        script="huey_peer.py",
        venv="huey",
        redis=True,
        disk="redis",
        urgent_by="priority",
        settings="PriorityRedisHuey, notify_result, process workers, health check every second",
    ),
    System(
        key="huey-sqlite",
        label="Huey, SQLite",
        script="huey_peer.py",
        venv="huey",
        environment={"BENCH_HUEY": "sqlite"},
        disk="each commit",
        urgent_by="priority",
        settings="SqliteHuey, fsync, process workers, polls every 10 ms, health check every second",
    ),
    System(
        key="arq",
        label="arq",
        script="arq_peer.py",
        venv="arq",
        redis=True,
        disk="redis",
        settings="two worker processes of ten coroutines, polls every 10 ms",
    ),
    System(
        key="pool",
        label="multiprocessing.Pool",
        script="pool_peer.py",
        settings="fork, imap_unordered(chunksize=1), apply_async",
    ),
    System(
        key="executor",
        label="ProcessPoolExecutor",
        script="pool_peer.py",
        environment={"BENCH_POOL": "executor"},
        settings="fork, submit",
    ),
    System(
        key="parsl",
        label="Parsl HTEX",
        script="parsl_peer.py",
        venv="parsl",
        settings="HighThroughputExecutor, LocalProvider, not encrypted, retries = 2",
    ),
)
KEYS = tuple(system.key for system in SYSTEMS)
