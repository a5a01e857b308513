"""What all commands of musterctl share: options, requests to the daemon, exit codes.

    0  done                             4  no such name; `status`: daemon unreachable
    1  failed                           7  any other command: daemon unreachable
    2  usage
    3  `status`: not every pool at its target size
   69  PostgreSQL unreachable          78  the cluster is not configured, or cannot be used

A command asks the daemon, shows the answer and returns its exit code, or raises; `main` turns an
error into a line on standard error and an exit code. With --json the daemon's answer goes to
standard output unchanged, and the exit codes are the same.

With --cluster the answer comes from PostgreSQL (cluster_answers.py) in the place of the daemon's,
for the commands that have it.
"""

import os
import shlex
import sys
from collections.abc import Callable, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from msgspec import Raw, Struct

from musterd import __version__
from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import CommandResult
from musterd.supervisor.ctl import show, supervisorctl
from musterd.supervisor.ctl.arguments import Seconds
from musterd.supervisor.ctl.connection import Connection, Unreachable
from musterd.supervisor.ctl.output import emit, emit_json, warn

if TYPE_CHECKING:
    from musterd.supervisor.ctl.cluster_answers import ClusterConnection

    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # generic since click 8.2

DONE, FAILED, USAGE, NOT_AT_TARGET, NO_SUCH_NAME, UNREACHABLE = 0, 1, 2, 3, 4, 7
CLUSTER_UNREACHABLE, CLUSTER_UNUSABLE = 69, 78

ANSWER_SECONDS = 10.0  # for requests answered at once; a wait for an outcome has no limit

# The module of each command.
_MODULE_OF = {
    name: module
    for module, names in {
        "alerts": "alerts",
        "breakers": "breaker",
        "cluster": "cluster",
        "daemon": "reread reload update shutdown version clock",
        "debug": "debug",
        "fleet": "status start stop restart reset scale pause drain resume signal pid",
        "history": "changes history",
        "imports": "import",
        "memory": "memory",
        "schedules": "schedule",
        "sessions": "sessions",
        "streams": "events tail top",
        "tasks": "submit tasks task cache cancel dead retry purge",
    }.items()
    for name in names.split()
}

Answer = TypeVar("Answer")
Function = Callable[..., Any]


class Settings(Struct):
    """Options given before the command, and flags that may also follow it."""

    socket: str = ""
    json: bool = False
    timeout: float | None = None
    no_block: bool = False
    cluster: bool = False  # ask the cluster instead of the daemon
    config: tuple[str, ...] = ()  # files, for [cluster]
    url: str = ""  # of the cluster's PostgreSQL
    url_file: str = ""
    command: str = ""
    shell: Callable[["Settings"], int] | None = None  # runs where no command is given


