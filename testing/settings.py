"""Configuration of a worker under test: the user's own, or that of a daemon that has none."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct, structs

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config.load import load
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import Config
from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy
from musterd.supervisor.processes.forkserver_messages import WorkerSettings
from musterd.supervisor.settings import worker_environment
from musterd.supervisor.settings.artefacts import keep_of
from musterd.supervisor.settings.policy import fleet_policy, worker_settings_of
from musterd.supervisor.settings.sessions import session_access, with_sessions
from musterd.workers.authoring.base import Worker

# Of other workers, which hold locks: see LocalWorker.hold_lock().
ELSEWHERE = "elsewhere"
HOLDS_AT_ONCE = 64

Given = str | Path | Mapping[str, Any] | Sequence[str | Path] | None


class Settings(Struct, frozen=True):
    """What a daemon would tell the core, its fork server and the worker."""

    pool: str
    policy: FleetPolicy
    worker: WorkerSettings
    options: dict[str, Any]
    environment: dict[str, str]
    redact: tuple[str, ...]
    log_level: str
    start_timeout_ns: int
    health_timeout_ns: int


class Middle(Random):
    """Chance that is always in the middle: pauses between attempts are those without jitter."""

    def random(self) -> float:
        return 0.5


def name_of(worker: type[Worker] | ModuleType) -> str:
    """Return a worker as configurations name it, "module:Class" or "module"."""
    if isinstance(worker, ModuleType):
        return worker.__name__
    return f"{worker.__module__}:{worker.__qualname__}"


def settings_of(
    worker: type[Worker] | ModuleType,
    folder: Path,
    *,
    config: Given,
    pool: str,
    options: Mapping[str, Any],
    secrets: Mapping[str, str],
    concurrency: int | None,
) -> Settings:
    """Return the settings of a worker; ConfigurationError lists what is wrong with them."""
    files = files_of(config, folder)
    pools = load(files, environ={}).config.pools if files else {}
    pool = pool or _pool_of(name_of(worker), pools) or _usual_pool(worker)
    own = {"options": dict(options), "env": dict(secrets), "concurrency": concurrency}
    section: dict[str, Any] = {key: value for key, value in own.items() if value}
    section["enabled"] = True
    if pool not in pools:
        section["worker"] = "musterd:Worker"  # the class is given, and never imported by its name
    added: dict[str, Any] = {
        "supervisor": {"runtime_dir": str(folder / "run"), "state_dir": str(folder / "state")},
        "memory": {"enabled": False},
        "pools": {pool: section},
    }
    own_file = _write(folder / "fixture.json", added)
    loaded = load([*files, own_file], environ={}).config
    own_file.unlink()  # it has the secrets
    return _settings(pool, loaded.pools[pool], loaded, folder)


def files_of(config: Given, folder: Path) -> list[Path]:
    """Return the configuration files; a mapping is written to one."""
    if config is None:
        return []
    if isinstance(config, Mapping):
        return [_write(folder / "config.json", config)]
    given = [config] if isinstance(config, str | Path) else list(config)
    missing = [str(each) for each in given if not Path(each).is_file()]
    if missing:
        raise ConfigurationError(
            f"there is no configuration {missing[0]} (in {Path.cwd()}, where the test runs): give "
            "a path from there, such as Path(__file__).parent / 'musterd.toml'"
        )
    return [Path(each).absolute() for each in given]


def _write(path: Path, config: Mapping[str, Any]) -> Path:
    try:
        path.write_bytes(msgspec.json.encode(config))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the configuration, with its options, must be plain data as in a file: {error}"
        ) from None
    return path


def _pool_of(worker: str, pools: Mapping[str, PoolConfig]) -> str:
    """Return the pool of a configuration that runs this worker; "" if there is none."""
    found = [name for name, pool in pools.items() if pool.worker == worker]
    if len(found) > 1:
        raise ConfigurationError(
            f"pools {', '.join(found)} run {worker}: say which one is meant, pool={found[0]!r}"
        )
    return found[0] if found else ""


def _usual_pool(worker: type[Worker] | ModuleType) -> str:
    """Return a name as people would give it: "promo_watch" for PromoWatch."""
    if isinstance(worker, ModuleType):
        text = worker.__name__.rpartition(".")[2]
    else:
        text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", worker.__name__)
    name = re.sub(r"[^a-z0-9_-]", "", text.lower()).lstrip("0123456789_-")
    return name or "worker"


def _settings(name: str, pool: PoolConfig, config: Config, folder: Path) -> Settings:
    plain = Config()
    config = structs.replace(
        config,
        pools={name: pool},
        schedule={},
        alerts={},
        http=plain.http,
        events=plain.events,
        cluster=plain.cluster,
    )
    policy = fleet_policy(config)
    worker = with_sessions(worker_settings_of(pool), session_access(name, pool, config))
    if config.artefacts.enabled:
        keep = structs.replace(keep_of(config), folder=str(folder))
        worker = structs.replace(worker, artefacts=msgspec.msgpack.encode(keep))
    return Settings(
        pool=name,
        policy=structs.replace(
            policy,
            pools=(_alone(policy.pools[0]), _alone(PoolPolicy(ELSEWHERE, 1))),
        ),
        worker=worker,
        options=pool.options,
        environment=worker_environment.given(name, pool, config, environ={}),
        redact=config.supervisor.redact,
        log_level=config.supervisor.log_level,
        start_timeout_ns=pool.start_timeout_ns,
        health_timeout_ns=pool.health_timeout_ns,
    )


def _alone(policy: PoolPolicy) -> PoolPolicy:
    """Return the policy of a pool with one worker, which nobody watches or replaces."""
    return structs.replace(
        policy,
        size=1,
        scaling=None,
        spare=False,
        heartbeat_timeout_ns=0,
        health_timeout_ns=0,
        max_tasks=0,
        max_age_ns=0,
        max_memory_bytes=0,
    )
