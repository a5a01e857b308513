"""What kind of world a seed makes: how much work, what faults, how slow the disk.

The seed chooses one of PROFILES by its remainder and then varies it, so that any run of
consecutive seeds covers every kind evenly.
"""

from dataclasses import dataclass, replace
from random import Random

from musterd.ipc.policy import MILLISECOND_NS, SECOND_NS, BackoffPolicy, RetryPolicy
from musterd.supervisor.core.policy import FleetPolicy, PoolPolicy, RestartPolicy

US = 1_000
MS = MILLISECOND_NS
SEC = SECOND_NS

METHODS = ("tiny", "short", "long")
# How long a run of each takes when all goes well: from, to.
DURATIONS_NS = {
    "tiny": (15 * US, 400 * US),
    "short": (2 * MS, 60 * MS),
    "long": (300 * MS, 4 * SEC),
}
CALM_DURATION_MAX_NS = 20 * MS


@dataclass(frozen=True)
class Profile:
    name: str
    faults_ns: int = 8 * SEC  # how long clients, faults and operators are busy; then it is calm
    pools: int = 1
    slots: tuple[int, int] = (1, 3)
    tasks: int = 60
    batch: int = 8
    clients: int = 2
    queue_size: int = 1000
    targets: int = 3
    weights: tuple[int, int, int] = (2, 2, 1)  # of METHODS
    disk_ns: tuple[int, int] = (200 * US, 5 * MS)
    # Chances, per task.
    delay: float = 0.08
    expiry: float = 0.08
    own_timeout: float = 0.2
    cancel: float = 0.06
    repeat: float = 0.05  # submitted once more, or twice in one batch
    unknown: float = 0.02
    poison: float = 0.0  # kills every worker that runs it
    # Chances, per run.
    surprise: float = 0.02  # a tiny task that is not
    fail: float = 0.08
    hang: float = 0.0
    crash: float = 0.0
    wedge: float = 0.0  # it stops for ever between two tasks, and listens to nothing
    # Chances, per start of a worker or a nursery.
    spawn_fails: float = 0.0
    open_fails: float = 0.0
    slow_start: float = 0.0
    nursery_fails: float = 0.0
    nursery_exits: float = 0.0
    # Chances, per message or command.
    lost: float = 0.3  # what a dead worker had sent
    late: float = 0.05  # a message of a worker overtakes nothing, but takes its time
    deaf: float = 0.05  # an order (stop, terminate, cancel) is not heeded
    # How often, over the whole time of faults.
    kills: int = 0  # a worker gets SIGKILL, idle or not
    nursery_kills: int = 0
    reconnects: int = 1  # a client loses its connection
    orders: int = 2  # of an operator
    crashes: int = 0  # of the supervisor
    shutdowns: int = 0
    stuck_disk: float = 0.0  # chance that a shutdown finds a disk that writes nothing any more


CALM = Profile("calm", orders=0, fail=0.02, deaf=0.0)
PROFILES = (
    CALM,
    Profile(
        "crashy",
        tasks=50,
        poison=0.04,
        crash=0.08,
        hang=0.03,
        wedge=0.01,
        spawn_fails=0.1,
        open_fails=0.1,
        slow_start=0.05,
        nursery_exits=0.1,
        kills=6,
        nursery_kills=2,
        orders=4,
    ),
    Profile(
        "slow-disk",
        tasks=50,
        disk_ns=(5 * MS, 900 * MS),
        kills=2,
        crash=0.02,
        crashes=1,
        shutdowns=1,
        stuck_disk=0.3,
    ),
    Profile(
        "tiny-tasks",
        tasks=150,
        batch=40,
        faults_ns=2 * SEC,
        weights=(20, 1, 0),
        surprise=0.03,
        crash=0.01,
        kills=2,
        disk_ns=(100 * US, 2 * MS),
    ),
    Profile(
        "long-tasks",
        tasks=30,
        batch=4,
        faults_ns=20 * SEC,
        weights=(0, 1, 5),
        hang=0.05,
        kills=3,
        orders=5,
        own_timeout=0.5,
    ),
    Profile(
        "many-targets", tasks=120, batch=60, targets=24, weights=(1, 3, 0), slots=(1, 2), kills=1
    ),
    Profile("tiny-queue", tasks=60, batch=12, queue_size=20, weights=(1, 3, 1), crash=0.03),
    Profile(
        "restarts", pools=2, tasks=50, crashes=4, hang=0.02, crash=0.02, poison=0.03, cancel=0.1
    ),
    Profile("shutdowns", pools=2, tasks=50, shutdowns=3, hang=0.02, crash=0.02, orders=6, deaf=0.2),
    Profile(
        "operators",
        pools=2,
        tasks=50,
        orders=25,
        slow_start=0.05,
        nursery_fails=0.1,
        nursery_exits=0.1,
        nursery_kills=2,
        crash=0.03,
        kills=3,
    ),
    Profile(
        "everything",
        pools=3,
        tasks=80,
        targets=6,
        poison=0.03,
        crash=0.04,
        hang=0.03,
        wedge=0.005,
        spawn_fails=0.05,
        open_fails=0.05,
        slow_start=0.03,
        nursery_fails=0.03,
        nursery_exits=0.05,
        kills=4,
        nursery_kills=1,
        reconnects=3,
        orders=8,
        crashes=2,
        shutdowns=1,
        queue_size=40,
        disk_ns=(200 * US, 100 * MS),
    ),
)


def profile_of(seed: int, rng: Random) -> Profile:
    profile = PROFILES[seed % len(PROFILES)]
    return replace(
        profile,
        tasks=max(4, int(profile.tasks * rng.uniform(0.3, 1.1))),
        faults_ns=int(profile.faults_ns * rng.uniform(0.3, 1.2)),
        batch=rng.randint(1, profile.batch),
        targets=rng.randint(1, profile.targets),
        clients=rng.randint(1, profile.clients),
        pools=rng.randint(1, profile.pools),
    )


def policy_of(profile: Profile, rng: Random) -> FleetPolicy:
    """An operator's choices: short, so that their ends are reached."""
    backoff = BackoffPolicy(base_ns=100 * MS, factor=2.0, max_ns=3 * SEC, jitter=0.1)
    restart = RestartPolicy(
        backoff=backoff, reset_ns=5 * SEC, limit=rng.randint(3, 10), window_ns=20 * SEC
    )
    return FleetPolicy(
        pools=tuple(
            PoolPolicy(
                name=f"pool{number}",
                size=rng.randint(*profile.slots),
                queue_size=profile.queue_size,
                aging_ns=rng.choice((50 * MS, 500 * MS, 5 * SEC)),
                task_timeout_ns=rng.choice((1, 5)) * SEC,
                start_timeout_ns=2 * SEC,
                restart=restart,
                max_crashes=rng.randint(1, 3),
            )
            for number in range(profile.pools)
        ),
        retry=RetryPolicy(max_retries=rng.randint(0, 3), backoff=backoff),
        drain_timeout_ns=rng.choice((1, 3)) * SEC,
        stop_timeout_ns=1 * SEC,
    )