class Commands(click.Group):
    """A group that says what to type where a command does not exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            from musterd.supervisor.ctl import suggest  # only for slips

            known = [*self.list_commands(ctx), *supervisorctl.LEAVE, *supervisorctl.HELP]
            before = [] if ctx.parent is None else [ctx.info_name or ""]
            named = " ".join((*before, args[0]))
            if before:
                near = suggest.nearest(args[0], self.list_commands(ctx))
                meant = shlex.join(("musterctl", *before, near, *args[1:]))
                says = f"did you mean {meant}?" if near else "see musterctl cluster --help"
            else:
                says = suggest.instead_of(args[0], args[1:], known)
            raise supervisorctl.Instead(f"there is no command {named}: {says}")
        return super().resolve_command(ctx, args)


class Action(_Choice):
    """What a command is to do: its first argument."""

    name = "action"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in self.choices:
            return str(value)
        from musterd.supervisor.ctl import suggest

        command = ctx.info_name if ctx is not None else ""
        near = suggest.instead_of_action(str(value), self.choices)
        says = f"did you mean musterctl {command} {near}? " if near else ""
        raise supervisorctl.Instead(
            f"there is no command {command} {value}: {says}there are {', '.join(self.choices)}"
        )


class Musterctl(Commands):
    """The group of all commands.

    A command loads its own module and no other: what the others import takes most of the time.
    """

    @property
    def commands(self) -> MutableMapping[str, click.Command]:
        """Return all commands, loaded."""
        for name in _MODULE_OF:
            self._load(name)
        return self._loaded

    @commands.setter
    def commands(self, loaded: MutableMapping[str, click.Command]) -> None:
        self._loaded = loaded

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        self._loaded[name or cmd.name or ""] = cmd

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._load(cmd_name)

    def _load(self, name: str) -> click.Command | None:
        if name not in self._loaded and name in _MODULE_OF:
            import_module(f"{__package__}.{_MODULE_OF[name]}")  # adds its commands
        return self._loaded.get(name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        for word in args:
            _check_text(ctx, word)
        if args[0] in supervisorctl.LEAVE:  # there is no shell to leave
            ctx.exit(DONE)
        if args[0] in supervisorctl.HELP:
            if len(args) == 1:
                emit(ctx.get_help())
                ctx.exit(DONE)
            args = [args[1], "--help"]
        return super().resolve_command(ctx, supervisorctl.meant(args))


def _check_text(ctx: click.Context, word: str) -> None:
    """Fail on a word that is not UTF-8: names, tasks and arguments are text. Paths need not be."""
    try:
        word.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(word).decode(errors="backslashreplace")
        ctx.fail(f"argument '{shown}' is not valid UTF-8: give text in UTF-8, or data as base64")


def _flag(attribute: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def remember(ctx: click.Context, _parameter: click.Parameter, given: bool) -> None:
        if given:
            setattr(ctx.ensure_object(Settings), attribute, True)

    return remember


_json = click.option(
    "--json", is_flag=True, expose_value=False, callback=_flag("json"), help="Print JSON."
)
no_block = click.option(
    "--no-block",
    is_flag=True,
    expose_value=False,
    callback=_flag("no_block"),
    help="Do not wait for the outcome.",
)


def _remember(attribute: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def remember(ctx: click.Context, _parameter: click.Parameter, given: Any) -> None:
        if given:
            setattr(ctx.ensure_object(Settings), attribute, given)

    return remember


on_cluster = click.option(
    "--cluster",
    is_flag=True,
    expose_value=False,
    callback=_flag("cluster"),
    help="Ask the cluster, about all its nodes, instead of the daemon.",
)
_cluster_place = (
    click.option(
        "-c",
        "--config",
        multiple=True,
        metavar="FILE",
        expose_value=False,
        callback=_remember("config"),
        help="Read [cluster] in this file. [default: /etc/musterd/musterd.toml]",
    ),
    click.option(
        "--url",
        metavar="URL",
        expose_value=False,
        callback=_remember("url"),
        help="The cluster's PostgreSQL instead of [cluster]; no password in it. "
        "[default: $MUSTERD_CLUSTER_URL]",
    ),
    click.option(
        "--url-file",
        metavar="FILE",
        expose_value=False,
        callback=_remember("url_file"),
        help="File with the URL of the cluster's PostgreSQL.",
    ),
)


def cluster_place(decorated: Function) -> Function:
    """Add the options that say where the cluster is."""
    for option in reversed(_cluster_place):
        decorated = option(decorated)
    return decorated


@click.group(
    cls=Musterctl,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "-s",
    "--socket",
    envvar="MUSTERD_CONTROL",
    help="The daemon's control.sock. [default: $MUSTERD_CONTROL, else that of `musterd dev` in "
    "this folder or above, else the first that exists in /run/musterd, $XDG_RUNTIME_DIR/musterd "
    "and this user's temporary directory]",
)
@_json
@click.option(
    "--timeout",
    type=Seconds(min=0, min_open=True),
    metavar="S",
    help=f"Seconds to wait for the answer. [default: {ANSWER_SECONDS:g}; none where a command "
    "waits for an outcome]",
)
@no_block
@on_cluster
@cluster_place
@click.version_option(__version__, message="musterctl %(version)s")
@click.pass_context
def cli(ctx: click.Context, socket: str | None, timeout: float | None) -> int:
    """Control a running musterd.

    Names are POOL, POOL/N for one slot, `all`, or globs of these.
    """
    settings = ctx.ensure_object(Settings)
    settings.socket = socket or ""
    settings.timeout = timeout
    if ctx.invoked_subcommand is None:
        if settings.shell is not None and sys.stdin.isatty() and sys.stdout.isatty():
            return settings.shell(settings)
        click.echo(ctx.get_help(), err=True)
        return USAGE
    settings.command = ctx.invoked_subcommand
    return DONE


def command(
    name: str, *options: Callable[[Function], Function], group: click.Group | None = None
) -> Callable[[Function], Function]:
    """Register a command that receives the settings and also takes --json after its name."""

    def register(function: Function) -> Function:
        decorated: Any = click.pass_obj(function)
        for option in reversed((*options, _json)):
            decorated = option(decorated)
        (group or cli).command(name)(decorated)
        return function

    return register


def completes(kind: str) -> Function:
    """Return what offers completions of this kind: see completion.py."""

    def complete(ctx: click.Context, _parameter: click.Parameter, begun: str) -> Any:
        from musterd.supervisor.ctl import completion  # only for who presses Tab

        return completion.offered(kind, ctx, begun)

    return complete


def _names(
    _ctx: click.Context, _parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    return tuple(supervisorctl.name_of(name) for name in given)


slot_names = click.argument(
    "names",
    nargs=-1,
    required=True,
    metavar="NAME...",
    shell_complete=completes("names"),
    callback=_names,
)
any_names = click.argument(
    "names", nargs=-1, metavar="[NAME...]", shell_complete=completes("names"), callback=_names
)


# -- requests ---------------------------------------------------------------------------------


def connect(settings: Settings, *, waits: bool = False) -> "Connection | ClusterConnection":
    """Connect to the daemon, or to the cluster where that is asked."""
    if settings.cluster:
        return connect_to_cluster(settings)
    timeout = settings.timeout
    if timeout is None and not waits:
        timeout = ANSWER_SECONDS
    path = settings.socket
    if not path:
        from musterd.ipc.wire.paths import find_control_socket

        try:
            path = str(find_control_socket())
        except ConfigurationError as error:
            raise Unreachable(str(error)) from error
    return Connection(path, timeout)


def connect_to_cluster(settings: Settings) -> "ClusterConnection":
    from musterd.supervisor.ctl.cluster_link import needs_psycopg

    needs_psycopg()
    from musterd.supervisor.ctl.cluster_answers import ClusterConnection

    return ClusterConnection(settings)


def ask(
    settings: Settings, params: rpc.Params, kind: type[Answer], *, waits: bool = False
) -> Answer:
    """Return the daemon's answer, decoded; with --json print it here, unchanged."""
    with connect(settings, waits=waits) as connection:
        result = connection.request(params)
    return understood(settings, result, kind)


