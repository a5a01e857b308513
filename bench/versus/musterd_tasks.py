"""The tasks for musterd: `worker = "bench.versus.musterd_tasks"`."""

from typing import Any

from bench.versus import tasks
from musterd import task


@task
def echo(ctx: Any, data: str) -> str:
    return tasks.echo(data)


@task
def nap(ctx: Any, seconds: float) -> None:
    tasks.nap(seconds)


@task
def stamp(ctx: Any) -> int:
    return tasks.stamp()


@task
def hold(ctx: Any, path: str, seconds: float) -> None:
    tasks.hold(path, seconds)


@task
def note(ctx: Any, path: str, number: int, seconds: float) -> None:
    tasks.note(path, number, seconds)
