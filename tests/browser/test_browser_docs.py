"""The example of docs/browser.md works as it is printed."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.workers.browser import BrowserOptions, find_executable

try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "browser.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_example_prints_what_it_says(muster, sample_site):
    daemon = muster({}, start=False)
    for block in BLOCKS:
        if match := re.match(r"# ([\w.]+\.(?:py|toml))\n", block):
            (daemon.folder / match[1]).write_text(block)
    tables = tomllib.loads((daemon.folder / "kites.toml").read_text())
    tables["supervisor"] = {"runtime_dir": str(daemon.runtime), "state_dir": str(daemon.state)}
    daemon.config_path.write_bytes(msgspec.json.encode(tables))
    daemon.start()
    done = subprocess.run(
        [sys.executable, "ask.py", sample_site],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "MUSTERD_TASKS": daemon.tasks_socket},
        cwd=daemon.folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in BLOCKS
    assert daemon.stop() == 0


def test_every_option_is_documented_with_its_default():
    table = TEXT.partition("## Options")[2].partition("## ")[0]
    for field in msgspec.structs.fields(BrowserOptions):
        assert f"`{field.name}`" in table
    for default in ('"playwright"', "50", "1800"):
        assert default in table
