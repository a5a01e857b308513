"""musterctl's commands about tasks."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import click
import msgspec
from msgspec import UNSET

from musterd.ipc.errors import MusterdError
from musterd.ipc.wire.messages import FINAL_STATES, NOT_GIVEN, PRIORITY_NAMES
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.api import rpc
from musterd.supervisor.api.params import SECONDS_MAX
from musterd.supervisor.api.status import (
    ArtefactList,
    CacheResult,
    PurgeResult,
    RefusedTask,
    RetryResult,
    TaskList,
    TaskStatus,
)
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import (
    DONE,
    FAILED,
    NO_SUCH_NAME,
    Action,
    Settings,
    ask,
    command,
    completes,
    connect,
    no_block,
    on_cluster,
)
from musterd.supervisor.ctl.arguments import (
    AGE_CONFIGURED,
    Age,
    Seconds,
    task_arguments,
    value_of,
)
from musterd.supervisor.ctl.bulk import (
    CANCEL,
    PURGE,
    RETRY,
    all_option,
    in_bulk,
    on_ids,
    yes_option,
)
from musterd.supervisor.ctl.connection import Connection, NoAnswer
from musterd.supervisor.ctl.output import emit, emit_json, warn
from musterd.supervisor.ctl.selecting import (
    ANY_STATES,
    DEAD_STATES,
    LIVE_STATES,
    page_through,
    selection,
    selects,
)
from musterd.supervisor.ctl.table import paper
from musterd.supervisor.text.printable import printable

ON_OPEN = ("wait", "fail", "fallback")
FALLBACK_ON = ("open", "failure")
LINE_CHARS_MAX = 79  # a longer progress line would wrap, and could not be overwritten
_ERASE_LINE = "\r\033[K"
_NO_SUCH_TASK = "NoSuchTask"

_seconds = Seconds(min=0, min_open=True, max=SECONDS_MAX)
_limit = click.option(
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Maximum number of tasks.",
)


def _age(name: str, text: str) -> Any:
    kind = Age(min=0, min_open=True, max=SECONDS_MAX)
    return click.option(
        name, type=kind, is_flag=False, flag_value=AGE_CONFIGURED, metavar="[S]", help=text
    )


@command(
    "submit",
    click.argument("task", shell_complete=completes("tasks")),
    click.argument("pairs", nargs=-1, metavar="[k=v ...]"),
    click.option("--json-args", metavar="J", help="Arguments as a JSON object; k=v wins over it."),
    click.option(
        "--priority", type=click.Choice(PRIORITY_NAMES, case_sensitive=False), default="normal"
    ),
    click.option(
        "--target",
        default="",
        metavar="SITE",
        help="The site the task is for.",
        shell_complete=completes("sites"),
    ),
    click.option("--timeout", type=_seconds, metavar="S", help="Timeout of one attempt."),
    click.option("--max-retries", type=click.IntRange(0, 1000), help="Maximum number of retries."),
    click.option("--delay", type=_seconds, metavar="S", help="Seconds before it may run."),
    click.option("--expires", type=_seconds, metavar="S", help="Seconds after which it expires."),
    click.option("--key", default="", help="Join an unfinished task that has this key."),
    _age("--cache", "Accept a cached result at most S seconds old (default: cache.ttl)."),
    _age("--debounce", "Join a task of the key at most S seconds old (default: debounce.window)."),
    click.option("--policy", default="", help="Resilience class, one of [classes]."),
    click.option(
        "--on-open", type=click.Choice(ON_OPEN), help="What to do while the breaker is open."
    ),
    click.option("--fallback", help="Result to fall back on: JSON, or else text."),
    click.option(
        "--fallback-on",
        type=click.Choice(FALLBACK_ON),
        help="When to fall back: while the breaker is open, or also on failure.",
    ),
    click.option(
        "--session",
        default="",
        metavar="NAME",
        help="Session, one of [sessions].",
        shell_complete=completes("sessions"),
    ),
    click.option("--id", "task_id", help="The task's id; resubmitting a known id is safe."),
    click.option("--wait", is_flag=True, help="Wait for the result and print it."),
)
def submit(
    settings: Settings,
    *,
    task: str,
    pairs: tuple[str, ...],
    json_args: str | None,
    priority: Any,
    target: str,
    timeout: float | None,
    max_retries: int | None,
    delay: float | None,
    expires: float | None,
    key: str,
    cache: float | bool | None,
    debounce: float | bool | None,
    policy: str,
    on_open: Any,
    fallback: str | None,
    fallback_on: Any,
    session: str,
    task_id: str | None,
    wait: bool,
) -> int:
    """Submit TASK (POOL.METHOD) and print its id. Values are JSON or else text."""
    from musterd.ipc.client.ids import new_id

    if task_id == "":
        raise click.UsageError(
            "--id is empty: give an id, or leave it out for a new one",
            click.get_current_context(),
        )
    params = rpc.SubmitTask(
        name=task,
        id=new_id() if task_id is None else task_id,
        args=task_arguments(pairs, json_args),
        priority=priority,
        target=target,
        timeout=timeout or 0,
        max_retries=NOT_GIVEN if max_retries is None else max_retries,
        delay=delay or 0,
        expires=expires or 0,
        key=key,
        cache=cache or 0,
        debounce=debounce or 0,
        policy=policy,
        on_open=on_open or "",
        fallback=UNSET if fallback is None else value_of(fallback),
        fallback_on=fallback_on or "",
        session=session,
        wait=wait,
    )
    try:
        with _progress_shown(settings, params.id) if wait else nullcontext():
            result = ask(settings, params, TaskStatus, waits=wait)
    except NoAnswer as error:
        raise NoAnswer(f"{error} (repeating it with --id {params.id} is safe)") from error
    if wait:
        return _finished(settings, result)
    if not settings.json:
        emit(printable(result.id))
    return DONE


def _finished(settings: Settings, result: TaskStatus) -> int:
    """Print the result; print an error on standard error."""
    if result.state == "succeeded":
        if not settings.json:
            emit(show.value(result.value))
        return DONE
    why = ""
    if result.failure is not None:
        why = f": {show.failure_line(result.failure)}"
    warn(f"task {result.id} {result.state}{why}: see musterctl task {result.id}")
    if result.failure is not None and result.failure.traceback:
        click.echo(printable(result.failure.traceback.rstrip(), keep="\n\t"), err=True)
    return FAILED


@contextmanager
def _progress_shown(settings: Settings, task_id: str) -> Iterator[None]:
    """Keep the task's progress on one line of standard error, where that is a terminal.

    Progress comes from the daemon's events; callers that may not read events see none.
    """
    if settings.json or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    try:
        connection = connect(settings)
        connection.request(rpc.Events())
    except MusterdError:
        yield  # the request for the task itself reports what is wrong
        return
    thread = threading.Thread(
        target=_follow_progress, args=(connection, task_id, over), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        connection.interrupt()
        thread.join()
        connection.close()
        _write(_ERASE_LINE)


def _follow_progress(connection: Connection, task_id: str, over: threading.Event) -> None:
    with suppress(MusterdError, OSError, msgspec.DecodeError):  # the connection ended
        for line in connection.stream():
            fields = msgspec.json.decode(line, type=dict[str, Any])
            if over.is_set():
                return
            if fields.get("event") == "task.progress" and fields.get("task") == task_id:
                text = printable(str(fields.get("reason", "")))
                _write(f"{_ERASE_LINE}{text[:LINE_CHARS_MAX]}")


def _write(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


@command(
    "tasks",
    selects(ANY_STATES, ""),
    _limit,
    on_cluster,
)
def tasks(settings: Settings, *, limit: int, **which: Any) -> int:
    """List tasks, newest first."""
    where = selection(which)
    rest = msgspec.structs.replace(where, state="", pool="")

    def page(most: int, after: str) -> rpc.ListTasks:
        return rpc.ListTasks(where.state, where.pool, most, rest, after)

    found = page_through(settings, page, limit)
    if not settings.json:
        emit(show.tasks(found, paper()))
        if found.cluster:
            emit(
                "this node of a cluster knows what runs here: all are in musterctl --cluster tasks"
            )
    return DONE


@command(
    "task",
    click.argument("task_id", metavar="ID", shell_complete=completes("ids")),
    click.option("--save", metavar="DIR", help="Write what its failed attempts left into DIR."),
    on_cluster,
)
def task(settings: Settings, task_id: str, save: str | None) -> int:
    """Show one task: its state, attempts, error and result."""
    try:
        found = ask(settings, rpc.GetTask(id=task_id), TaskStatus)
    except rpc.RpcError as error:
        if not isinstance(error.data, dict) or not error.data.get("cluster"):
            raise
        found = _of_cluster(settings, task_id, error)
    if not settings.json:
        emit(show.task(found, paper()))
    return DONE if save is None else _save(settings, found, save)


def _save(settings: Settings, found: TaskStatus, folder: str) -> int:
    from musterd.supervisor.ctl import artefacts

    if not found.artefacts:
        warn(
            f"task {found.id} has no artefacts here: they are kept of failed attempts, for as long "
            "as [artefacts] says, on the machine that ran them"
        )
        return FAILED
    paths = artefacts.save(settings, found.id, found.artefacts, folder)
    if not settings.json:
        emit("\n".join(printable(f"saved {path}") for path in paths))
    return DONE


def _of_cluster(settings: Settings, task_id: str, error: rpc.RpcError) -> TaskStatus:
    """Return a task that is not on this node."""
    from musterd.supervisor.ctl.node_tasks import NodeTasks, NotAsked

    try:
        with NodeTasks(settings) as node:
            found = node.find(task_id)
    except NotAsked:
        raise error from None
    if found is None:
        raise rpc.RpcError(rpc.NO_SUCH_NAME, f"no such task in the cluster: {task_id!r}") from None
    with connect(settings) as connection:
        kept = connection.get(rpc.ListArtefacts(id=task_id), ArtefactList).artefacts
    found = msgspec.structs.replace(found, artefacts=kept)
    if settings.json:
        emit_json(msgspec.json.encode(found))
    return found


@command(
    "cache",
    click.argument("action", type=Action(["clear"])),
    click.argument("key", default="*", metavar="[KEY|PREFIX*]"),
)
def cache(settings: Settings, action: str, key: str) -> int:
    """Forget cached results: of one key, of a prefix, or all."""
    params = rpc.InvalidateCache(key=key.removesuffix("*"), prefix=key.endswith("*"))
    result = ask(settings, params, CacheResult)
    if not settings.json:
        emit(f"{result.forgotten} forgotten")
    return DONE


@command(
    "cancel",
    click.argument("ids", nargs=-1, metavar="[ID...]", shell_complete=completes("live ids")),
    selects(LIVE_STATES, "[default: any of them]"),
    all_option,
    yes_option,
    no_block,
    on_cluster,
)
def cancel(
    settings: Settings, *, ids: tuple[str, ...], everything: bool, yes: bool, **which: Any
) -> int:
    """Cancel tasks by id and wait until they have ended, or all that fit."""
    where = selection(which)
    if not on_ids(ids, where, everything):
        return in_bulk(settings, CANCEL, where, yes=yes)
    params = rpc.CancelTasks(ids=list(ids), no_block=settings.no_block)
    with connect(settings, waits=not settings.no_block) as connection:
        answer = connection.request(params)
    result = msgspec.json.decode(answer, type=TaskList)
    if result.cluster and result.missing:
        result = _cancel_elsewhere(settings, result)
        answer = msgspec.Raw(msgspec.json.encode(result))
    if settings.json:
        emit_json(answer)
    if not settings.json and result.tasks:
        emit("\n".join(printable(f"{task.id}: {task.state}") for task in result.tasks))
    if result.missing:
        shared = settings.cluster or result.cluster
        look = "musterctl --cluster tasks" if shared else "musterctl tasks"
        warn(f"no such task: {', '.join(result.missing)}: see {look}")
        return NO_SUCH_NAME
    too_late = [task.id for task in result.tasks if task.state in ("succeeded", "failed")]
    if too_late:
        look = "musterctl --cluster task" if settings.cluster else "musterctl task"
        warn(f"ended before it was cancelled: {', '.join(too_late)}: see {look} ID")
        return FAILED
    # The daemon has waited for the tasks of its pools: these are in the store and have no pool.
    stranded = [task.id for task in result.tasks if task.state not in FINAL_STATES]
    if stranded and not settings.no_block:
        warn(
            f"not cancelled: {', '.join(stranded)}: their pool is not configured;"
            " add it to the configuration (with size = 0, so that nothing runs),"
            " run musterctl update, then cancel them"
        )
        return FAILED
    return DONE


def _cancel_elsewhere(settings: Settings, here: TaskList) -> TaskList:
    """Cancel the tasks that this node does not know, wherever in the cluster they are."""
    from musterd.supervisor.ctl.node_tasks import NodeTasks, NotAsked

    try:
        with NodeTasks(settings) as node:
            tasks, missing = node.cancel(here.missing, wait=not settings.no_block)
    except NotAsked:
        return here
    return TaskList(tasks=[*here.tasks, *tasks], missing=missing, cluster=True)


# -- failed tasks -----------------------------------------------------------------------------


@command(
    "dead",
    selects(DEAD_STATES, "[default: failed]"),
    _limit,
    on_cluster,
)
def dead(settings: Settings, *, limit: int, **which: Any) -> int:
    """List failed tasks, newest first, with their errors."""
    where = selection(which)
    rest = msgspec.structs.replace(where, pool="")
    found = page_through(
        settings, lambda most, after: rpc.ListDead(where.pool, most, rest, after), limit
    )
    if not settings.json:
        emit(show.dead(found, paper()))
        if found.cluster:
            emit("failed tasks of the cluster are in musterctl --cluster dead")
    return DONE


@command(
    "retry",
    click.argument("ids", nargs=-1, metavar="[ID...]", shell_complete=completes("ids to retry")),
    selects(DEAD_STATES, "[default: failed]"),
    all_option,
    yes_option,
    no_block,
    on_cluster,
)
def retry(
    settings: Settings, *, ids: tuple[str, ...], everything: bool, yes: bool, **which: Any
) -> int:
    """Run failed, expired or cancelled tasks again, by id or all that fit. They keep their ids."""
    where = selection(which)
    if not on_ids(ids, where, everything):
        return in_bulk(settings, RETRY, where, yes=yes)
    result = ask(settings, rpc.RetryTasks(ids=list(ids)), RetryResult)
    if not settings.json and result.retried:
        emit("\n".join(printable(f"{id_}: queued") for id_ in result.retried))
    if result.cluster and result.refused:
        warn("tasks of the cluster are run again with musterctl --cluster retry ID")
    return _refused(settings, result.refused)


@command(
    "purge",
    click.argument("ids", nargs=-1, metavar="[ID...]", shell_complete=completes("dead ids")),
    selects(DEAD_STATES, "[default: failed]"),
    click.option("--all", "everything", is_flag=True, help="All failed tasks."),
    click.option(
        "--older-than", metavar="D", help="Tasks that failed at least this long ago: 12h, 7d."
    ),
    yes_option,
    on_cluster,
)
def purge(
    settings: Settings,
    *,
    ids: tuple[str, ...],
    everything: bool,
    older_than: str | None,
    yes: bool,
    **which: Any,
) -> int:
    """Delete failed tasks, with their errors, arguments and attempts."""
    where = selection(which)
    if where != Selection() and not ids:
        return _purge_in_bulk(settings, where, older_than, yes=yes)
    if bool(ids) + everything + (older_than is not None) != 1 or where != Selection():
        raise click.UsageError(
            "give either ID..., --all or --older-than D, or which tasks: --pool, --target, ...",
            click.get_current_context(),
        )
    params = rpc.PurgeTasks(ids=list(ids), all=everything)
    if older_than is not None:
        seconds = _older_than(older_than)
        params = rpc.PurgeTasks(older_than=seconds, all=not seconds)
    result = ask(settings, params, PurgeResult, waits=True)
    if not settings.json:
        emit(f"{result.purged} failed tasks deleted")
    return _refused(settings, result.refused)


def _purge_in_bulk(
    settings: Settings, where: Selection, older_than: str | None, *, yes: bool
) -> int:
    if older_than is not None:
        before = time.time() - _older_than(older_than)
        where = msgspec.structs.replace(where, before=before)
    return in_bulk(settings, PURGE, where, yes=yes)


def _older_than(duration: str) -> float:
    from musterd.supervisor.text.units import parse_duration

    try:
        return parse_duration(duration) / 1e9
    except ValueError as error:
        raise click.BadParameter(f"{duration!r} {error}", param_hint="--older-than") from error


def _refused(settings: Settings, refused: list[RefusedTask]) -> int:
    look = "musterctl --cluster task" if settings.cluster else "musterctl task"
    for each in refused:
        warn(f"{each.reason}: see {look}{'s' if each.code == _NO_SUCH_TASK else f' {each.id}'}")
    if any(each.code == _NO_SUCH_TASK for each in refused):
        return NO_SUCH_NAME
    return FAILED if refused else DONE
