"""Implement musterctl: its commands, their output, the shell and `top`.

musterctl talks to the daemon over control.sock alone, and to a cluster through its PostgreSQL
(`cluster_link`). Without --cluster and `musterctl cluster` it imports nothing of the daemon.

May import: api, cluster, config, core.model, ipc.client, ipc.errors, ipc.resilience,
ipc.watching, ipc.wire, settings, store, system, text.
Not for: anything that runs in the daemon.
"""

import os
import sys

import click
import msgspec

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import envelope, rpc
from musterd.supervisor.ctl.app import (
    CLUSTER_UNREACHABLE,
    CLUSTER_UNUSABLE,
    DONE,
    FAILED,
    NO_SUCH_NAME,
    UNREACHABLE,
    USAGE,
    Settings,
    cli,
)
from musterd.supervisor.ctl.cluster_link import ClusterAway, ClusterUnusable
from musterd.supervisor.ctl.connection import NoAnswer, TooLong, Unreachable
from musterd.supervisor.ctl.output import emit_json, prepare_output, warn
from musterd.supervisor.ctl.supervisorctl import Instead

__all__ = ["main"]

COMPLETION = "_MUSTERCTL_COMPLETE"  # set by the scripts of shells

_CODE_OF = {rpc.NO_SUCH_NAME: NO_SUCH_NAME, rpc.INVALID_PARAMS: USAGE}


def main(arguments: list[str] | None = None) -> int:
    """Run musterctl and return its exit code."""
    prepare_output()
    if COMPLETION in os.environ:
        _prepare_completion()
    return _execute(sys.argv[1:] if arguments is None else arguments, Settings(shell=_shell))


def _prepare_completion() -> None:
    from click.shell_completion import add_completion_class

    from musterd.supervisor.text.shell_line import Bash

    add_completion_class(Bash)


def _shell(settings: Settings) -> int:
    from musterd.supervisor.ctl import shell  # readline is for people who type

    return shell.run(settings, lambda words: _execute(words, Settings()))


def _execute(words: list[str], settings: Settings) -> int:
    """Run one command, report its errors and return its exit code."""
    try:
        code = cli.main(words, prog_name="musterctl", standalone_mode=False, obj=settings)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "musterctl"
        what = error.format_message().rstrip(".")
        why = f"{what}{' ' if what.endswith('?') else ': '}see {path} --help"
        warn(why)
        if settings.json or "--json" in words:
            emit_json(msgspec.json.encode({"error": envelope.ErrorBody(USAGE, why)}))
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        return FAILED
    except msgspec.DecodeError as error:
        why = f"the daemon's answer cannot be decoded ({error})"
        return _failed(settings, NoAnswer(f"{why}: do the versions agree? see musterctl version"))
    except MusterdError as error:
        return _failed(settings, error)
    except OSError as error:
        warn(f"cannot show the answer: {error}")
        return FAILED
    return int(code or DONE)


def _failed(settings: Settings, error: MusterdError) -> int:
    """Print the error, with --json also on standard output, and return the exit code."""
    code, body = FAILED, envelope.ErrorBody(FAILED, str(error))
    if isinstance(error, Unreachable):
        code = NO_SUCH_NAME if settings.command == "status" else UNREACHABLE
        body = envelope.ErrorBody(code, str(error))
    elif isinstance(error, rpc.RpcError):
        code = _CODE_OF.get(error.code, FAILED)
        body = envelope.ErrorBody(error.code, error.message, error.data)
    elif isinstance(error, ClusterAway):
        code = CLUSTER_UNREACHABLE
        body = envelope.ErrorBody(code, str(error))
    elif isinstance(error, ClusterUnusable):
        code = CLUSTER_UNUSABLE
        body = envelope.ErrorBody(code, str(error))
    elif isinstance(error, (TooLong, Instead)):
        code = USAGE
        body = envelope.ErrorBody(code, str(error))
    warn(str(error))
    if settings.json:
        emit_json(msgspec.json.encode({"error": body}))
    return code
