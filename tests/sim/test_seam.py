"""The seam between core and shell: the simulation equals the shell, event by event.

The core is proved only for the events that the simulation makes. An event of the shell that the
simulation lacks is not proved; an event that only the simulation makes proves nothing. So three
sets have to be equal: the events that the core handles, those that the shell makes, and those that
the simulation makes. The same holds for the actions that the core returns and others carry out.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest
from simulation.outages import Outages
from simulation.profile import (
    LATER_PROFILES,
    LATER_SEED,
    MEMORY_SEED,
    NESTED_SEED,
    PROFILES,
    UNREADABLE_PROFILES,
    UNREADABLE_SEED,
)
from simulation.runner import run_seed
from simulation.sidecar_life import SidecarWorld
from simulation.timetable import Timetable
from simulation.world import World

from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events

ROOT = Path(__file__).parents[2]
SUPERVISOR = ROOT / "supervisor"
CORE = SUPERVISOR / "core"

# Structs that are parts of events, not events.
PARTS = {"EndedTask", "MemorySource", "OnDisk", "Recovered"}


def structs_of(*modules: ModuleType) -> set[str]:
    """Return the names of the structs that these modules define."""
    return {
        name
        for module in modules
        for name, each in vars(module).items()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and each.__module__ == module.__name__
    }


EVENTS = structs_of(events) - PARTS
ACTIONS = {each.__name__ for each in get_args(actions.Action)}


def made_in(paths: Iterator[Path], *modules: ModuleType) -> set[str]:
    """Return the names of these modules' structs that the source files make."""
    made: set[str] = set()
    for path in paths:
        tree = ast.parse(path.read_text())
        made |= set(_made_in(tree, _imported(tree, modules)))
    return made


def _imported(tree: ast.Module, modules: tuple[ModuleType, ...]) -> dict[str, str]:
    """Map what a file writes (`events.Ticked`, `Ticked`) to the name of the struct."""
    wanted = {module.__name__: sorted(structs_of(module)) for module in modules}
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            written = alias.asname or alias.name
            structs = wanted.get(f"{node.module}.{alias.name}", [])
            found |= {f"{written}.{name}": name for name in structs}
            if alias.name in wanted.get(node.module or "", []):
                found[written] = alias.name
    return found


def _made_in(tree: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """Find structs that are called, or named in a list of kinds to be called."""
    for node in ast.walk(tree):
        used: list[ast.expr | None] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) != "isinstance":
            used = [node.func, *node.args]
            for choice in node.args:
                used += choice.elts if isinstance(choice, ast.Tuple | ast.List) else []
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            used = [*node.value.elts]
        for each in used:
            if isinstance(each, ast.Name | ast.Attribute) and ast.unparse(each) in names:
                yield names[ast.unparse(each)]


def shell_files() -> Iterator[Path]:
    return (path for path in SUPERVISOR.rglob("*.py") if CORE not in path.parents)


def simulation_files() -> Iterator[Path]:
    return (ROOT / "tests" / "sim" / "simulation").rglob("*.py")


def test_the_core_handles_every_event_there_is() -> None:
    fleet = SidecarWorld(0).fleet
    assert {each.__name__ for each in fleet._handlers} == EVENTS


def test_the_shell_makes_every_event_that_the_core_handles() -> None:
    assert made_in(shell_files(), events) - PARTS == EVENTS


def test_the_simulation_makes_the_events_of_the_shell_and_no_others() -> None:
    assert made_in(simulation_files(), events) - PARTS == EVENTS


def test_the_core_returns_every_action_there_is() -> None:
    assert made_in(CORE.rglob("*.py"), actions) & ACTIONS == ACTIONS


def test_the_shell_carries_out_every_action() -> None:
    tree = ast.parse((SUPERVISOR / "loop" / "perform.py").read_text())
    names = _imported(tree, (actions,))
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [{names.get(ast.unparse(key)) for key in each.keys if key} for each in tables]
    assert ACTIONS in keys


def test_the_simulation_carries_out_every_action() -> None:
    kinds = [*World.carried_out, *SidecarWorld.carried_out]
    assert len(kinds) == len(set(kinds))
    assert {each.__name__ for each in kinds} == ACTIONS


def test_a_few_seeds_tell_the_core_every_event_and_get_every_action(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: set[str] = set()
    answered: set[str] = set()
    handle = Fleet.handle

    def listen(self: Fleet, now_ns: int, event: Any) -> list[actions.Action]:
        told.add(type(event).__name__)
        answer = handle(self, now_ns, event)
        answered.update(type(action).__name__ for action in answer)
        return answer

    monkeypatch.setattr(Fleet, "handle", listen)
    for seed in range(5):
        SidecarWorld(seed).run()
    Timetable(0).run()
    Outages(0).run()
    for seed in (
        *range(10 * len(PROFILES)),  # a worker class rarely fails to load
        *range(LATER_SEED, LATER_SEED + len(LATER_PROFILES)),
        *range(UNREADABLE_SEED, UNREADABLE_SEED + 2 * len(UNREADABLE_PROFILES)),
        MEMORY_SEED,
        NESTED_SEED,
    ):
        run_seed(seed)
    assert told == EVENTS
    assert answered == ACTIONS
