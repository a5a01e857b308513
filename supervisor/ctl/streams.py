"""musterctl's commands that can run until Ctrl-C: events, tail and top."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import click
import msgspec

from musterd.supervisor.api import rpc
from musterd.supervisor.api.events import filled
from musterd.supervisor.api.status import RecentEvents, TailResult
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import (
    DONE,
    FAILED,
    Settings,
    any_names,
    command,
    connect,
    on_cluster,
)
from musterd.supervisor.ctl.arguments import Seconds
from musterd.supervisor.ctl.output import emit, emit_json, warn
from musterd.supervisor.ctl.supervisorctl import without_stream
from musterd.supervisor.ctl.table import paper
from musterd.supervisor.text.printable import printable_json

LEVELS = ("debug", "info", "warning", "error")

_follow = click.option("-f", "--follow", is_flag=True, help="Keep printing until Ctrl-C.")


def _number(name: str, default: int, text: str) -> Any:
    kind = click.IntRange(0, rpc.LIST_MAX)
    return click.option(
        "-n", name, type=kind, metavar="N", default=default, show_default=True, help=text
    )


def _run(
    settings: Settings,
    params: rpc.Events | rpc.Tail,
    kind: Any,
    *,
    first: Callable[[Any], Iterable[str]],
    line_of: Callable[[dict[str, Any]], Iterable[str]],
) -> int:
    """Show what is kept, and with `follow` what comes."""
    with connect(settings) as connection:
        answer = connection.request(params)
        found = msgspec.json.decode(answer, type=kind)
        try:
            if settings.json and not params.follow and kind is TailResult:
                emit_json(answer)
                return DONE
            for text in first(found):
                if not emit(text):
                    return DONE
            if not params.follow:
                return DONE
            for line in connection.stream():
                for text in line_of(msgspec.json.decode(line, type=dict[str, Any])):
                    if not emit(text):
                        return DONE
        except KeyboardInterrupt:
            if sys.stdout.isatty():
                emit("")  # the next output begins a line
            return DONE
    warn("the daemon ended the stream: see musterctl status")
    return FAILED


def follow_events(
    settings: Settings,
    kinds: list[str],
    first: Callable[[], Iterable[str]],
    line_of: Callable[[dict[str, Any]], Iterable[str]],
) -> int:
    """Show what was before, then events of these kinds as they come, until Ctrl-C."""
    params = rpc.Events(follow=True, kinds=kinds, limit=0)
    return _run(settings, params, RecentEvents, first=lambda _: first(), line_of=line_of)


def _as_json(fields: dict[str, Any]) -> list[str]:
    return [printable_json(msgspec.json.encode(filled(fields)).decode())]


def _told(fields: dict[str, Any]) -> list[str]:
    return show.event(fields, paper())  # asked each time: a terminal may change its size


# -- events -----------------------------------------------------------------------------------


@command(
    "events",
    any_names,
    _follow,
    _number("limit", 200, "Number of recent events."),
    click.option(
        "--level",
        type=click.Choice(LEVELS),
        default="info",
        show_default=True,
        help="Minimum level; debug has the progress of tasks.",
    ),
    click.option(
        "--kind", "kinds", multiple=True, help="Only these events: worker.*, breaker.open, ..."
    ),
    on_cluster,
)
def events(
    settings: Settings,
    *,
    names: tuple[str, ...],
    follow: bool,
    limit: int,
    level: Any,
    kinds: tuple[str, ...],
) -> int:
    """Show recent events: restarts, crashes, state changes."""
    params = rpc.Events(
        follow=follow, names=list(names), kinds=list(kinds), level=level, limit=limit
    )
    line_of = _as_json if settings.json else _told

    def first(found: RecentEvents) -> Iterable[str]:
        return (text for fields in found.recent for text in line_of(fields))

    return _run(settings, params, RecentEvents, first=first, line_of=line_of)


# -- tail -------------------------------------------------------------------------------------


@command(
    "tail",
    any_names,
    _follow,
    _number("lines", 10, "Lines per worker."),
)
def tail(settings: Settings, names: tuple[str, ...], follow: bool, lines: int) -> int:
    """Show what workers wrote to standard output and standard error."""
    names = without_stream(names)
    params = rpc.Tail(names=list(names), lines=lines, follow=follow)
    # Lines of one slot given by its name are printed unchanged, others after their slot's name.
    plain = len(names) == 1 and "/" in names[0] and not set("*?[") & set(names[0])

    def first(found: TailResult) -> Iterable[str]:
        said = [(line.at, each.name, line.text) for each in found.workers for line in each.lines]
        said.sort(key=lambda line: line[0])  # lines of one worker stay in their order
        if settings.json:
            fields = ({"at": at, "worker": name, "lines": [text]} for at, name, text in said)
            return (text for each in fields for text in _as_json(each))
        return (show.said(name, text, plain=plain) for _, name, text in said)

    def line_of(fields: dict[str, Any]) -> Iterable[str]:
        return _as_json(fields) if settings.json else show.chunk(fields, plain=plain)

    return _run(settings, params, TailResult, first=first, line_of=line_of)


# -- top --------------------------------------------------------------------------------------


@command(
    "top",
    click.option(
        "-d",
        "seconds",
        type=Seconds(min=0.1, max=3600),
        metavar="S",
        default=1.0,
        show_default=True,
        help="Seconds between refreshes.",
    ),
    on_cluster,
)
def top(settings: Settings, seconds: float) -> int:
    """Show the fleet live, full screen; q quits."""
    from musterd.supervisor.ctl import top as view  # rich is slow to load

    return view.run(settings, seconds)
