"""What mypy and pyright say of the programs in README.md and docs/, as a reader types them.

A program is a block that begins with the name of its file. Where a page has a second version of a
file, each is checked, with the newest of the page's other files beside it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Recipes use libraries whose types say None where there is none in that place.
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))]
BLOCK = re.compile(r"```python\n(# (\w+\.py)\n.*?)```", re.DOTALL)
NOT_OURS = re.compile(r"^from (celery|curl_cffi)\b|^from buy_celery\b", re.MULTILINE)
WRONG = "musterd.submit(Shop.price, item=3)"  # which docs/workers.md shows to be refused
SECONDS = 600  # on a busy machine, without a cache


def versions(page: str) -> list[dict[str, str]]:
    """Return the files of a page by name; more than once if one of them comes again."""
    found: list[dict[str, str]] = [{}]
    for text, name in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if NOT_OURS.search(text):
            continue
        if name in found[-1]:
            found.append(found[-1] | {name: text})
        else:
            found[-1][name] = text
    return [each for each in found if each]


def written(folder: Path, pages: list[str]) -> list[Path]:
    """Write the files of pages, each version into a folder of its own."""
    made = []
    for page in pages:
        for number, files in enumerate(versions(page)):
            place = folder / f"{Path(page).stem}-{number}"
            place.mkdir()
            for name, text in files.items():
                (place / name).write_text(text, encoding="utf-8")
            made.append(place)
    return made


def checker(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(SECONDS)
def test_pyright_finds_nothing_wrong_in_programs_of_the_docs(tmp_path: Path) -> None:
    places = written(tmp_path, PAGES)
    roots = [{"root": place.name} for place in places]
    settings = {"typeCheckingMode": "standard", "executionEnvironments": roots}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    report = json.loads(
        checker("pyright", "--outputjson", "--pythonpath", sys.executable, cwd=tmp_path)
    )
    assert report["summary"]["filesAnalyzed"] > 40
    seen_wrong, blamed = 0, []
    for told in report["generalDiagnostics"]:
        path, line = Path(told["file"]), told["range"]["start"]["line"]
        if path.read_text().splitlines()[line].strip() == WRONG:
            seen_wrong += 1
        else:
            blamed.append(f"{path.relative_to(tmp_path)}:{line + 1}: {told['message']}")
    assert blamed == []
    assert seen_wrong, "docs/workers.md says that checkers refuse it"


@pytest.mark.timeout(SECONDS)
def test_mypy_finds_nothing_wrong_in_what_a_beginner_types(tmp_path: Path) -> None:
    for place in written(tmp_path, ["README.md", "docs/tutorial.md"]):
        cache = tmp_path / "cache"
        said = checker("mypy", "--config-file=", "--cache-dir", cache, ".", cwd=place)
        assert said.startswith("Success"), said
