"""The order in which the loop hears what the store has done."""

from types import SimpleNamespace
from typing import Any

from musterd.supervisor.core.model import events
from musterd.supervisor.loop.daemon import Daemon


def test_what_was_withdrawn_is_heard_before_the_commit_that_leaves_it_out() -> None:
    heard: list[Any] = []
    loop: Any = SimpleNamespace(
        _store=SimpleNamespace(completed=lambda: heard.append("asked") or 7),
        store_requests=SimpleNamespace(answer=lambda: heard.append("answers")),
        _note_store_problem=lambda: None,
        feed=heard.append,
    )
    Daemon._hear_store(loop)
    assert heard == ["asked", "answers", events.Persisted(7)]
