"""Pages of schedules that report changes: every selector must match, or the page is another one."""

from collections.abc import Mapping

from musterd.ipc.errors import NothingFound
from musterd.ipc.watching.rules import decode_rules
from musterd.workers.authoring.base import Context
from musterd.workers.pages.extraction import Value


def check_found(ctx: Context, found: Mapping[str, Value]) -> None:
    """Raise NothingFound if a selector whose value is watched matches nothing.

    A login page where a price was would be told as a change otherwise. A selector with `[]` may
    match nothing: there may be no offers today.
    """
    if not ctx.watch:
        return
    rules = decode_rules(ctx.watch)
    for name, value in found.items():
        counts = name in rules.watch if rules.watch else name not in rules.fields_ignored
        if value is None and counts:
            raise NothingFound(
                f"selector '{name}' matches nothing on this page: the page is another one (a "
                "login, an error), or it was rebuilt and the selector is out of date"
            )
