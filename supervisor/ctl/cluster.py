"""musterctl cluster: make a cluster in PostgreSQL, look at its nodes and steer them.

These commands speak to PostgreSQL themselves: they work on a machine without a daemon.
"""

from functools import wraps
from typing import Any

import click

from musterd.supervisor.ctl.app import (
    Commands,
    Function,
    Settings,
    cli,
    cluster_place,
    command,
    completes,
)
from musterd.supervisor.ctl.cluster_link import needs_psycopg


@cli.group("cluster", cls=Commands)
def group() -> None:
    """Make and steer a cluster: several machines that share a PostgreSQL."""


def subcommand(name: str, *options: Function) -> Function:
    """Register `musterctl cluster NAME`, with the options that say where the cluster is."""

    def register(function: Function) -> Function:
        @wraps(function)
        def checked(settings: Settings, **given: Any) -> int:
            needs_psycopg()
            return int(function(settings, **given))

        command(name, *options, cluster_place, group=group)(checked)
        return function

    return register


@subcommand("migrate")
def migrate(settings: Settings) -> int:
    """Create the cluster's tables and roles, or bring them to this version.

    Safe to repeat, also on several machines at once.
    """
    from musterd.supervisor.ctl import cluster_commands

    return cluster_commands.migrate(settings)


@subcommand("nodes")
def nodes(settings: Settings) -> int:
    """List the nodes: whether they are alive, what they run and which pools they have."""
    from musterd.supervisor.ctl import cluster_commands

    return cluster_commands.nodes(settings)


@subcommand(
    "drain",
    click.argument("node", shell_complete=completes("nodes")),
    click.option("--undo", is_flag=True, help="Let the node claim tasks again."),
)
def drain(settings: Settings, node: str, undo: bool) -> int:
    """Give a node no more tasks; what runs there goes on."""
    from musterd.supervisor.ctl import cluster_commands

    return cluster_commands.drain(settings, node, undo=undo)


@subcommand(
    "forget",
    click.argument("node", shell_complete=completes("nodes")),
    click.option("--force", is_flag=True, help="Also a node that is alive: its tasks run again."),
)
def forget(settings: Settings, node: str, force: bool) -> int:
    """Forget a node that will not come back; its tasks run elsewhere."""
    from musterd.supervisor.ctl import cluster_commands

    return cluster_commands.forget(settings, node, force=force)


@subcommand("apply", click.argument("file", type=click.Path()))
def apply(settings: Settings, file: str) -> int:
    """Apply FILE to all nodes: targets, classes and schedules of the cluster."""
    from musterd.supervisor.ctl import cluster_policy

    return cluster_policy.apply(settings, file)


@subcommand("show")
def show(settings: Settings) -> int:
    """Show what is applied to all nodes, as a file for `apply`."""
    from musterd.supervisor.ctl import cluster_policy

    return cluster_policy.show(settings)


@subcommand(
    "adopt",
    click.option("--dry-run", is_flag=True, help="Say what would be moved, and move nothing."),
    click.option(
        "--again",
        is_flag=True,
        help="After an adoption that was cut off long ago: move tasks that may have run already.",
    ),
)
def adopt(settings: Settings, dry_run: bool, again: bool) -> int:
    """Move the tasks of this machine's store into the cluster.

    The daemon must be stopped, and a node that has the tasks' pools must have joined before. Safe
    to repeat: a task that is moved twice is the same task.
    """
    from musterd.supervisor.ctl import cluster_adopt

    return cluster_adopt.adopt(settings, dry_run=dry_run, again=again)
