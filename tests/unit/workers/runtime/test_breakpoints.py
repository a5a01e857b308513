"""breakpoint() and pdb.set_trace() in the processes of musterd, where nobody can debug.

Where somebody can: tests/integration/test_debugging.py.
"""

import os
import subprocess
import sys

import pytest

HOOKED = """
import logging, os, sys
logging.basicConfig(format="%(message)s")
from musterd.workers.runtime import breakpoints
breakpoints.install()
breakpoints.install()
assert "pdb" not in sys.modules, "no worker pays for it"
def check():
    {code}
check()
print("went on", "pdb" in sys.modules)
"""


def run(code: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", HOOKED.format(code=code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize(
    "code",
    [
        "breakpoint()",
        "import pdb; pdb.set_trace()",
        "from pdb import set_trace; set_trace(header='here')",
        "breakpoint(header='here')",
        "import asyncio, pdb; asyncio.run(pdb.set_trace_async())",
    ],
)
def test_it_explains_itself_and_the_code_goes_on(code: str) -> None:
    done = run(code)
    assert done.stdout.startswith("went on")
    assert done.stderr.endswith(
        " is passed over: no task runs: only handlers can be debugged, and what they call\n"
    )
    if "async" not in code:
        assert done.stderr.startswith("breakpoint() at <string>:9 in check ")


def test_pythons_own_variable_chooses() -> None:
    assert run("breakpoint()", PYTHONBREAKPOINT="0").stderr == ""
    assert "is passed over" in run("breakpoint()", PYTHONBREAKPOINT="pdb.set_trace").stderr
    other = run("breakpoint('hello')", PYTHONBREAKPOINT="builtins.print")
    assert other.stdout == "hello\nwent on False\n"
    assert other.stderr == ""


def test_pdb_is_pythons_own_otherwise() -> None:
    done = run("import pdb; print(pdb.Pdb.__module__, pdb.__spec__.name, pdb.post_mortem.__name__)")
    assert done.stdout == "pdb pdb post_mortem\nwent on True\n"
