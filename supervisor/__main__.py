"""The `musterd` command."""

import faulthandler
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from musterd import __version__
from musterd.ipc.errors import ConfigurationError, SpawnError

EXIT_FAILED = 1
EXIT_CONFIGURATION = 78
EXIT_ANOTHER_INSTANCE = 69
EXIT_INTERNAL = 70
EXIT_SYSTEM = 71  # the system denies what is needed: too few descriptors
IMPORT_CHECK_SECONDS = 60  # a worker module that takes longer to import will not start either

_FILES = click.option(
    "-c",
    "--config",
    "files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Read this file instead of /etc/musterd/musterd.toml (repeatable).",
)
_PROFILE = click.option("--profile", metavar="NAME", help="development, production or your own.")
_SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one value, e.g. pools.parser.size=3 (repeatable).",
)


def _configured(command: Callable[..., Any]) -> Callable[..., Any]:
    return _FILES(_PROFILE(_SET(command)))


def _read(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> Any:
    from musterd.supervisor import config

    return config.load(list(files) or None, profile, list(overrides), os.environ)


def _load(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> Any:
    try:
        return _read(files, profile, overrides)
    except ConfigurationError as error:
        _fail(EXIT_CONFIGURATION, str(error))


def _fail(code: int, message: str) -> NoReturn:
    from musterd.supervisor.printable import printable

    click.echo(f"musterd: {printable(message, keep=chr(10))}", err=True)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="musterd")
def main() -> None:
    """Keeps a fleet of worker processes alive and feeds them prioritized, durable tasks."""


@main.command()
@_configured
def run(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> None:
    """Run the daemon in the foreground."""
    from setproctitle import setproctitle

    from musterd.supervisor import activation, descriptors, journal, paths
    from musterd.supervisor.instance import AnotherInstance, InstanceLock
    from musterd.supervisor.linux import use_one_heap
    from musterd.supervisor.store import StoreError

    loaded = _load(files, profile, overrides)
    settings = loaded.config.supervisor
    try:
        descriptors.provide(descriptors.needed_for(loaded.config))
    except descriptors.DescriptorsShort as error:
        _fail(EXIT_SYSTEM, str(error))
    use_one_heap()  # before there are threads
    faulthandler.enable()  # of a loop that hung, systemd's SIGABRT shows where
    try:
        handed = activation.take(os.environ)
        runtime = paths.runtime_dir(settings.runtime_dir)
        state = paths.state_dir(settings.state_dir)
        paths.prepare(runtime, state)
        paths.check_log_file(settings.log_file)
        journal.configure(settings.log_level, settings.log_file, settings.log_format)
        lock = InstanceLock(runtime, state)
    except ConfigurationError as error:
        _fail(EXIT_CONFIGURATION, str(error))
    except AnotherInstance as error:
        _fail(EXIT_ANOTHER_INSTANCE, str(error))
    setproctitle("musterd: supervisor")
    from musterd.supervisor.daemon import Daemon
    from musterd.supervisor.threads import ThreadEnded

    try:
        if not Daemon(loaded, lambda: _read(files, profile, overrides), handed).run():
            sys.exit(EXIT_INTERNAL)
    except (ConfigurationError, StoreError, SpawnError) as error:
        _fail(EXIT_CONFIGURATION, str(error))
    except ThreadEnded as error:
        logging.getLogger("musterd").critical("%s", error)
        sys.exit(EXIT_INTERNAL)
    except Exception:  # noqa: BLE001 - the last line of defence: say everything, then leave
        logging.getLogger("musterd").critical("internal error: %s", traceback.format_exc())
        sys.exit(EXIT_INTERNAL)
    finally:
        lock.release()


@main.command()
@_configured
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="Listen here: 127.0.0.1:9464 (the default), [::1]:9464 or unix:/path.",
)
def web(
    files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...], listen: str | None
) -> None:
    """Health, metrics and a page of a running daemon over HTTP (the daemon does it itself where
    http.listen is set)."""
    from musterd.supervisor.web.server import run as serve
    from musterd.supervisor.web.settings import settings_of

    if listen is not None:
        overrides = (*overrides, f"http.listen={listen}")
    loaded = _load(files, profile, overrides)
    try:
        settings = settings_of(loaded.config)
    except ConfigurationError as error:
        _fail(EXIT_CONFIGURATION, str(error))
    sys.exit(serve(settings))


