"""The tests that docs/testing.md and the example show are run as users run them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```\w+\n# ([\w.]+\.(?:py|toml))\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECONDS = 300.0  # on a busy machine


def write_files(page: str, folder: Path) -> list[str]:
    """Write the files of a page; return their names."""
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    for name, text in found:
        (folder / name).write_text(text, encoding="utf-8")
    return [name for name, _ in found]


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tests(folder: Path) -> int:
    """Run the tests as they stand there, with warnings as errors; return how many have passed."""
    plain = ("-p", "no:cacheprovider", "-p", "no:randomly", "-W", "error")
    found = re.search(r"(\d+) passed in", run(folder, "pytest", *plain))
    assert found is not None
    return int(found[1])


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("page", "count"), [("docs/testing.md", 8), ("README.md", 1)])
def test_the_tests_of_the_page_pass(page: str, count: int, tmp_path: Path) -> None:
    files = write_files(page, tmp_path)
    assert {"promos.py", "test_promos.py", "musterd.toml"} <= set(files)
    assert run_tests(tmp_path) == count


@pytest.mark.timeout(SECONDS)
def test_the_tests_of_the_page_pass_mypy_strict(tmp_path: Path) -> None:
    files = write_files("docs/testing.md", tmp_path)
    sources = [name for name in files if name.endswith(".py")]
    assert "no issues found in 4 source files" in run(tmp_path, "mypy", "--strict", *sources)


@pytest.mark.timeout(SECONDS)
def test_the_example_is_tested() -> None:
    assert run_tests(ROOT / "examples" / "promo_watch") == 5


def test_pytest_lists_the_fixtures_and_loads_little_for_them(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\n\ndef test_nothing():\n"
        "    ours = sorted(name for name in sys.modules if name.startswith('musterd'))\n"
        "    assert ours == ['musterd', 'musterd.testing']\n"
        "    assert 'msgspec' not in sys.modules\n"
        "    import musterd.supervisor.core.fleet as module\n"
        "    assert type(module.__loader__).__name__ == 'SourceFileLoader', 'it is not rewritten'\n"
    )
    assert run_tests(tmp_path) == 1
    listed = run(tmp_path, "pytest", "--fixtures", "-p", "no:cacheprovider")
    assert re.search(r"^musterd_worker -- .*\n    Open workers inside the test", listed, re.M)
    assert re.search(r"^musterd_daemon \[module scope\] -- .*\n    Run real daemons", listed, re.M)


def test_the_page_tells_of_everything_that_the_fixtures_have() -> None:
    from musterd import testing
    from musterd.testing import LocalDaemon, LocalTask, LocalWorker

    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    told = [*testing.__all__]
    inner = {"settings", "world", "folder", "open", "config"}
    for kind in (LocalWorker, LocalTask, LocalDaemon):
        told += [name for name in vars(kind) if not name.startswith("_") and name not in inner]
    missing = [name for name in told if not re.search(rf"\b{name}\b", page)]
    assert not missing
