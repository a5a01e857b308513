"""`musterd check-config` reports missing packages before the daemon needs them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXIT_CONFIGURATION = 78
BROWSER = """
[pools.browser]
worker = "musterd.workers.browser:BrowserWorker"
options = {options}
"""
# Hides a package from the processes of a test, as if its extra had not been installed.
HIDE = """
import importlib.util, sys
hidden = {names!r}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in hidden else find(name, *more)
"""


def check(tmp_path: Path, text: str, *hidden: str) -> tuple[int, str]:
    """Return the exit code and the output, with these packages hidden."""
    (tmp_path / "musterd.toml").write_text(text)
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names=hidden))
    done = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor", "check-config", "-c", "musterd.toml"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def test_playwright_is_missing(tmp_path: Path) -> None:
    code, said = check(tmp_path, BROWSER.format(options="{}"), "playwright")
    assert code == EXIT_CONFIGURATION
    assert "key 'pools.browser.worker'" in said
    assert "needs Playwright, which is not installed: pip install 'musterd[browser]'" in said


def test_chromium_is_missing(tmp_path: Path) -> None:
    options = '{backend = "cdp", executable = "/opt/no/chromium"}'
    code, said = check(tmp_path, BROWSER.format(options=options))
    assert code == EXIT_CONFIGURATION
    assert "options.executable = '/opt/no/chromium' is not an executable file" in said


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "prometheus_client"])
def test_the_web_extra_is_missing(tmp_path: Path, package: str) -> None:
    text = '[http]\nlisten = "127.0.0.1:0"\n'
    code, said = check(tmp_path, text, package)
    assert code == EXIT_CONFIGURATION
    assert "key 'http.listen': value \"127.0.0.1:0\"" in said
    assert f"{package} not installed: pip install 'musterd[web]'" in said
    assert check(tmp_path, text) == (0, "")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ('{denny = ["private"]}', "unknown field `denny`"),
        ('{deny = ["10.0.0.0/99"]}', "deny has '10.0.0.0/99'"),
        ('{deny = ["private"], proxy = "http://127.0.0.1:1"}', "a proxy cannot be used together"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: str, problem: str) -> None:
    code, said = check(tmp_path, BROWSER.format(options=options))
    assert code == EXIT_CONFIGURATION
    assert problem in said
