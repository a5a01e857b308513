"""Head of an answer as a text: what the site said, for people who look into a failed task."""

from functools import partial

from musterd.workers.authoring.base import Context
from musterd.workers.pages.http import BEGINNING_BYTES, HIDDEN, Head, Page, Seen, shown_url

NAME = "response.txt"  # of the artefact
HEADERS_MAX = 100
HEADER_CHARS_MAX = 1000
UNSHOWN = frozenset(("set-cookie", "set-cookie2"))  # what lets anybody in
ADDRESSES = frozenset(("location", "content-location"))


def seen_by(ctx: Context, *, always: bool) -> Seen | None:
    """Return what keeps the head of each failed request; None where nothing is kept."""
    if not ctx.wants_artefacts(always=always):
        return None
    return lambda head: ctx.artefact(NAME, partial(text_of, head), always=always)


def head_of(page: Page) -> Head:
    """Return the head of an answer that was read to its end."""
    beginning = page.text[:BEGINNING_BYTES].encode("utf-8", "replace")
    return Head(page.status, "", page.url, list(page.headers.items()), beginning)


def text_of(head: Head) -> str:
    """Return the head as HTTP writes it, without cookies and keys of addresses."""
    lines = [f"{shown_url(head.url)}", "", f"HTTP {head.status} {head.reason}".rstrip()]
    for name, value in head.headers[:HEADERS_MAX]:
        lines.append(f"{name}: {_shown(name.lower(), value)}")
    return "\n".join(lines) + "\n\n" + head.beginning.decode("utf-8", "replace") + "\n"


def _shown(name: str, value: str) -> str:
    if name in UNSHOWN:
        return HIDDEN
    return (shown_url(value) if name in ADDRESSES else value)[:HEADER_CHARS_MAX]
