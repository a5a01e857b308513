"""musterctl import: make schedules of a list of sites, or of what other programs watch."""

import click

from musterd.supervisor.ctl.app import Settings, command, completes


@command(
    "import",
    click.argument("file", metavar="FILE", shell_complete=completes("files")),
    click.option("--every", metavar="5m", help="Interval of entries that have none of their own."),
    click.option("--replace", is_flag=True, help="Replace schedules that have the same name."),
    click.option("--dry-run", is_flag=True, help="Show what would be made, and make nothing."),
)
def import_file(
    settings: Settings, file: str, every: str | None, replace: bool, dry_run: bool
) -> int:
    """Make schedules of a list of sites, of urlwatch's jobs or of changedetection.io's watches.

    FILE is a .csv of your own, urlwatch's urls.yaml, or of changedetection.io a backup (.zip) or
    its JSON. What is lost of an entry is told; the exit code is 1 if one is refused.
    """
    from musterd.supervisor.ctl.import_sites import import_sites  # few commands need its parts

    return import_sites(settings, file, every, replace=replace, dry_run=dry_run)
