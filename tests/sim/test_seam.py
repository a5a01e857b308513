"""The seam between core and shell: the simulation equals the shell, event by event.

The core is proved only for the events that the simulation makes. An event of the shell that the
simulation lacks is not proved; an event that only the simulation makes proves nothing. So three
sets have to be equal: the events that the core handles, those that the shell makes, and those that
the simulation makes. The same holds for the fields of an event that may be left out, and for the
actions that the core returns and others carry out, in the order of their ranks.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from simulation.added_timetable import AddedTimetable
from simulation.cluster import KINDS, ClusterWorld
from simulation.outages import Outages
from simulation.profile import (
    DEBUG_PROFILES,
    DEBUG_SEED,
    LATER_PROFILES,
    LATER_SEED,
    LOGIN_PROFILES,
    LOGIN_SEED,
    MEMORY_SEED,
    NESTED_SEED,
    PROFILES,
    SESSION_PROFILES,
    SESSION_SEED,
    UNREADABLE_PROFILES,
    UNREADABLE_SEED,
)
from simulation.runner import run_seed
from simulation.sidecar_life import SidecarWorld
from simulation.timetable import Timetable
from simulation.world import World

from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, debug_events, events, schedule_events
from support.core import action_kinds

ROOT = Path(__file__).parents[2]
SUPERVISOR = ROOT / "supervisor"
CORE = SUPERVISOR / "core"

# Structs that are parts of events, not events.
PARTS = {"AddedSchedule", "EndedTask", "MemorySource", "Recovered"}
# Fields of actions that are empty when the core returns them.
FILLED_IN_BY_THE_SHELL = {"Report": {"output", "summary", "before", "after"}}


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


EVENT_KINDS = (events, schedule_events, debug_events)
EVENTS = structs_of(*EVENT_KINDS) - PARTS
ACTIONS = {each.__name__ for each in action_kinds()}


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


def filled_in(paths: Iterator[Path], *modules: ModuleType) -> dict[str, set[str]]:
    """Return, by struct, the fields that some source file gives a value of its own.

    Fields count that stand in a call of the struct, or of `replace` for a parameter of that type.
    """
    kinds = {name: vars(module)[name] for module in modules for name in structs_of(module)}
    filled: dict[str, set[str]] = {name: set() for name in kinds}
    for path in paths:
        tree = ast.parse(path.read_text())
        for name, call, positional in _fillings(tree, _imported(tree, modules)):
            fields = kinds[name].__struct_fields__
            for place, each in enumerate(positional):
                rest = isinstance(each, ast.Starred)
                filled[name] |= {*(fields[place:] if rest else fields[place : place + 1])}
            filled[name] |= {each.arg for each in call.keywords if each.arg is not None}
            if any(each.arg is None for each in call.keywords):
                filled[name] |= {*fields}
    return filled


def _fillings(
    tree: ast.AST, names: dict[str, str]
) -> Iterator[tuple[str, ast.Call, list[ast.expr]]]:
    """Find the calls that make or change a struct: its name, the call, the positional fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield names[ast.unparse(node.func)], node, node.args
        elif isinstance(node, ast.FunctionDef):
            given = {
                each.arg: names.get(ast.unparse(each.annotation))
                for each in node.args.args
                if each.annotation is not None
            }
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("replace"):
                    name = given.get(ast.unparse(call.args[0])) if call.args else None
                    if name is not None:
                        yield name, call, []


def may_be_left_out(kind: type[msgspec.Struct]) -> set[str]:
    return {each.name for each in msgspec.structs.fields(kind) if not each.required}


def shell_files() -> Iterator[Path]:
    return (path for path in SUPERVISOR.rglob("*.py") if CORE not in path.parents)


def simulation_files() -> Iterator[Path]:
    yield from (ROOT / "tests" / "sim" / "simulation").rglob("*.py")
    yield SUPERVISOR / "sockets" / "node.py"  # simulated nodes use it as it is


def test_the_core_handles_every_event_there_is() -> None:
    fleet = SidecarWorld(0).fleet
    assert {each.__name__ for each in fleet._handlers} == EVENTS


def test_the_shell_makes_every_event_that_the_core_handles() -> None:
    assert made_in(shell_files(), *EVENT_KINDS) - PARTS == EVENTS


