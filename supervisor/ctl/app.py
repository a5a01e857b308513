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
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from msgspec import Raw, Struct

from musterd import __version__
from musterd.ipc.errors import ConfigurationError, MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import CommandResult, FleetStatus
from musterd.supervisor.ctl import show, supervisorctl
from musterd.supervisor.ctl.arguments import Seconds
from musterd.supervisor.ctl.connection import Connection, Unreachable
from musterd.supervisor.ctl.output import emit, emit_json, warn

if TYPE_CHECKING:
    from musterd.supervisor.ctl.cluster_answers import ClusterConnection

DONE, FAILED, USAGE, NOT_AT_TARGET, NO_SUCH_NAME, UNREACHABLE = 0, 1, 2, 3, 4, 7
CLUSTER_UNREACHABLE, CLUSTER_UNUSABLE = 69, 78

COMPLETION_SECONDS = 1.0  # nobody who pressed Tab waits longer
ANSWER_SECONDS = 10.0  # for requests answered at once; a wait for an outcome has no limit

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


class Musterctl(click.Group):
    """The group of all commands; suggests the nearest name for an unknown one."""

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
        args = supervisorctl.meant(args)
        name = args[0]
        if self.get_command(ctx, name) is None:
            import difflib

            near = difflib.get_close_matches(name, self.commands, 1)
            ctx.fail(f"no command {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)


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
    help="The daemon's control.sock. [default: $MUSTERD_CONTROL, else the first that exists in "
    "/run/musterd, $XDG_RUNTIME_DIR/musterd and this user's temporary directory]",
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


def _complete(ctx: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Return names of pools and slots that begin with `begun`; none if the daemon is slow."""
    given = ctx.find_root().params
    settings = Settings(socket=given.get("socket") or "", timeout=COMPLETION_SECONDS)
    try:
        fleet = ask(settings, rpc.Status(), FleetStatus)
    except (MusterdError, msgspec.DecodeError):
        return []
    pools = [pool.name for pool in fleet.pools]
    slots = [worker.name for pool in fleet.pools for worker in pool.workers]
    return [name for name in ("all", *pools, *slots) if name.startswith(begun)]


def _names(
    _ctx: click.Context, _parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    return tuple(supervisorctl.name_of(name) for name in given)


slot_names = click.argument(
    "names",
    nargs=-1,
    required=True,
    metavar="NAME...",
    shell_complete=_complete,
    callback=_names,
)
any_names = click.argument(
    "names", nargs=-1, metavar="[NAME...]", shell_complete=_complete, callback=_names
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
