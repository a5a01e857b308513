"""Users' modules are imported as they are on disk, whatever `__pycache__` says."""

import colorsys
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import msgspec
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


# -- what was imported, and whether it has changed ------------------------------------------------

NOTED = """
import msgspec, sys
from musterd.ipc.user_code import changed_since, make_importable, sources
make_importable(sys.argv[1])
__import__(sys.argv[2])
print(msgspec.json.encode(sources()).decode())
"""


def noted(folder: Path, module: str, worker: str = "", **environ: str) -> list[user_code.Source]:
    """Import a module in another process; return what that has noted."""
    said = subprocess.run(
        [sys.executable, "-P", "-c", NOTED, worker, module],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return msgspec.json.decode(said.stdout, type=list[user_code.Source])


def test_what_was_imported_is_noted_and_has_not_changed(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("from shop import prices\n")
    (tmp_path / "shop" / "prices.py").write_text("import colorsys\n")
    (tmp_path / "other.py").write_text("")
    found = noted(tmp_path, "shop")
    names = [str(tmp_path / "shop" / name) for name in ("__init__.py", "prices.py")]
    assert [source.path for source in found] == names
    assert user_code.changed_since(found) == []


def test_other_content_is_a_change_whatever_the_times_say(tmp_path: Path) -> None:
    module = tmp_path / "shop.py"
    module.write_text(OLD)
    found = noted(tmp_path, "shop")
    was = module.stat()
    os.utime(module)
    assert user_code.changed_since(found) == []  # saved again as it was
    module.write_text(NEW)
    os.utime(module, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert user_code.changed_since(found) == [str(module)]
    module.write_text(OLD)
    assert user_code.changed_since(found) == []
    module.unlink()
    assert user_code.changed_since(found) == [str(module)]


def test_the_state_of_a_file_that_was_just_written_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "shop.py"
    module.write_text(OLD)
    written_ns = module.stat().st_ctime_ns
    for after_ns, trusted in ((user_code.YOUNG_NS - 1, False), (user_code.YOUNG_NS, True)):
        monkeypatch.setattr(user_code.time, "time_ns", lambda: written_ns + after_ns)  # noqa: B023
        assert bool(user_code._stamp(str(module))) == trusted


def test_the_failed_file_is_noted_too(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import prices\n")
    (tmp_path / "prices.py").write_text("def f(:\n")
    program = (
        "import sys; from musterd.ipc import user_code; user_code.make_importable()\n"
        "try:\n    import shop\nexcept SyntaxError as error:\n"
        "    print(user_code.error_place(error))\n"
        "    print(user_code.users_traceback(error))\n"
        "print([source.path for source in user_code.sources()])\n"
    )
    place, *told, files = run(program, tmp_path).splitlines()
    assert place == f"{tmp_path}/prices.py:1"
    assert files == str([str(tmp_path / "shop.py"), str(tmp_path / "prices.py")])
    assert [line for line in told if 'File "/' in line] == [
        f'  File "{tmp_path}/shop.py", line 1, in <module>',
        f'  File "{tmp_path}/prices.py", line 1',
    ]


def test_a_worker_that_is_installed_is_noted_and_other_libraries_are_not(tmp_path: Path) -> None:
    # colorsys stands for a worker that lies among the libraries.
    (found,) = noted(tmp_path, "colorsys", worker="colorsys:Worker")
    assert found.path == colorsys.__file__
    assert user_code.changed_since([found]) == []
    assert noted(tmp_path, "colorsys") == []
    assert noted(tmp_path, "musterd.workers.parser", worker="musterd.workers.parser:X") == []


def test_a_path_that_is_no_text_is_imported_and_not_told(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"b\xf6t")
    folder.mkdir()
    (folder / "shop.py").write_text(NEW)
    assert noted(folder, "shop") == []


def test_so_many_files_are_told_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"/srv/{n:05}.py": user_code.Source(f"/srv/{n:05}.py", "", n) for n in range(5000)}
    monkeypatch.setattr(user_code, "_noted", many)
    told = user_code.sources()
    assert 500 < len(told) < 2000
    assert len(msgspec.msgpack.encode(told)) < user_code.SOURCES_BYTES_MAX
