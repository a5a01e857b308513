"""The rules of the house, kept by a test: who imports whom, a pure core, nothing too long."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("supervisor", "workers", "ipc")
SOURCES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 80

# Modules of ipc that are as pure as the core, so that it may use them.
PURE = ("messages", "policy", "backoff", "breaker", "keys")
# What each part may import of ours. The first that fits a file's path counts.
VERSION = "musterd.__version__"
MAY_IMPORT = (
    ("supervisor/core/", ("musterd.supervisor.core", *(f"musterd.ipc.{name}" for name in PURE))),
    ("supervisor/", ("musterd.supervisor", "musterd.ipc", VERSION)),
    ("workers/", ("musterd.workers", "musterd.ipc", VERSION)),
    ("ipc/", ("musterd.ipc", VERSION)),
)
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
# The calendar: dates are calculated with, the clock is not read.
CALENDAR = ("supervisor/core/model/timing.py", {"datetime.datetime", "datetime.tzinfo"})
READS_THE_CLOCK = {"now", "today", "utcnow"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every module a file names in an import, wherever in it: (line, name)."""
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


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_imports_point_one_way(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    allowed = next(modules for prefix, modules in MAY_IMPORT if name.startswith(prefix))
    wrong = [
        f"line {line}: {module}"
        for line, module in imports(parse(path))
        if within(module, "musterd") and not any(within(module, each) for each in allowed)
    ]
    assert not wrong, f"{name} may import of ours only {allowed}: {wrong}"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_our_parts_are_imported_by_their_full_name(path: Path) -> None:
    bare = [
        f"line {line}: {module}"
        for line, module in imports(parse(path))
        if module.partition(".")[0] in PARTS
    ]
    assert not bare, f"import from musterd.: {bare}"


def is_pure(path: Path) -> bool:
    return "core" in path.parts or (path.parent.name == "ipc" and path.stem in PURE)


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if is_pure(path)], ids=lambda path: path.name
)
def test_the_core_is_pure(path: Path) -> None:
    allowed = CALENDAR[1] if str(path.relative_to(ROOT)) == CALENDAR[0] else set()
    impure = [
        f"line {line}: {module}"
        for line, module in imports(parse(path))
        if (module.partition(".")[0] in IMPURE and module not in allowed)
        or (within(module, "random") and module != "random.Random")
        or (within(module, "musterd.ipc") and module.split(".")[2] not in PURE)
    ]
    impure += [
        f"line {node.lineno}: {node.attr}()"
        for node in ast.walk(parse(path))
        if allowed and isinstance(node, ast.Attribute) and node.attr in READS_THE_CLOCK
    ]
    assert not impure, f"the core decides, the shell does: {impure}"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_libzmq_is_in_no_process_of_ours_but_the_publisher(path: Path) -> None:
    """It ends the process on some input of peers, and when there are no descriptors left."""
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
    """With an __init__.py it would hide the module `systemd` of systemd-python."""
    assert not (ROOT / "systemd" / "__init__.py").exists()


def project_files() -> list[Path]:
    """What belongs to the project: all that git would keep, or without git everything visible."""
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


def test_no_file_names_the_place_of_this_checkout() -> None:
    here = str(ROOT).encode()
    naming = [
        str(path.relative_to(ROOT)) for path in project_files() if here + b"/" in path.read_bytes()
    ]
    assert not naming, f"{ROOT} is where this copy happens to lie: {naming}"
