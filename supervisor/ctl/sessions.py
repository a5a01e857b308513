"""musterctl sessions: list the sessions of sites, forget or reset one."""

import click

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import SessionList, SessionStatus
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import Settings, ask, command, list_or_act
from musterd.supervisor.text.printable import printable

_HEADS = ["SESSION", "SITE", "LOGIN", "SAVED", "SIZE", "RUNNING", "WAITING"]
_NO_STATE = -1  # no column is coloured by a state


@command(
    "sessions",
    click.argument("action", type=click.Choice(("list", "forget", "reset")), default="list"),
    click.argument("name", required=False, metavar="[NAME]"),
)
def sessions(settings: Settings, action: str, name: str | None) -> int:
    """List the sessions of [sessions], forget one, or let it log in again after logins that failed.
    Nobody sees what they hold.
    """

    def done(name: str) -> str:
        if action == "forget":
            ask(settings, rpc.ForgetSession(name=name), SessionStatus)
            return printable(f"{name}: forgotten")
        ask(settings, rpc.ResetSession(name=name), SessionStatus)
        return printable(f"{name}: logs in again when a task needs it")

    def listed() -> str:
        return _table(ask(settings, rpc.ListSessions(), SessionList))

    return list_or_act(settings, action, name, listed, done, noun="NAME")


def _table(found: SessionList) -> str:
    if not found.sessions:
        return "no sessions: see [sessions] in the configuration"
    rows = [
        [
            each.name,
            each.site or "-",
            _login(each),
            show.duration(each.saved_seconds) if each.kept else "-",
            each.problem or (show.size(each.bytes) if each.kept else "-"),
            str(each.running),
            str(each.waiting),
        ]
        for each in found.sessions
    ]
    table = show.table(_HEADS, rows, _NO_STATE, colour=show.coloured())
    failing = [
        printable(f"{each.name}: {each.login_failures} login(s) failed: {each.login_problem}")
        for each in found.sessions
        if each.login_failures
    ]
    return "\n".join([table, *failing])


def _login(each: SessionStatus) -> str:
    if each.held_seconds:
        return f"held {show.duration(each.held_seconds)}"
    if each.login_task:
        return "running"
    return show.duration(each.login_seconds) if each.login_seconds else "-"
