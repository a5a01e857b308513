"""The `musterd` command line.

May import: config, ctl, demo, dev, ipc.errors, log, loop, service, settings, sockets, store,
system, text, web.
"""

import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from musterd import __version__
from musterd.ipc.errors import ConfigurationError, MusterdError, SpawnError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFIGURATION = 78
EXIT_ANOTHER_INSTANCE = 69
EXIT_INTERNAL = 70
EXIT_SYSTEM = 71  # the system refuses a resource: too few descriptors

_FILES = click.option(
    "-c",
    "--config",
    "files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Read this file instead of /etc/musterd/musterd.toml (repeatable).",
)
_PROFILE = click.option(
    "--profile", metavar="NAME", help="Profile: development, production or your own."
)
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
    from musterd.supervisor.config import load

    return load.load(list(files) or None, profile, list(overrides), os.environ)


def _tell_unread(files: tuple[Path, ...]) -> None:
    """Say that the configuration in this folder is not read; not in the log of a service."""
    from musterd.supervisor.config.load import DEFAULT_FILE

    here, usual = DEFAULT_FILE.name, os.path.exists(DEFAULT_FILE)
    if files or not os.path.isfile(here) or (usual and os.path.samefile(here, DEFAULT_FILE)):
        return
    if sys.stderr is not None and (not usual or sys.stderr.isatty()):
        click.echo(f"musterd: {here} in this folder is not read: type -c {here}", err=True)


