"""Users' modules are imported as they are on disk, whatever `__pycache__` says."""

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from musterd.ipc import user_code

READY = "from musterd.ipc.user_code import make_importable; make_importable(); "
OLD, NEW = "VALUE = 'old'\n", "VALUE = 'new'\n"


def leave_stale(module: Path) -> None:
    """Write a changed source with a compiled module that Python takes for up to date."""
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(OLD)
    py_compile.compile(str(module), doraise=True)
    was = module.stat()
    module.write_text(NEW)
    os.utime(module, ns=(was.st_atime_ns, was.st_mtime_ns))


def run(program: str, folder: Path, **environ: str) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=folder,
        env={**kept, **environ},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_a_module_is_what_its_source_says(tmp_path: Path) -> None:
    leave_stale(tmp_path / "deployed.py")
    program = "import deployed; print(deployed.VALUE)"
    assert run(program, tmp_path, PYTHONPATH=str(tmp_path)) == "old"  # Python alone is fooled
    assert run(READY + program, tmp_path, PYTHONPATH=str(tmp_path)) == "new"
    assert run(READY + program, tmp_path) == "new"


def test_so_are_the_modules_of_packages_and_those_that_other_finders_find(tmp_path: Path) -> None:
    leave_stale(tmp_path / "shop" / "deep" / "prices.py")
    (tmp_path / "shop" / "__init__.py").write_text("")  # `deep` has none: it is a namespace
    assert run(READY + "from shop.deep.prices import VALUE; print(VALUE)", tmp_path) == "new"
    leave_stale(tmp_path / "elsewhere" / "editable.py")
    finder = (
        "import sys, importlib.util\n"
        "class Editable:\n"  # a finder as setuptools writes it
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'editable':\n"
        "            return importlib.util.spec_from_file_location(name, 'elsewhere/editable.py')\n"
        "sys.meta_path.append(Editable)\n"
    )
    program = finder + READY + "\nimport editable; print(editable.VALUE)"
    assert run(program, tmp_path) == "new"


def test_nothing_is_written_beside_users_code(tmp_path: Path) -> None:
    (tmp_path / "fresh.py").write_text(NEW)
    assert run(READY + "import fresh; print(fresh.__file__)", tmp_path) == str(
        tmp_path / "fresh.py"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["fresh.py"]


@pytest.mark.parametrize("name", ["msgspec.json", "colorsys", "musterd.workers.parser"])
def test_libraries_are_not_compiled_each_time(tmp_path: Path, name: str) -> None:
    program = f"import importlib; print(type(importlib.import_module('{name}').__loader__))"
    assert user_code.FromSource.__name__ not in run(READY + program, tmp_path)


def test_an_error_names_the_line_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("VALUE = 1\n\nraise ValueError('here')\n")
    program = "import traceback\ntry:\n    import wrong\nexcept ValueError:\n    "
    said = run(f"{READY}\n{program}print(traceback.format_exc())", tmp_path)
    assert f'File "{tmp_path}/wrong.py", line 3' in said
    assert "raise ValueError('here')" in said