def test_the_simulation_makes_the_events_of_the_shell_and_no_others() -> None:
    assert made_in(simulation_files(), *EVENT_KINDS) - PARTS == EVENTS


@pytest.mark.parametrize("name", sorted(structs_of(*EVENT_KINDS)))
def test_shell_and_simulation_fill_in_the_same_fields(name: str) -> None:
    optional = may_be_left_out(next(vars(each)[name] for each in EVENT_KINDS if name in vars(each)))
    shell, simulation = filled_in_by_both()
    assert shell[name] & optional == simulation[name] & optional == optional


@cache
def filled_in_by_both() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    return (
        filled_in(shell_files(), *EVENT_KINDS),
        filled_in(simulation_files(), *EVENT_KINDS),
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("events.Persisted(1)", {"ticket"}),
        ("events.CancelRequested([], request=1)", {"ids", "request"}),
        ("events.CancelRequested(*given)", {"ids", "peer", "request"}),
        ("events.CancelRequested([], **given)", {"ids", "peer", "request"}),
        ("def f(e: events.CancelRequested): replace(e, request=1)", {"request"}),
        ("def f(e: events.Persisted): replace(other, ticket=1)", set()),
        ("isinstance(e, events.CancelRequested)", set()),
    ],
)
def test_a_field_that_is_filled_in_is_found(source: str, found: set[str], tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(f"from musterd.supervisor.core.model import events\n{source}\n")
    assert set().union(*filled_in(iter([path]), events).values()) == found


def test_the_core_fills_in_every_field_of_an_action() -> None:
    filled = filled_in(CORE.rglob("*.py"), actions)
    for name in sorted(structs_of(actions)):
        left = may_be_left_out(vars(actions)[name]) - filled.get(name, set())
        assert left <= FILLED_IN_BY_THE_SHELL.get(name, set()), (name, left)


@pytest.mark.parametrize(
    "run",
    [
        lambda: run_seed(0),
        Outages(0).run,
        Timetable(0).run,
        AddedTimetable(0).run,
        SidecarWorld(0).run,
    ],
)
def test_every_world_checks_the_order_of_the_actions(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]
) -> None:
    handle = Fleet.handle

    def mixed_up(*told: Any) -> list[actions.Action]:
        return sorted(handle(*told), key=actions.rank_of, reverse=True)

    monkeypatch.setattr(Fleet, "handle", mixed_up)
    with pytest.raises(AssertionError, match="out of order"):
        run()


def test_the_core_returns_every_action_there_is() -> None:
    assert made_in(CORE.rglob("*.py"), actions) & ACTIONS == ACTIONS


def test_the_shell_carries_out_every_action() -> None:
    tree = ast.parse((SUPERVISOR / "loop" / "perform.py").read_text())
    names = _imported(tree, (actions,))
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [{names.get(ast.unparse(key)) for key in each.keys if key} for each in tables]
    assert ACTIONS in keys


def test_the_simulation_carries_out_every_action() -> None:
    kinds = [*World.carried_out, *SidecarWorld.carried_out, *ClusterWorld.carried_out]
    # A sidecar may end the daemon, too.
    assert [each for each in set(kinds) if kinds.count(each) > 1] == [actions.Exit]
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
    all_at_once = range(len(KINDS) - 1, 30 * len(KINDS), len(KINDS))
    for seed in (*range(len(KINDS)), *all_at_once):  # an attempt is seldom lost alone
        ClusterWorld(seed).run()
    Timetable(1).run()
    AddedTimetable(0).run()
    Outages(0).run()
    for seed in (
        *range(10 * len(PROFILES)),  # a worker class rarely fails to load
        *range(LATER_SEED, LATER_SEED + len(LATER_PROFILES)),
        *range(UNREADABLE_SEED, UNREADABLE_SEED + 6 * len(UNREADABLE_PROFILES)),
        MEMORY_SEED,
        NESTED_SEED,
        *range(SESSION_SEED, SESSION_SEED + len(SESSION_PROFILES)),
        *range(LOGIN_SEED, LOGIN_SEED + len(LOGIN_PROFILES)),
        *range(DEBUG_SEED, DEBUG_SEED + 4 * len(DEBUG_PROFILES)),
    ):
        run_seed(seed)
    assert told == EVENTS
    assert answered == ACTIONS
