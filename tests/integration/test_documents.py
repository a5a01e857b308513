"""The examples in the documents work as they are printed."""

import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A site with six pages, of which the fourth fails once.
SITE = """
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

failures = [4]


class Site(BaseHTTPRequestHandler):
    def do_GET(self):
        page = int(self.path.partition("page=")[2])
        if page in failures:
            failures.remove(page)
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([f"item {page}.{n}" for n in range(10)]).encode())


HTTPServer(("127.0.0.1", int(sys.argv[1])), Site).serve_forever()
"""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(document: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / document).read_text())


def _write_files(document: str, folder: Path) -> list[str]:
    """Write every block that begins with `# name.ext` to that file."""
    names = []
    for _, text in _blocks(document):
        if match := re.match(r"# ([\w.]+\.(?:py|toml))\n", text):
            (folder / match[1]).write_text(text)
            names.append(match[1])
    return names


def _run(daemon, script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "MUSTERD_TASKS": daemon.tasks_socket},
        cwd=daemon.folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _start(muster, document: str, config: str, **environment: str):
    import tomllib

    daemon = muster({}, start=False)
    daemon.popen_options = {"env": {**os.environ, **environment}}
    _write_files(document, daemon.folder)
    tables = tomllib.loads((daemon.folder / config).read_text())
    settings = tables.pop("supervisor", {})
    settings |= {"runtime_dir": str(daemon.runtime), "state_dir": str(daemon.state)}
    import msgspec

    daemon.config_path.write_bytes(msgspec.json.encode({**tables, "supervisor": settings}))
    return daemon.start()


def test_the_readme_works(muster, waiting):
    daemon = _start(muster, "README.md", "musterd.toml")
    blocks = [text for _, text in _blocks("README.md")]
    client = next(text for text in blocks if "import Client" in text)
    page, site = next(text for text in blocks if "http.server" in text).splitlines()
    submit = next(line for text in blocks for line in text.splitlines() if "ctl submit" in line)
    with socket.socket() as probe:  # the port of the README may be taken here
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        [sys.executable, *shlex.split(site.replace("8000", port))[1:]],
        cwd=daemon.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def check() -> dict[str, float]:
        done = daemon.ctl(*shlex.split(submit.replace("8000", port))[1:])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    try:
        waiting("the site is up", lambda: _answers(int(port)))
        subprocess.run(page, shell=True, check=True, cwd=daemon.folder)
        lines = _run(daemon, client.replace("8000", port)).splitlines()
        assert lines[0].endswith(" {'price': 49.0, 'lowest': 49.0}")
        assert len(lines) == 101
        for price in ("39.00", "45.00"):
            new = page.replace("49.00", price)
            subprocess.run(new, shell=True, check=True, cwd=daemon.folder)
            # Whichever process runs it, also one that was just started.
            for command in (["status"], ["restart", "promos"], ["scale", "promos", "4"]):
                assert check() == {"price": float(price), "lowest": 39.0}
                assert daemon.ctl(*command).returncode == 0
    finally:
        server.terminate()
        server.wait(20)
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
    price, count, items, doubled, refused = _run(
        daemon, (daemon.folder / "typed.py").read_text()
    ).splitlines()
    assert (price, count, items) == ("3.5", "2", "['tea', 'tea']")
    assert doubled == "[0, 2, 4, 6, 8]"
    assert refused == (
        "shop:Shop.price: the arguments do not fit price(item): item must be str, not int"
    )


