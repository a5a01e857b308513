"""The examples in the documents work as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(document: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / document).read_text())


def _write_files(document: str, folder: Path) -> list[str]:
    """Every block that begins with `# name.ext` becomes that file."""
    names = []
    for _, text in _blocks(document):
        if match := re.match(r"# ([\w.]+\.(?:py|toml))\n", text):
            (folder / match[1]).write_text(text)
            names.append(match[1])
    return names


def _run(daemon, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "MUSTERD_TASKS": daemon.tasks_socket},
        cwd=daemon.folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _start(muster, document: str, config: str):
    import tomllib

    daemon = muster({}, start=False)
    _write_files(document, daemon.folder)
    pools = tomllib.loads((daemon.folder / config).read_text())["pools"]
    settings = {"runtime_dir": str(daemon.runtime), "state_dir": str(daemon.state)}
    import msgspec

    daemon.config_path.write_bytes(msgspec.json.encode({"supervisor": settings, "pools": pools}))
    return daemon.start()


def test_the_readme_works(muster):
    daemon = _start(muster, "README.md", "musterd.toml")
    client = next(text for _, text in _blocks("README.md") if "Client" in text)
    lines = _run(daemon, client).splitlines()
    assert lines[0].endswith(" True")
    assert len(lines) == 101
    done = daemon.ctl("submit", "promos.check", "shop=aurora", "price=12.5", "--wait")
    assert (done.returncode, done.stdout.strip()) in [(0, "true"), (0, "True")]
    assert daemon.ctl("scale", "promos", "4").returncode == 0
    assert daemon.ctl("shutdown").returncode == 0
    assert daemon.process.wait(20) == 0


def test_the_examples_for_workers_and_clients_work(muster):
    daemon = _start(muster, "docs/workers.md", "shop.toml")
    out = _run(daemon, (daemon.folder / "order.py").read_text()).splitlines()
    assert out[0] == "{'item': 'tea', 'count': 1, 'attempt': 2}"
    assert out[1].startswith("permanent ")
    assert out[1].endswith("no such item: gold")
    assert out[2] == str([2 * n for n in range(10)])
    assert out[3] == "1"
    assert _run(daemon, (daemon.folder / "order_async.py").read_text()) == "[0, 2, 4, 6, 8]\n"


@pytest.mark.parametrize("document", ["README.md", "docs/design.md", "docs/workers.md"])
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / document).parent.joinpath(target).exists(), target


def test_the_commands_of_the_readme_exist():
    from musterd.supervisor.__main__ import main as musterd
    from musterd.supervisor.ctl.app import cli as musterctl

    text = (ROOT / "README.md").read_text()
    for name, group in (("musterd", musterd), ("musterctl", musterctl)):
        for command in re.findall(rf"^{name} (?!is )([a-z-]+)", text, re.MULTILINE):
            assert command in group.commands, f"{name} {command}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", text):
        assert f"\n{target}:" in makefile, target
