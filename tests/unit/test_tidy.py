"""Enforce the rules of the house: allowed imports, a pure core, nothing too long."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# `testing` is one room, and knows both sides: it puts them together in one process.
TESTING = "testing"
PARTS = ("supervisor", "workers", "ipc", TESTING)
SOURCES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 80

# Rooms and modules of ipc that are as pure as the core, so that the core may use them.
PURE = (
    "ipc.resilience",
    "ipc.wire.history",
    "ipc.wire.messages",
    "ipc.wire.keys",
    "ipc.wire.node_messages",
    "ipc.wire.resolving",
    "ipc.wire.schedule_messages",
)
# What one room knows of the other for type checkers alone: the type of a handler's ctx.
FOR_CHECKERS = ("ipc.client", "workers.authoring")
OF_NO_ROOM = ("musterd.__version__", "musterd.__all__")
# The core has no I/O, no clock, no randomness of its own.
IMPURE = {
    "asyncio",
    "datetime",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "psutil",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "sqlite3",
    "subprocess",
    "sys",
    "threading",
    "time",
    "uuid",
    "zmq",
}
# The calendar calculates with dates and never reads the clock.
CALENDAR = ("supervisor/core/model/timing.py", {"datetime.datetime", "datetime.tzinfo"})
READS_THE_CLOCK = {"now", "today", "utcnow"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every module that a file imports, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                # `from musterd.ipc import messages` may name a module or what is in one.
                yield node.lineno, f"{node.module}.{alias.name}"


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def module_name(path: Path) -> str:
    """Return the dotted name below `musterd`: ipc/wire/codec.py is ipc.wire.codec."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def room_of(module: str) -> str:
    """Return the room of a module: its folder, or itself where it lies beside the rooms.

    The core is a house of its own: each of its folders is a room. Other folders within a room
    belong to it.
    """
    parts = module.split(".")
    if parts[0] == TESTING:
        return TESTING
    if parts[:2] == ["supervisor", "core"]:
        depth = 3 if (ROOT.joinpath(*parts[:3])).is_dir() else 2
    else:
        depth = 2
    return ".".join(parts[:depth])


ROOMS = sorted({room_of(name) for name in MODULES} - (set(PARTS) - {TESTING}))


def short(room: str) -> str:
    """Return the name of a room as people write it: without `supervisor.`."""
    return room.removeprefix("supervisor.")


