"""The engine in memory is pure: the simulation hands it its clock and its chance."""

import ast
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parents[2] / "supervisor" / "cluster"
PURE = [ROOM / "engine.py", *sorted(ROOM.glob("model_*.py"))]
IMPURE = {"datetime", "os", "psycopg", "secrets", "socket", "sys", "threading", "time", "uuid"}


@pytest.mark.parametrize("path", PURE, ids=[path.name for path in PURE])
def test_it_has_no_clock_no_chance_and_no_io_of_its_own(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            assert name.partition(".")[0] not in IMPURE, (path.name, name)
            assert name.partition(".")[0] != "random" or name == "random.Random", name