def understood(settings: Settings, result: Raw, kind: type[Answer]) -> Answer:
    if settings.json:
        emit_json(result)
    return msgspec.json.decode(result, type=kind)


def list_or_act(
    settings: Settings,
    action: str,
    name: str | None,
    listed: Callable[[], str],
    done: Callable[[str], str],
    *,
    noun: str,
) -> int:
    """List everything, or act on the one that is named; print the text of either."""
    context = click.get_current_context()
    if action == "list" and name is not None:
        raise click.UsageError(f"'list' takes no {noun}, not {name!r}", context)
    if action != "list" and name is None:
        raise click.UsageError(f"'{action}' needs a {noun}", context)
    text = listed() if name is None else done(name)
    if not settings.json:
        emit(text)
    return DONE


def act(settings: Settings, params: rpc.Params) -> int:
    """Have something done to slots and report the outcome for each."""
    result = ask(settings, params, CommandResult, waits=not settings.no_block)
    return report(settings, result)


def report(settings: Settings, result: CommandResult) -> int:
    text = show.command(result)
    if text and not settings.json:
        emit(text)
    failed = [slot for slot in result.slots if not slot.ok]
    if failed:
        names = ", ".join(slot.name for slot in failed[:10])
        warn(f"{len(failed)} of {len(result.slots)} failed ({names}): see musterctl status")
        return FAILED
    return DONE