def _load(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> Any:
    try:
        return _read(files, profile, overrides)
    except ConfigurationError as error:
        _fail(EXIT_CONFIGURATION, str(error))


def _fail(code: int, message: str) -> NoReturn:
    from musterd.supervisor.text.printable import printable

    click.echo(f"musterd: {printable(message, keep=chr(10))}", err=True)
    sys.exit(code)


class Commands(click.Group):
    """The commands; one that does not exist is answered with what to type."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from musterd.supervisor.ctl.app import cli
            from musterd.supervisor.ctl.suggest import instead_of_musterd

            known = self.list_commands(ctx), cli.list_commands(ctx)
            says = instead_of_musterd(name, args[1:], *known)
            _fail(EXIT_USAGE, f"there is no command {name}: {says}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="musterd")
def main() -> None:
    """Keep a fleet of worker processes alive and feed them prioritized, durable tasks."""


@main.command()
@_configured
def run(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> None:
    """Run the daemon in the foreground."""
    from setproctitle import setproctitle

    from musterd.supervisor.log import log
    from musterd.supervisor.service.instance import AnotherInstance, InstanceLock
    from musterd.supervisor.sockets import activation
    from musterd.supervisor.store.interface import StoreError
    from musterd.supervisor.system import directories

    _tell_unread(files)
    loaded = _load(files, profile, overrides)
    settings = loaded.config.supervisor
    _prepare_process(loaded.config)
    try:
        handed = activation.take(os.environ)
        runtime = directories.runtime_dir(settings.runtime_dir)
        state = directories.state_dir(settings.state_dir)
        directories.prepare(runtime, state)
        directories.check_log_file(settings.log_file)
        developing = settings.profile == "development"
        log.configure(
            settings.log_level, settings.log_file, settings.log_format, developing=developing
        )
        lock = InstanceLock(runtime, state)
    except ConfigurationError as error:
        _fail(EXIT_CONFIGURATION, str(error))
    except AnotherInstance as error:
        _fail(EXIT_ANOTHER_INSTANCE, str(error))
    setproctitle("musterd: supervisor")
    from musterd.supervisor.loop.daemon import Daemon
    from musterd.supervisor.system.threads import ThreadEnded

    try:
        daemon = Daemon(loaded, lambda: _read(files, profile, overrides), handed)
        if not daemon.run():
            sys.exit(EXIT_INTERNAL)
        if daemon.exit_code:
            sys.exit(daemon.exit_code)
    except (ConfigurationError, StoreError, SpawnError) as error:
        _fail(EXIT_CONFIGURATION, str(error))
    except ThreadEnded as error:
        logging.getLogger("musterd").critical("%s", error)
        sys.exit(EXIT_INTERNAL)
    except Exception:  # noqa: BLE001 - the last line of defence: log everything, then exit
        logging.getLogger("musterd").critical("internal error: %s", traceback.format_exc())
        sys.exit(EXIT_INTERNAL)
    finally:
        lock.release()


@main.command()
@click.argument("name")
def new(name: str) -> None:
    """Make a project: a worker, its configuration and its test, in the folder NAME."""
    from musterd.supervisor.dev.new import make

    try:
        click.echo(make(name, Path.cwd()))
    except MusterdError as error:
        _fail(EXIT_FAILED, str(error))


@main.command()
@_configured
def dev(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> None:
    """Run a project in this terminal, and reload what is saved.

    Without -c: the musterd.toml of this folder. Sockets and state are in .musterd beside it, unless
    it names other directories.
    """
    from musterd.supervisor.dev.run import run_dev

    try:
        sys.exit(run_dev(files, profile, overrides))
    except ConfigurationError as error:
        _fail(EXIT_CONFIGURATION, str(error))
    except MusterdError as error:
        _fail(EXIT_FAILED, str(error))


@main.command()
@_configured
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="Address to listen on: 127.0.0.1:7717 (the default), [::1]:7717 or unix:/path.",
)
def web(
    files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...], listen: str | None
) -> None:
    """Serve health, metrics and the dashboard over HTTP.

    The daemon does this itself where http.listen is set.
    """
    from musterd.supervisor.settings.sidecars import web_settings
    from musterd.supervisor.web.server import run as serve

    if listen is not None:
        overrides = (*overrides, f"http.listen={listen}")
    loaded = _load(files, profile, overrides)
    try:
        settings = web_settings(loaded.config)
    except ConfigurationError as error:
        _fail(EXIT_CONFIGURATION, str(error))
    sys.exit(serve(settings))


@main.command("check-config")
@_configured
def check_config(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> None:
    """Check the configuration, its workers and its schedules."""
    from musterd.supervisor.config.load import Invalid
    from musterd.supervisor.config.sources import one_line
    from musterd.supervisor.service.check_config import machine_problems_of, remarks_of

    _tell_unread(files)
    problems: list[str] = []
    try:
        loaded = _read(files, profile, overrides)
    except Invalid as error:  # the rest is checked all the same
        problems, loaded = str(error).split("\n"), error.loaded
    problems += machine_problems_of(loaded.config, loaded.origins)
    if problems:
        _fail(EXIT_CONFIGURATION, "\n".join(dict.fromkeys(problems)))
    made = loaded.config
    schedules = f", {len(made.schedule)} schedule(s)" if made.schedule else ""
    click.echo(f"the configuration is valid: {len(made.pools)} pool(s){schedules}")
    for remark in remarks_of(made):
        click.echo(one_line(remark))


@main.command("show-config")
@_configured
def show_config(files: tuple[Path, ...], profile: str | None, overrides: tuple[str, ...]) -> None:
    """Print the merged configuration and the source of each value."""
    from musterd.supervisor.config.load import show
    from musterd.supervisor.text.printable import printable_json

    _tell_unread(files)
    click.echo(printable_json(show(_load(files, profile, overrides))), nl=False)


@main.command()
@click.option("--tasks", default=60, show_default=True, help="Number of pages to parse.")
@click.option(
    "--browser/--no-browser",
    default=None,
    help="Also render pages in a browser (default: if one is installed).",
)
@click.option("--stay", is_flag=True, help="Keep everything up until Enter is pressed.")
def demo(tasks: int, browser: bool | None, stay: bool) -> None:
    """Show musterd at work on a sample site. One worker is killed on the way."""
    from musterd.supervisor.demo.run import run_demo

    sys.exit(run_demo(tasks, browser, stay=stay))


_ROOT = click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    default="/",
    help="Install below this directory, for packages and images; systemd is not reloaded.",
)


@main.command()
@_ROOT
def install(root: Path) -> None:
    """Install the service, as root. With units, configuration, manual pages and completion."""
    from musterd.supervisor.service import install as installing

    _installing(lambda: installing.install(root, click.echo, _manual()))


@main.command()
@_ROOT
def uninstall(root: Path) -> None:
    """Stop and remove the service; keep data and configuration."""
    from musterd.supervisor.service import install as installing

    _installing(lambda: installing.uninstall(root, click.echo, _manual()))


def _prepare_process(config: Any) -> None:
    """Raise the descriptor limit, use one heap, and dump stacks on SIGABRT."""
    from musterd.supervisor.settings.policy import descriptors_needed
    from musterd.supervisor.system import descriptors
    from musterd.supervisor.system.linux import use_one_heap

    try:
        descriptors.provide(descriptors_needed(config))
    except descriptors.DescriptorsShort as error:
        _fail(EXIT_SYSTEM, str(error))
    except ConfigurationError as error:
        _fail(EXIT_CONFIGURATION, str(error))
    use_one_heap()  # before there are threads
    faulthandler.enable()  # systemd's SIGABRT shows where a loop hangs


def _manual() -> list[Any]:
    """Return the manual pages, generated from the commands."""
    from musterd.supervisor.ctl.app import cli
    from musterd.supervisor.service import manpages

    return list(manpages.pages(main, cli))


def _installing(work: Callable[[], None]) -> None:
    from musterd.supervisor.service.install import InstallError

    try:
        work()
    except InstallError as error:
        _fail(EXIT_FAILED, str(error))


if __name__ == "__main__":
    main()
