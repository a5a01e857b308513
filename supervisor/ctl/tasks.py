"""musterctl's commands about tasks."""

from contextlib import nullcontext
from typing import Any

import click
from msgspec import UNSET

from musterd.ipc.wire.messages import (
    FINAL_STATES,
    NOT_GIVEN,
    PRIORITY_NAMES,
    QUEUED,
    RUNNING,
    WAITING,
)
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import CacheResult, TaskList, TaskStatus
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, FAILED, NO_SUCH_NAME, Settings, ask, command, no_block
from musterd.supervisor.ctl.arguments import (
    AGE_CONFIGURED,
    Age,
    Seconds,
    task_arguments,
    value_of,
)
from musterd.supervisor.ctl.connection import NoAnswer
from musterd.supervisor.ctl.output import emit, warn
from musterd.supervisor.text.printable import printable

ON_OPEN = ("wait", "fail", "fallback")
FALLBACK_ON = ("open", "failure")

_seconds = Seconds(min=0, min_open=True, max=rpc.SECONDS_MAX)
_age = Age(min=0, min_open=True, max=rpc.SECONDS_MAX)


@command(
    "submit",
    click.argument("task"),
    click.argument("pairs", nargs=-1, metavar="[k=v ...]"),
    click.option("--json-args", metavar="J", help="Arguments as a JSON object; k=v adds to it."),
    click.option(
        "--priority", type=click.Choice(PRIORITY_NAMES, case_sensitive=False), default="normal"
    ),
    click.option("--target", default="", help="The site the task is for."),
    click.option("--timeout", type=_seconds, help="Seconds one attempt may take."),
    click.option("--max-retries", type=click.IntRange(0, 1000)),
    click.option("--delay", type=_seconds, help="Seconds before it may run."),
    click.option("--expires", type=_seconds, help="Seconds after which it is not run any more."),
    click.option("--key", default="", help="Unique while alive: it joins a task with this key."),
    click.option(
        "--cache",
        type=_age,
        is_flag=False,
        flag_value=AGE_CONFIGURED,
        metavar="[S]",
        help="Accept a result of the key that is at most S seconds old, else as configured.",
    ),
    click.option(
        "--debounce",
        type=_age,
        is_flag=False,
        flag_value=AGE_CONFIGURED,
        metavar="[S]",
        help="Accept that of a submit at most S seconds ago, else as configured.",
    ),
    click.option("--policy", default="", help="Its resilience class, one of [classes]."),
    click.option("--on-open", type=click.Choice(ON_OPEN), help="While the breaker is open."),
    click.option("--fallback", help="JSON, or else text: the result for want of a good one then."),
    click.option(
        "--fallback-on",
        type=click.Choice(FALLBACK_ON),
        help="Fall back while the breaker is open, or also when the task has failed for good.",
    ),
    click.option("--id", "task_id", help="The task's id: a known one is the same task."),
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
    task_id: str | None,
    wait: bool,
) -> int:
    """Submit TASK (POOL.METHOD) and print its id. Values are JSON, or else text."""
    from musterd.ipc.client.ids import new_id
    from musterd.supervisor.ctl import progress

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
        wait=wait,
    )
    try:
        with progress.shown(settings, params.id) if wait else nullcontext():
            result = ask(settings, params, TaskStatus, waits=wait)
    except NoAnswer as error:
        raise NoAnswer(f"{error} (repeating it with --id {params.id} is safe)") from error
    if wait:
        return _finished(settings, result)
    if not settings.json:
        emit(printable(result.id))
    return DONE


def _finished(settings: Settings, result: TaskStatus) -> int:
    """Prints the result; what went wrong goes to standard error."""
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


@command(
    "tasks",
    click.option(
        "--state",
        type=click.Choice((QUEUED, WAITING, RUNNING, *FINAL_STATES, "finished")),
    ),
    click.option("--pool", default=""),
    click.option("--limit", type=click.IntRange(1, rpc.LIST_MAX), default=100, show_default=True),
)
def tasks(settings: Settings, state: Any, pool: str, limit: int) -> int:
    """List tasks, newest first."""
    params = rpc.ListTasks(state=state or "", pool=pool, limit=limit)
    found = ask(settings, params, TaskList)
    if not settings.json:
        emit(show.tasks(found, colour=show.coloured()))
    return DONE


@command("task", click.argument("task_id", metavar="ID"))
def task(settings: Settings, task_id: str) -> int:
    """Show one task: its state, attempts, error and result."""
    found = ask(settings, rpc.GetTask(id=task_id), TaskStatus)
    if not settings.json:
        emit(show.task(found))
    return DONE


@command(
    "cache",
    click.argument("action", type=click.Choice(["clear"])),
    click.argument("key", default="*", metavar="[KEY|PREFIX*]"),
)
def cache(settings: Settings, action: str, key: str) -> int:
    """Forget cached results: of one key, of all that begin with PREFIX, or all."""
    params = rpc.InvalidateCache(key=key.removesuffix("*"), prefix=key.endswith("*"))
    result = ask(settings, params, CacheResult)
    if not settings.json:
        emit(f"{result.forgotten} forgotten")
    return DONE


@command("cancel", click.argument("ids", nargs=-1, required=True, metavar="ID..."), no_block)
def cancel(settings: Settings, ids: tuple[str, ...]) -> int:
    """Cancel tasks and wait until they have ended."""
    params = rpc.CancelTasks(ids=list(ids), no_block=settings.no_block)
    result = ask(settings, params, TaskList, waits=not settings.no_block)
    if not settings.json and result.tasks:
        emit("\n".join(printable(f"{task.id}: {task.state}") for task in result.tasks))
    if result.missing:
        warn(f"no such task: {', '.join(result.missing)}: see musterctl tasks")
        return NO_SUCH_NAME
    too_late = [task.id for task in result.tasks if task.state in ("succeeded", "failed")]
    if too_late:
        warn(f"ended before it could be cancelled: {', '.join(too_late)}: see musterctl task ID")
        return FAILED
    # The daemon waits for all that it knows of: these are in the store, and no pool is theirs.
    stranded = [task.id for task in result.tasks if task.state not in FINAL_STATES]
    if stranded and not settings.no_block:
        warn(
            f"not cancelled: {', '.join(stranded)}: there is no pool of theirs;"
            " write it into the configuration (with size = 0, so that nothing runs),"
            " then musterctl update, then cancel them"
        )
        return FAILED
    return DONE