def home(name: str) -> str:
    """Return our module that an imported name belongs to."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def rooms_imported(room: str) -> dict[str, list[str]]:
    """Return the rooms that a room imports, `if TYPE_CHECKING` included, and the lines that do."""
    found: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        if room_of(name) != room:
            continue
        for line, imported in imports(parse(path)):
            if not within(imported, "musterd") or imported in OF_NO_ROOM:
                continue
            other = room_of(home(imported.removeprefix("musterd.")))
            if other != room:
                found.setdefault(short(other), []).append(f"{name}, line {line}")
    return found


def rooms_allowed(room: str) -> list[str]:
    """Return what `May import:` says in the docstring of a room."""
    doc = ast.get_docstring(parse(MODULES[room])) or ""
    stated = re.search(r"^May import: (.*?)\.$", doc, re.MULTILINE | re.DOTALL)
    if stated is None or stated[1] == "nothing of ours":
        return []
    return re.split(r",\s+", stated[1])


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 30
    assert len(ROOMS) > 30


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_its_docstring_allows_and_no_more(room: str) -> None:
    imported, allowed = rooms_imported(room), rooms_allowed(room)
    assert allowed == sorted(allowed)
    more = {name: where for name, where in imported.items() if name not in allowed}
    assert not more, f"{room} may not import {more}"
    unused = set(allowed) - set(imported)
    assert not unused, f"{room} does not import {unused}: take it out of its docstring"


@pytest.mark.parametrize("room", [room for room in ROOMS if MODULES[room].stem == "__init__"])
def test_a_room_says_what_it_is_for_and_what_it_is_not_for(room: str) -> None:
    doc = ast.get_docstring(parse(MODULES[room])) or ""
    assert re.match(r"[A-Z].{20,}", doc), f"{room}: no line that says what it is for"
    assert "\nMay import: " in doc, room
    assert "\nNot for: " in doc, room


def test_no_rooms_import_each_other_in_a_circle() -> None:
    edges = {short(room): set(rooms_imported(room)) for room in ROOMS}
    while leaves := [room for room, others in edges.items() if not others & set(edges)]:
        for room in leaves:
            del edges[room]
    assert not edges, f"a circle among {sorted(edges)}"


def test_workers_and_the_supervisor_never_import_each_other() -> None:
    for room in ROOMS:
        for other in rooms_imported(room):
            assert not (room.startswith("workers") and not other.startswith(("workers", "ipc")))
            assert not (room.startswith("supervisor") and other.startswith("workers"))
            assert other != TESTING, room
            if (room, other) != FOR_CHECKERS:
                assert not (room.startswith("ipc") and not other.startswith("ipc")), (room, other)


def test_clients_know_nothing_of_workers_when_they_run() -> None:
    found = "[name for name in sys.modules if name.startswith('musterd.workers')]"
    code = f"import sys, musterd; musterd.Client, musterd.AsyncClient, musterd.call; print({found})"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert told.stdout == b"[]\n"


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize(
    "path", [*SOURCES, ROOT / "src" / "musterd" / "__init__.py"], ids=[*NAMES, "musterd"]
)
def test_every_module_that_is_named_in_a_string_is_there(path: Path) -> None:
    """A module loaded by a wrong name fails late, or is silently taken for something else."""
    missing = [
        f"line {line}: {name}"
        for line, text in strings(parse(path))
        for name in re.findall(r"\bmusterd\.(?:supervisor|workers|ipc|testing)\b[\w.]*", text)
        if not is_there(name.rstrip("."))
    ]
    assert not missing, missing


def is_there(name: str) -> bool:
    """Tell whether a name is a module of ours, or something in one."""
    if name.removeprefix("musterd.") in MODULES:
        return True
    module, _, attribute = name.rpartition(".")
    return module.removeprefix("musterd.") in MODULES and hasattr(
        importlib.import_module(module), attribute
    )


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_our_parts_are_imported_by_their_full_name(path: Path) -> None:
    bare = [
        f"line {line}: {module}"
        for line, module in imports(parse(path))
        if module.partition(".")[0] in PARTS
    ]
    assert not bare, f"import from musterd.: {bare}"


def is_pure(name: str) -> bool:
    return within(name, "supervisor.core") or any(within(name, each) for each in PURE)


@pytest.mark.parametrize(
    "path",
    [path for name, path in MODULES.items() if is_pure(name)],
    ids=[name for name in MODULES if is_pure(name)],
)
def test_the_core_is_pure(path: Path) -> None:
    allowed = CALENDAR[1] if str(path.relative_to(ROOT)) == CALENDAR[0] else set()
    impure = [
        f"line {line}: {module}"
        for line, module in imports(parse(path))
        if (module.partition(".")[0] in IMPURE and module not in allowed)
        or (within(module, "random") and module != "random.Random")
        or (within(module, "musterd") and not is_pure(home(module.removeprefix("musterd."))))
    ]
    impure += [
        f"line {node.lineno}: {node.attr}()"
        for node in ast.walk(parse(path))
        if allowed and isinstance(node, ast.Attribute) and node.attr in READS_THE_CLOCK
    ]
    assert not impure, f"the core decides, the shell does: {impure}"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_libzmq_is_in_no_process_of_ours_but_the_publisher(path: Path) -> None:
    """libzmq ends its process on some input of peers, and when no descriptors are left."""
    if str(path.relative_to(ROOT)).startswith("supervisor/publisher"):
        return
    named = [f"line {line}" for line, module in imports(parse(path)) if within(module, "zmq")]
    assert not named, f"import zmq: {named}"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_modules_and_functions_fit(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE_LINES_MAX, f"{lines} lines: split it by topic"
    long = [
        f"{node.name} (line {node.lineno}): {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert not long, f"functions over {FUNCTION_LINES_MAX} lines: {long}"


def test_the_folder_of_units_is_no_package() -> None:
    """An __init__.py would hide the module `systemd` of systemd-python."""
    assert not (ROOT / "systemd" / "__init__.py").exists()


def project_files() -> list[Path]:
    """Return the files of the project: all that git would keep, or without git all visible ones."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=30,
        ).stdout
        files = [ROOT / name for name in listed.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part.startswith(".") or part == "__pycache__" or part.endswith(".egg-info")
                for part in path.relative_to(ROOT).parts
            )
        ]
    return [path for path in files if path.is_file() and not path.is_symlink()]


def test_the_extra_docs_has_what_the_documented_modules_import() -> None:
    """musterd.testing is in docs/api.md, and is imported for its docstrings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["docs"]]
    had = {re.split(r"[^\w.-]", each)[0].lower() for each in wanted} | sys.stdlib_module_names
    imported = {
        name.partition(".")[0]
        for path in (ROOT / TESTING).rglob("*.py")
        for _, name in imports(parse(path))
    }
    assert sorted(imported - had - {"musterd"}) == []


def test_no_file_names_the_place_of_this_checkout() -> None:
    here = str(ROOT).encode()
    naming = [
        str(path.relative_to(ROOT)) for path in project_files() if here + b"/" in path.read_bytes()
    ]
    assert not naming, f"{ROOT} is where this copy happens to lie: {naming}"
