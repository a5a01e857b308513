"""What workers are told about sessions, and the key that encrypts them.

A key that nobody gives is generated once. It lies beside state_dir, not inside: the daemon may
write there, and neither a copy of state_dir nor one of /etc/musterd, as backups are made, has both
the sessions and their key.
"""

import base64
import contextlib
import os
import secrets
import stat
from pathlib import Path

import msgspec
from msgspec import structs

from musterd.ipc.client.taskspec import encode_args
from musterd.ipc.errors import ConfigurationError
from musterd.ipc.resilience.policy import BreakerPolicy
from musterd.ipc.secrets.access import fits
from musterd.ipc.secrets.lookup import MissingSecret, find_secret, read_secret
from musterd.ipc.secrets.reference import from_json
from musterd.ipc.secrets.sessions import DAY_NS, SessionAccess, SessionRule, key_of
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import Config
from musterd.supervisor.config.sessions import SessionConfig
from musterd.supervisor.core.model.policy import SessionPolicy
from musterd.supervisor.processes.forkserver_messages import WorkerSettings
from musterd.supervisor.system import directories

KEYS_DIR = "-keys"  # after the name of state_dir: /var/lib/musterd-keys
KEY_FILE = "sessions.key"
GENERATED_BYTES = 32
EMPTY_ARGS = b"\x80"
LOGIN_PAUSE_MAX_NS = DAY_NS  # the longest pause after logins that fail


def sessions_of(name: str, pool: PoolConfig, config: Config) -> dict[str, SessionConfig]:
    """Return the sessions that tasks of this pool may use."""
    named = {
        each: session
        for each, session in config.sessions.named.items()
        if fits(each, pool.sessions)
    }
    shares = config.cluster.shares(name)
    if shares and not config.sessions.has_shared_key:
        return {}
    return {each: session for each, session in named.items() if _logs_in(session, config, shares)}


def _logs_in(session: SessionConfig, config: Config, shares: bool) -> bool:
    """Whether the login task of a session, if it has one, runs where its other tasks do."""
    pool = session.login_task.partition(".")[0]
    return not pool or config.cluster.shares(pool) == shares


def session_rules(name: str, pool: PoolConfig, config: Config) -> dict[str, SessionRule]:
    return {
        each: SessionRule(
            session.login,
            login_args(each, session) if session.login else EMPTY_ARGS,
            session.concurrent,
            session.logged_out,
            session.sites,
            session.keep_ns,
            session.login_task,
        )
        for each, session in sessions_of(name, pool, config).items()
    }


def login_args(name: str, session: SessionConfig) -> bytes:
    """Return the arguments of a login, with references to secrets."""
    return encode_args(f"the login of {name}", from_json(session.args))


def session_policy(name: str, session: SessionConfig) -> SessionPolicy:
    """Return what the core has to know of a session."""
    return SessionPolicy(
        session.concurrent,
        session.login_task,
        login_args(name, session) if session.login_task else EMPTY_ARGS,
        BreakerPolicy(
            enabled=session.login_failures > 0,
            failures=session.login_failures,
            open_ns=session.login_pause_ns,
            open_max_ns=max(LOGIN_PAUSE_MAX_NS, session.login_pause_ns),
            successes=1,
        ),
    )


def session_access(name: str, pool: PoolConfig, config: Config) -> SessionAccess:
    """Return the sessions that a pool's workers may use with their key, or why there is no key."""
    rules = session_rules(name, pool, config)
    if not rules:
        return SessionAccess()
    try:
        return SessionAccess(rules, find_key(config, make=True))
    except ConfigurationError as error:
        return SessionAccess(rules, problem=str(error))


def with_sessions(settings: WorkerSettings, access: SessionAccess) -> WorkerSettings:
    """Return the settings of a pool's workers, with sessions and their key if it may use any."""
    if not access.rules:
        return settings
    return structs.replace(settings, sessions=msgspec.msgpack.encode(access))


def key_file(config: Config) -> Path:
    """Return the file of the key where no secret has it."""
    if config.sessions.key_file:
        return Path(config.sessions.key_file)
    state = directories.state_dir(config.supervisor.state_dir)
    return state.with_name(state.name + KEYS_DIR) / KEY_FILE


def find_key(config: Config, *, make: bool = False) -> bytes:
    """Return the key of sessions, which `make` generates if nobody gives one.

    ConfigurationError says why there is none. Without `make` it may be still to be generated: b"".
    """
    given = config.sessions
    path = key_file(config)
    key, where = "sessions.key_file", str(path)
    try:
        if given.key_secret:
            key, where = "sessions.key_secret", given.key_secret
            return key_of(find_secret(given.key_secret))
        if path.exists() or given.key_file:
            _check_private(path)
            return key_of(read_secret(where, path))
        if not make:
            return b""
        try:
            _generate(path)
        except OSError as error:
            raise ValueError(
                f"no key can be generated there ({error.strerror}): make {path.parent} for the "
                "user of the daemon, or give sessions.key_file or sessions.key_secret"
            ) from None
        return key_of(read_secret(where, path))
    except (MissingSecret, ValueError, OSError) as error:
        raise ConfigurationError(f"key '{key}': {where}: {error}") from None


def _check_private(path: Path) -> None:
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ValueError(
            f"others may read or change it (mode {stat.S_IMODE(mode):04o}): chmod 600 it, and "
            "give sessions another key if it was read"
        )


def _generate(path: Path) -> None:
    """Make the file whole or not at all; another daemon may make it at the same time."""
    path.parent.mkdir(mode=directories.PRIVATE_DIR_MODE, exist_ok=True)
    text = base64.b64encode(secrets.token_bytes(GENERATED_BYTES))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # the other one's is as good
            os.link(temporary, path)
    finally:
        temporary.unlink()
