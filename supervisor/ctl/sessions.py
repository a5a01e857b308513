"""musterctl sessions: list the sessions of sites, forget or reset one."""

import click

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import SessionList, SessionStatus
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import Action, Settings, ask, command, completes, list_or_act
from musterd.supervisor.ctl.table import Column, paper, table, untold
from musterd.supervisor.text.printable import printable

_COLUMNS = (
    Column("SESSION", name=True),
    Column("SITE", name=True),
    Column("LOGIN"),
    Column("SAVED"),
    Column("SIZE", rank=1, below=untold),
    Column("RUNNING"),
    Column("WAITING"),
)


@command(
    "sessions",
    click.argument("action", type=Action(("list", "forget", "reset")), default="list"),
    click.argument("name", required=False, metavar="[NAME]", shell_complete=completes("sessions")),
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
    sessions = sorted(found.sessions, key=_rank)
    rows = [
        [
            each.name,
            each.site or "-",
            _login(each),
            show.duration(each.saved_seconds) if each.saved_seconds is not None else "-",
            show.size(each.bytes) if each.kept else "-",
            str(each.running),
            str(each.waiting),
        ]
        for each in sessions
    ]
    on = paper()
    failing = [
        f"{each.name}: {each.login_failures} login(s) failed: {each.login_problem}"
        for each in sessions
        if each.login_failures
    ]
    problems = [f"{each.name}: {each.problem}" for each in sessions if each.problem]
    below = [show.prose(line, on) for line in (*failing, *problems)]
    return "\n".join([table(_COLUMNS, rows, on), *below])


def _rank(each: SessionStatus) -> int:
    """Sort sessions with problems first: those without a login, then those that fail."""
    wrong = (each.held_seconds, each.login_failures, each.problem)
    return next((rank for rank, why in enumerate(wrong) if why), len(wrong))


def _login(each: SessionStatus) -> str:
    if each.held_seconds:
        return f"held {show.duration(each.held_seconds)}"
    if each.login_task:
        return "running"
    return "-" if each.login_seconds is None else show.duration(each.login_seconds)
