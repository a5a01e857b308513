"""Check a configuration against this machine, for `musterd check-config`.

Are its groups and files there? Can its workers and functions be imported? Do its schedules name
tasks with arguments that fit? The check changes nothing. It imports modules in processes of their
own, because importing is running code.

Every problem is one line with the file and the key, as config/load.py writes them.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from musterd.ipc.client.taskspec import encode_args
from musterd.ipc.errors import ConfigurationError, InvalidTask, SessionError
from musterd.ipc.secrets.access import fits
from musterd.ipc.secrets.reference import from_json
from musterd.ipc.secrets.sessions import check_library
from musterd.ipc.wire.messages import USUAL
from musterd.supervisor.config import cluster
from musterd.supervisor.config.alerts import machine_problems
from musterd.supervisor.config.events import EventsConfig
from musterd.supervisor.config.http import HttpConfig, check_extra
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import ClassConfig, Config, SupervisorConfig, TargetConfig
from musterd.supervisor.config.sources import Key, dotted, one_line, shown
from musterd.supervisor.processes.cleanup import CHECK, COMMAND
from musterd.supervisor.processes.environment import inherited
from musterd.supervisor.settings.sessions import find_key, sessions_of
from musterd.supervisor.settings.worker_environment import given
from musterd.supervisor.sockets.listen import group_id_of
from musterd.supervisor.system import directories
from musterd.supervisor.text.units import SECOND_NS, format_duration
from musterd.supervisor.web.token import read_token

IMPORT_SECONDS = 60  # for a function that belongs to no pool
NAMES_SHOWN_MAX = 10
LAST_WORDS_MAX = 500  # characters kept of the output of a process that ended without an answer

Found = tuple[str, str]  # a key, and what is wrong with it


def machine_problems_of(config: Config, origins: Mapping[str, str]) -> list[str]:
    """Return all that is wrong with these values on this machine, one line each."""
    found: list[str] = []
    for key, problem in _all(config):
        origin = _origin(key, origins)
        found.append(one_line(f"{origin}: {problem}" if origin else problem))
    return found


def _all(config: Config) -> Iterator[Found]:
    yield from _of_settings(config.supervisor, config.http, config.events)
    try:
        cluster.check(config.cluster)
    except ConfigurationError as error:
        yield "cluster", str(error)
    for problem in machine_problems(config.alerts):
        yield problem.partition("'")[2].partition("'")[0], problem
    for name, pool in config.pools.items():
        if pool.enabled:
            yield from _of_pool(name, pool, config)
    for key, name in _named_strategies(config):
        yield from _of_name(key, name, f"backoff={name}", [{}])
    environments = [given(name, pool, config) for name, pool in config.pools.items()]
    for key, name in _named_exceptions(config):
        yield from _of_name(key, name, f"exception={name}", environments or [{}])
    yield from _of_sessions(config)
    for name in config.supervisor.cleanup:
        if problem := _function_problem(name):
            yield "supervisor.cleanup", _line("supervisor.cleanup", name, problem)


def remarks_of(config: Config) -> Iterator[str]:
    """Yield what people should know of a valid configuration: which sessions stay on this node."""
    usable = {
        name: sessions_of(name, pool, config)
        for name, pool in config.pools.items()
        if pool.enabled and config.cluster.wanted
    }
    stay: dict[tuple[str, ...], list[str]] = {}
    lack: dict[tuple[str, ...], list[str]] = {}
    for session in config.sessions.named:
        pools = [name for name in usable if fits(session, config.pools[name].sessions)]
        shared = [name for name in pools if config.cluster.shares(name)]
        own = tuple([name for name in pools if name not in shared and session in usable[name]])
        refused = tuple([name for name in shared if session not in usable[name]])
        if own:
            stay.setdefault(own, []).append(session)
        if refused:
            lack.setdefault(refused, []).append(session)
    for names, found in stay.items():
        yield f"sessions of pool(s) {_few(names)} stay on this node: {_few(found)}"
    for names, found in lack.items():
        mend = "have the login_task and its pool shared, or neither"
        if not config.sessions.has_shared_key:
            mend = "give sessions.key_secret or sessions.key_file, the same on all machines"
        yield (
            f"tasks of the shared pool(s) {_few(names)} are refused with these sessions: "
            f"{_few(found)}: {mend}"
        )


def _few(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _line(key: str, value: str, problem: str) -> str:
    return f"key '{key}': value {shown(value)}: {problem}"


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Return where a key was set, or the nearest table above it."""
    while key:
        if key in origins:
            return origins[key]
        below = [origin for each, origin in origins.items() if each.startswith(f"{key}.")]
        if below:
            return below[0]
        key = key.rpartition(".")[0]
    return ""


# -- settings ---------------------------------------------------------------------------------


def _of_settings(
    settings: SupervisorConfig, http: HttpConfig, published: EventsConfig
) -> Iterator[Found]:
    runtime = directories.runtime_dir(settings.runtime_dir)
    token = http.token_file
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("supervisor.runtime_dir", lambda: directories.check_lengths(runtime)),
        *(
            (
                f"supervisor.{key}",
                lambda key=key: group_id_of(getattr(settings, key), f"supervisor.{key}"),
            )
            for key in ("control_group", "view_group", "tasks_group")
        ),
        ("http.group", lambda: group_id_of(http.group, "http.group")),
        ("events.group", lambda: group_id_of(published.group, "events.group")),
        ("http.listen", lambda: check_extra(http)),
        ("supervisor.log_file", lambda: directories.check_log_file(settings.log_file)),
        ("http.token_file", lambda: read_token(token) if token.startswith("/") else None),
    )
    for key, check in checks:
        try:
            check()
        except ConfigurationError as error:
            yield key, str(error)


