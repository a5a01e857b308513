"""What mypy and pyright say of typed calls: nothing of right ones, and an error of each wrong one.

The snippets are read, not run. A line that ends in `# error` is wrong, and both say so; where only
one can, its name follows.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SNIPPETS = HERE / "snippets"
MARK = re.compile(r"# error(?:: (\w+))?$")
SECONDS = 600  # on a busy machine, without a cache

Found = dict[tuple[str, int], list[str]]  # messages, by file and line


def run(*command: object) -> str:
    """Return what a checker writes; it ends with 1 if it has found errors."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy() -> Found:
    # With the options of the project's own check, whose cache it shares, if that is there.
    found: Found = {}
    options = ["--output", "json", "--no-warn-unused-configs"]
    for line in run("mypy", *options, *sorted(SNIPPETS.glob("*.py"))).splitlines():
        told = json.loads(line)
        if told["severity"] == "error":
            found.setdefault((Path(told["file"]).name, told["line"]), []).append(told["message"])
    return found


def pyright() -> Found:
    found: Found = {}
    report = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, SNIPPETS))
    assert report["summary"]["filesAnalyzed"] == len(list(SNIPPETS.glob("*.py")))
    for told in report["generalDiagnostics"]:
        if told["severity"] == "error":
            place = Path(told["file"]).name, told["range"]["start"]["line"] + 1
            found.setdefault(place, []).append(told["message"])
    return found


def marked(checker: str) -> set[tuple[str, int]]:
    """Return the lines that a checker has to find wrong."""
    return {
        (path.name, number)
        for path in SNIPPETS.glob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (mark := MARK.search(line)) and mark[1] in (None, checker)
    }


def test_there_are_snippets_of_both_clients_and_of_tests() -> None:
    files = {name for name, _ in marked("mypy")}
    assert files == {"wrong_sync.py", "wrong_async.py", "wrong_testing.py"}
    assert {"right_sync.py", "right_async.py"} <= {path.name for path in SNIPPETS.glob("*.py")}


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_checker_finds_all_wrong_lines_and_nothing_in_right_ones(
    checker: Callable[[], Found],
) -> None:
    found, wrong = checker(), marked(checker.__name__)
    missed = sorted(wrong - set(found))
    assert not missed, f"{checker.__name__} does not see that these are wrong"
    blamed = {place: told for place, told in found.items() if place not in wrong}
    assert not blamed, f"{checker.__name__} finds fault with what is right"