@main.command("check-config")
@_configured
def check_config(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> None:
    """Check the configuration, and that every worker can be imported."""
    from musterd.supervisor.config_alerts import machine_problems
    from musterd.supervisor.worker_environment import given

    config = _load(files, profile, overrides).config
    problems = _setting_problems(config.supervisor, config.http)
    problems += machine_problems(config.alerts)
    problems += [
        f"key 'pools.{name}.worker': value \"{pool.worker}\": {problem}"
        for name, pool in config.pools.items()
        if pool.enabled
        and (
            problem := _import_problem(_asked(pool), given(name, pool, config), dict(pool.options))
        )
    ]
    problems += [
        f"key '{key}': value \"{name}\": {problem}"
        for key, name in _own_strategies(config)
        if (problem := _import_problem(f"backoff={name}", {}, {}))
    ]
    problems += [
        f"key 'supervisor.cleanup': value \"{name}\": {problem}"
        for name in config.supervisor.cleanup
        if (problem := _function_problem(name))
    ]
    if problems:
        _fail(EXIT_CONFIGURATION, "\n".join(problems))
    click.echo(f"the configuration is good: {len(config.pools)} pool(s)")


def _own_strategies(config: Any) -> list[tuple[str, str]]:
    """The functions named as strategies of retries, and where."""
    named = [("retry.strategy", config.retry.strategy)]
    tables: dict[str, Any] = {"classes": config.classes, "targets": config.targets}
    named += [
        (f"{table}.{name}.retry.strategy", each.retry.strategy or "")
        for table, entries in tables.items()
        for name, each in entries.items()
    ]
    return [(key, name) for key, name in named if ":" in name]


def _setting_problems(settings: Any, http: Any) -> list[str]:
    """What only this machine can tell of the settings; nothing is made for it."""
    from musterd.supervisor import paths
    from musterd.supervisor.config_http import check_extra
    from musterd.supervisor.control_socket import group_id_of
    from musterd.supervisor.web.token import read_token

    runtime = paths.runtime_dir(settings.runtime_dir)
    checks: tuple[Callable[[], object], ...] = (
        lambda: paths.check_lengths(runtime),
        lambda: group_id_of(settings.control_group, "supervisor.control_group"),
        lambda: group_id_of(settings.view_group, "supervisor.view_group"),
        lambda: group_id_of(settings.tasks_group, "supervisor.tasks_group"),
        lambda: group_id_of(http.group, "http.group"),
        lambda: check_extra(http),
        lambda: paths.check_log_file(settings.log_file),
        lambda: read_token(http.token_file) if http.token_file.startswith("/") else None,
    )
    problems = []
    for check in checks:
        try:
            check()
        except ConfigurationError as error:
            problems.append(str(error))
    return problems


def _asked(pool: Any) -> str:
    """The question to `python -m musterd.workers` about this pool's worker."""
    several = f"concurrency={pool.concurrency}=" if pool.concurrency > 1 else ""
    return f"{several}{pool.worker}"


def _import_problem(worker: str, env: dict[str, str], options: dict[str, Any]) -> str:
    """Why a worker with these options cannot be had, or "". Tried in a process of its own."""
    import msgspec

    from musterd.supervisor.worker_environment import inherited

    try:
        done = subprocess.run(
            [sys.executable, "-m", "musterd.workers", "--options", worker],
            env={**inherited(os.environ), **env},
            input=msgspec.json.encode(options).decode(),
            capture_output=True,
            text=True,
            check=False,
            timeout=IMPORT_CHECK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"importing it took more than {IMPORT_CHECK_SECONDS} s"
    if done.returncode == 0:
        return ""
    for line in done.stdout.splitlines():
        name, _, rest = line.partition("\t")
        if name == worker and rest.startswith("error\t"):
            return rest.removeprefix("error\t")
    return f"importing it ended with code {done.returncode}: {done.stderr.strip()[-500:]}"


def _function_problem(name: str) -> str:
    """Why a clean-up cannot be called, or "". Tried in a process of its own."""
    from musterd.supervisor.cleanup import CHECK, COMMAND

    try:
        done = subprocess.run(
            [*COMMAND, CHECK, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=IMPORT_CHECK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"importing it took more than {IMPORT_CHECK_SECONDS} s"
    if done.returncode == 0:
        return ""
    return f"it cannot be imported: {done.stderr.strip().rpartition(chr(10))[2][-500:]}"


@main.command("show-config")
@_configured
def show_config(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> None:
    """Print the merged configuration and where each value is from."""
    from musterd.supervisor.config import show
    from musterd.supervisor.printable import printable_json

    click.echo(printable_json(show(_load(files, profile, overrides))), nl=False)


@main.command()
@click.option("--tasks", default=60, show_default=True, help="How many pages to parse.")
@click.option(
    "--browser/--no-browser",
    default=None,
    help="Render pages in a real browser too (default: if one is installed).",
)
def demo(tasks: int, browser: bool | None) -> None:
    """Show the whole thing at work: a sample site, tasks, a killed worker, a clean end."""
    from musterd.supervisor.demo import run_demo

    sys.exit(run_demo(tasks, browser))


_ROOT = click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    default="/",
    help="Do it below this directory, for packages and images; systemd is not told then.",
)


@main.command()
@_ROOT
def install(root: Path) -> None:
    """Install the service: units, configuration, manual, completion; as root."""
    from musterd.supervisor import installing

    _installing(lambda: installing.install(root, click.echo))


@main.command()
@_ROOT
def uninstall(root: Path) -> None:
    """Stop the service and remove it; data and configuration stay."""
    from musterd.supervisor import installing

    _installing(lambda: installing.uninstall(root, click.echo))


def _installing(work: Callable[[], None]) -> None:
    from musterd.supervisor.installing import InstallError

    try:
        work()
    except InstallError as error:
        _fail(EXIT_FAILED, str(error))


if __name__ == "__main__":
    main()
