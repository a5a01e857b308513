"""Be musterctl: commands, what they show, the shell and `top`.

It talks to the daemon over control.sock alone.

May import: api, core.model, ipc.client, ipc.errors, ipc.resilience, ipc.wire, system, text.
Not for: anything that runs in the daemon.
"""

import sys

import click
import msgspec

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.ctl import (  # noqa: F401 - they add their commands to cli
    alerts,
    breakers,
    clocks,
    dead,
    fleet,
    memory,
    reloads,
    schedules,
    streams,
    tasks,
)
from musterd.supervisor.ctl.app import (
    DONE,
    FAILED,
    NO_SUCH_NAME,
    UNREACHABLE,
    USAGE,
    Settings,
    cli,
)
from musterd.supervisor.ctl.connection import NoAnswer, TooLong, Unreachable
from musterd.supervisor.ctl.habits import Instead
from musterd.supervisor.ctl.output import emit_json, prepare_output, warn

__all__ = ["main"]

_CODE_OF = {rpc.NO_SUCH_NAME: NO_SUCH_NAME, rpc.INVALID_PARAMS: USAGE}


def main(arguments: list[str] | None = None) -> int:
    """Runs musterctl and returns its exit code."""
    prepare_output()
    return _execute(sys.argv[1:] if arguments is None else arguments, Settings(shell=_shell))


def _shell(settings: Settings) -> int:
    from musterd.supervisor.ctl import shell  # readline is for people who type

    return shell.run(settings, lambda words: _execute(words, Settings()))


def _execute(words: list[str], settings: Settings) -> int:
    """Runs one command and returns its exit code; whatever went wrong is told."""
    try:
        code = cli.main(words, prog_name="musterctl", standalone_mode=False, obj=settings)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "musterctl"
        warn(f"{error.format_message().rstrip('.')}: see {path} --help")
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        return FAILED
    except msgspec.DecodeError as error:
        why = f"the daemon's answer is not understood ({error})"
        return _failed(settings, NoAnswer(f"{why}: do the versions agree? see musterctl version"))
    except MusterdError as error:
        return _failed(settings, error)
    except OSError as error:
        warn(f"cannot show the answer: {error}")
        return FAILED
    return int(code or DONE)


def _failed(settings: Settings, error: MusterdError) -> int:
    """Tells the error, with --json on standard output as well, and chooses the exit code."""
    code, body = FAILED, rpc.ErrorBody(FAILED, str(error))
    if isinstance(error, Unreachable):
        code = NO_SUCH_NAME if settings.command == "status" else UNREACHABLE
        body = rpc.ErrorBody(code, str(error))
    elif isinstance(error, rpc.RpcError):
        code = _CODE_OF.get(error.code, FAILED)
        body = rpc.ErrorBody(error.code, error.message, error.data)
    elif isinstance(error, (TooLong, Instead)):
        code = USAGE
    warn(str(error))
    if settings.json:
        emit_json(msgspec.json.encode({"error": body}))
    return code
