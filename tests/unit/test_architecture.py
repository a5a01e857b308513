"""docs/architecture.md tells the truth: its map shows the rooms, every name in it exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TOP = ("supervisor", "workers", "ipc", "testing")
FOLDERS = (*TOP, "docs", "etc", "systemd", "tests", "bench")
SPANS = sorted(set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[^`\s]*)`", PAGE)))


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def room_row(folder: Path) -> str:
    """Return the row of the map for a room, made from its docstring."""
    doc = docstring(folder / "__init__.py")
    imports = re.search(r"^May import: (.*?)\.$", doc, re.MULTILINE | re.DOTALL)
    assert imports is not None, folder
    name = str(folder.relative_to(ROOT)).replace("/", ".").removeprefix("supervisor.")
    purpose = doc.partition("\n")[0].rstrip(".")
    return f"| `{name}` | {purpose} | {' '.join(imports[1].split())} |"


def rooms() -> list[Path]:
    """Return the folders that are rooms: their docstrings say what they may import."""
    return sorted(
        path.parent
        for top in TOP
        for path in (ROOT / top).rglob("__init__.py")
        if "\nMay import: " in docstring(path)
    )


def test_the_map_has_every_room_as_its_docstring_has_it() -> None:
    table = "\n".join(room_row(folder) for folder in rooms())
    assert table in PAGE, f"put this into docs/architecture.md:\n{table}"


def test_each_room_imports_only_rooms_of_the_lines_below_its_own() -> None:
    drawing = re.search(r"lines below its own:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert drawing is not None
    lines = [line.split() for line in drawing[1].splitlines()]
    height = {room: number for number, line in enumerate(lines) for room in line}
    for folder in rooms():
        _, name, _, imported, _ = room_row(folder).split("|")
        room = name.strip(" `")
        for other in imported.strip().split(", "):
            assert other == "nothing of ours" or height[room] < height[other], (room, other)


@pytest.mark.parametrize("span", SPANS)
def test_every_name_on_the_page_exists(span: str) -> None:
    file, _, name = span.partition(":")
    path = ROOT / file
    assert path.exists(), f"{file} is not there"
    if not name:
        return
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [each for each in body if getattr(each, "name", None) == part]
        assert found, f"{file} has no {name}"
        body = getattr(found[0], "body", [])
