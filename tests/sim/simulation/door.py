"""The door of the core, as every world uses it: each answer is checked to be in order.

The shell carries actions out in the order in which the core returns them. So the order is a
promise, whichever part decided them first: by rank, as each action declares it (model/actions.py).
"""

from __future__ import annotations

from typing import Any

from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.actions import Action


def ask(fleet: Fleet, now_ns: int, event: Any) -> list[Action]:
    """Tell the core an event and return its actions."""
    actions = fleet.handle(now_ns, event)
    highest = 0
    for action in actions:
        assert action.rank >= highest, f"out of order: {[type(each).__name__ for each in actions]}"
        highest = action.rank
    return actions