def test_the_example_of_state_resumes_after_a_failure_and_a_restart(muster, waiting):
    daemon = _start(muster, "docs/state.md", "catalogue.toml")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    site = subprocess.Popen([sys.executable, "-c", SITE, str(port)], stderr=subprocess.PIPE)
    try:
        waiting("the site is up", lambda: _answers(port))
        fetch = (daemon.folder / "fetch_catalogue.py").read_text()
        first = _run(daemon, fetch, f"http://127.0.0.1:{port}/").splitlines()
        assert first[-2:] == ["50% page 3 of 6", "failed: urllib.error.HTTPError"]
        daemon.kill()
        daemon.start()
        second = _run(daemon, fetch, f"http://127.0.0.1:{port}/").splitlines()
        assert second[-2:] == ["100% page 6 of 6", "{'items': 60, 'resumed_at': 4}"]
    finally:
        site.terminate()
        requests = site.communicate(timeout=20)[1].decode()
    assert [requests.count(f"page={page} ") for page in range(1, 7)] == [1, 1, 1, 2, 1, 1]


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_example_of_secrets_works(muster):
    daemon = _start(muster, "docs/secrets.md", "account.toml", SHOP_API_KEY="k-98765")
    signed, refusal = _run(daemon, (daemon.folder / "sign.py").read_text()).splitlines()
    assert signed == hashlib.sha256(b"k-98765:tea").hexdigest()
    assert "argument 'api_key' of 'account.sign' is named in redact" in refusal
    command = re.search(r"`musterctl (submit account\.sign .+?)`", _text("docs/secrets.md"))
    done = daemon.ctl(*shlex.split(command[1]), "--wait")
    assert (done.returncode, done.stdout.strip()) == (0, signed), done.stderr


def _text(document: str) -> str:
    return (ROOT / document).read_text()


def test_the_example_of_the_life_of_a_task_prints_what_it_says(muster):
    daemon = _start(muster, "docs/tasks.md", "office.toml")
    printed = next(text for _, text in _blocks("docs/tasks.md") if text.startswith("TaskExpired"))
    assert _run(daemon, (daemon.folder / "life.py").read_text()) == printed


def test_the_example_of_coalescing_prints_what_it_says(muster):
    daemon = _start(muster, "docs/coalescing.md", "shops.toml")
    printed = next(text for _, text in _blocks("docs/coalescing.md") if text.startswith("{'shop'"))
    assert _run(daemon, (daemon.folder / "ask.py").read_text()) == printed


def test_the_example_of_how_many_workers_fit_works(muster):
    daemon = _start(muster, "docs/coalescing.md", "shops.toml")
    example = next(text for kind, text in _blocks("docs/memory.md") if kind == "python")
    assert re.fullmatch(r"\{'shops': \d+\}\n", _run(daemon, example))


def test_the_example_of_resilience_prints_what_it_says(muster):
    document = "docs/resilience.md"
    daemon = _start(muster, document, "shops.toml")
    expected = next(text for kind, text in _blocks(document) if not kind and "9.5" in text)
    assert _run(daemon, (daemon.folder / "watch.py").read_text()) == expected
    listed = daemon.ctl("breaker", "list").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["aurora", "open"], ["borealis", "closed"]]
    assert daemon.ctl("breaker", "reset", "aurora").stdout == "aurora: closed\n"


def test_the_retries_in_the_page_on_resilience_are_declared_as_they_are_written(tmp_path):
    text = next(text for _, text in _blocks("docs/resilience.md") if "backoff=pauses" in text)
    (tmp_path / "declared.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "musterd.workers", "--given", "declared:Shops"],
        input="{}",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/coalescing.md",
        "docs/architecture.md",
        "docs/developing.md",
        "docs/resilience.md",
        "docs/secrets.md",
        "docs/state.md",
        "docs/tasks.md",
        "docs/workers.md",
    ],
)
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


def test_the_ending_page_works(muster):
    daemon = _start(muster, "docs/ending.md", "lights.toml")
    script = """
from musterd import Client
with Client() as musterd:
    print(musterd.submit("lights.switch_on", {"room": "kitchen"}).result(timeout=60))
"""
    assert _run(daemon, script) == "kitchen is lit\n"
    assert daemon.stop() == 0
    log = daemon.log()
    lines = ("in the kitchen is off", "the light is off", "the whole house is dark")
    assert [log.index(line) for line in lines] == sorted(log.index(line) for line in lines)