# -- pools and their schedules ----------------------------------------------------------------


def _of_pool(name: str, pool: PoolConfig, config: Config) -> Iterator[Found]:
    """Yield why its worker cannot be loaded, or cannot do what its schedules ask for."""
    schedules = []
    for schedule, each in config.schedule.items():
        if each.task.partition(".")[0] == name and each.enabled:
            try:
                args = encode_args(each.task, from_json(each.args))
            except (InvalidTask, ValueError):
                continue  # config/load.py has reported it
            schedules.append((schedule, each.task.partition(".")[2], args))
    key = f"pools.{name}.worker"
    several = f"concurrency={pool.concurrency}=" if pool.concurrency > 1 else ""
    seconds = pool.start_timeout_ns / SECOND_NS
    answers = _ask(
        f"{several}{pool.worker}",
        given(name, pool, config),
        seconds,
        options=pool.options,
        schedules=schedules,
    )
    if answers is None:
        limit = format_duration(pool.start_timeout_ns)
        problem = f"importing it took longer than start_timeout ({limit}): raise it"
        yield key, _line(key, pool.worker, problem)
        return
    if "" in answers:
        problem = answers[""].removeprefix(f"worker = {pool.worker!r}: ")
        yield key, _line(key, pool.worker, problem)
    for schedule, _, _ in schedules:
        for part, value in (("task", config.schedule[schedule].task), ("args", "")):
            if problem := answers.get(f"{schedule}.{part}", ""):
                where = dotted(("schedule", schedule, part))
                line = _line(where, value, problem) if value else f"key '{where}': {problem}"
                yield where, line


def _ask(
    question: str,
    env: Mapping[str, str],
    seconds: float,
    *,
    options: dict[str, Any] | None = None,
    schedules: list[tuple[str, str, bytes]] | None = None,
) -> dict[str, str] | None:
    """Return what is wrong, by subject ("": the worker or function itself); None on a timeout."""
    asked = {"options": options or {}, "schedules": schedules or []}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "musterd.workers", "--given", question],
            env={**inherited(os.environ), **env},
            input=msgspec.json.encode(asked),
            capture_output=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return {}
    for line in reversed(done.stdout.splitlines()):  # the lines before are output of the import
        try:
            return msgspec.json.decode(line, type=dict[str, str])
        except msgspec.DecodeError:
            continue
    said = done.stderr.decode(errors="replace").strip()[-LAST_WORDS_MAX:]
    return {"": f"importing it ended with code {done.returncode}: {said}"}


# -- names of functions and exceptions ----------------------------------------------------------


def _named_strategies(config: Config) -> Iterator[Found]:
    """Yield the functions named as retry strategies, and where."""
    named = [("retry.strategy", config.retry.strategy)]
    named += [
        (dotted((*path, "retry", "strategy")), each.retry.strategy or "")
        for path, each in _sites_and_classes(config)
    ]
    return ((key, name) for key, name in named if ":" in name)


def _named_exceptions(config: Config) -> Iterator[Found]:
    for path, each in _sites_and_classes(config):
        for exception in each.counts or ():
            if exception != USUAL and ":" in exception:
                yield dotted((*path, "counts")), exception


def _sites_and_classes(config: Config) -> Iterator[tuple[Key, ClassConfig | TargetConfig]]:
    for name, of_class in config.classes.items():
        yield ("classes", name), of_class
    yield ("target_defaults",), config.target_defaults
    for name, target in config.targets.items():
        yield ("targets", name), target


def _of_sessions(config: Config) -> Iterator[Found]:
    """Yield why sessions cannot be encrypted, or their logins not be imported."""
    if not config.sessions.named:
        return
    try:
        check_library()
        find_key(config)
    except (SessionError, ConfigurationError) as error:
        yield "sessions", str(error)
    usable = [
        (given(each, pool, config), sessions_of(each, pool, config))
        for each, pool in config.pools.items()
    ]
    for name, session in config.sessions.named.items():
        pools = [environment for environment, sessions in usable if name in sessions]
        key = dotted(("sessions", name, "login"))
        if not pools:
            where = dotted(("sessions", name))
            why = "see pools.*.sessions"
            if config.cluster.wanted:
                why += (
                    "; in pools that are shared by the cluster, give sessions.key_secret or "
                    "sessions.key_file, the same on all machines, and a login_task of a shared pool"
                )
            yield key, f"key '{where}': no pool may use it: {why}"
        elif session.login:
            yield from _of_name(key, session.login, f"function={session.login}", pools)


def _of_name(
    key: str, name: str, question: str, environments: list[dict[str, str]]
) -> Iterator[Found]:
    """Yield why a name cannot be imported by the workers of any pool."""
    problem = ""
    for env in environments:
        answers = _ask(question, env, IMPORT_SECONDS)
        if answers == {}:
            return
        problem = f"importing it took more than {IMPORT_SECONDS} s"
        if answers is not None:
            problem = answers.get("", "it cannot be imported")
    yield key, _line(key, name, problem)


def _function_problem(name: str) -> str:
    """Return why a clean-up cannot be called, or ""."""
    try:
        done = subprocess.run(
            [*COMMAND, CHECK, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"importing it took more than {IMPORT_SECONDS} s"
    if done.returncode == 0:
        return ""
    return f"it cannot be imported: {done.stderr.strip().rpartition(chr(10))[2][-LAST_WORDS_MAX:]}"
