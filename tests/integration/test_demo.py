"""`musterd demo`, and what it prints to type and to open, as a person at a terminal uses it."""

import subprocess
import sys
import urllib.request
from pathlib import Path

from support.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]
MUSTERD = str(Path(sys.executable).parent / "musterd")


def test_the_demo_shows_its_dashboard_and_a_command_that_works(waiting):
    terminal = Terminal(
        [MUSTERD, "demo", "--no-browser", "--tasks", "12", "--stay"], cwd=ROOT, rows=60
    )
    try:
        lines = terminal.wait(
            "it stays", lambda lines: any("until you press Enter" in line for line in lines)
        )
        address = next(line for line in lines if line.startswith("dashboard: ")).split()[1]
        with urllib.request.urlopen(address, timeout=30) as page:
            assert page.status == 200
            assert b"musterd" in page.read()
        command = next(line for line in lines if line.endswith("/control.sock status"))
        done = subprocess.run(
            command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "parser/2" in done.stdout
        assert {address, command} <= {line.removeprefix("dashboard: ") for line in lines}
        terminal.press("\n")
        assert terminal.exit_code() == 0
        assert any("every task came back" in line for line in terminal.lines())
    finally:
        terminal.close()
    folder = Path(command.split()[2]).parents[1]
    assert not folder.exists()


def test_make_installs_what_the_demo_and_the_example_show():
    for target in ("demo", "example"):
        done = subprocess.run(
            ["make", "-n", "-B", target], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert "'.[web]'" in done.stdout, target
