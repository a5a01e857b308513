"""What failed attempts leave behind: listed and saved by musterctl, bounded on disk."""

import http.client
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from musterd import Secret, TaskFailed
from musterd.ipc.wire.artefacts import entries
from musterd.supervisor.api import rpc
from support.daemon import Muster, Musters
from support.waiting import Waiting

SECONDS = 60
PARSER = "musterd.workers.parser:ParserWorker"
WORD = "hush-" + "a-password"
TOKEN = "a-token-of-this-test-0123456789"
FAILED = 1
SHOTS = """
import os, time
from musterd import Worker, task

class Shots(Worker):
    @task(max_retries=0)
    def fail(self, ctx, size: int = 10, name: str = "page.html") -> None:
        ctx.artefact(name, b"x" * size)
        raise ValueError("no price")

    @task
    def second(self, ctx) -> int:
        ctx.artefact("page.html", f"<p>attempt {ctx.attempt}")
        if ctx.attempt == 1:
            raise ValueError("once more")
        return ctx.attempt

    @task(max_retries=0)
    async def late(self, ctx) -> None:
        ctx.artefact("page.html", "<p>late")
        import asyncio
        await asyncio.sleep(600)

    @task(max_retries=0)
    def stuck(self, ctx, tell: str) -> None:
        if os.path.exists(tell):
            return  # run again after the daemon was killed
        path = ctx.artefact_path("half.bin")
        path.write_bytes(b"half")
        open(tell, "w").close()
        time.sleep(600)
"""


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<h1>Gone fishing</h1>" + b"." * 5000
        self.send_response(503 if self.path.startswith("/down") else 200, "Gone fishing")
        self.send_header("Set-Cookie", "login=let-me-in")
        self.send_header("X-Served-By", "cache-7")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def start(muster: Musters, size: int = 1, pool: Any = None, **settings: Any) -> Muster:
    pools = {"shots": {"worker": "shots:Shots", "size": size, **(pool or {})}}
    daemon = muster(pools, start=False, **settings)
    Path(daemon.folder, "shots.py").write_text(SHOTS)
    return daemon.start()


def failed(daemon: Muster, name: str, args: dict[str, Any] | None = None, **options: Any) -> str:
    with daemon.client() as client:
        handle = client.submit(name, args or {}, **options)
        with pytest.raises(TaskFailed):
            handle.result(SECONDS)
        return str(handle.id)


def names(daemon: Muster, task: str) -> list[str]:
    return [each["name"] for each in daemon.ask(rpc.GetTask(id=task)).get("artefacts", [])]


def on_disk(daemon: Muster) -> list[Path]:
    return [Path(each.path) for each in entries(str(daemon.state / "artefacts"))]


# -- musterctl --------------------------------------------------------------------------------


def test_musterctl_lists_and_saves_what_a_failed_task_left(muster: Musters, tmp_path: Path) -> None:
    daemon = start(muster)
    size = 3 * rpc.ARTEFACT_PART_BYTES  # the last part is empty
    task = failed(daemon, "shots.fail", {"size": size})
    shown = daemon.ctl("task", task)
    assert "attempt-1.page.html" in shown.stdout
    assert "--save" in shown.stdout
    folder = tmp_path / "new"
    saved = daemon.ctl("task", task, "--save", str(folder))
    assert saved.returncode == 0, saved.stderr
    path = folder / "attempt-1.page.html"
    assert str(path) in saved.stdout
    assert path.read_bytes() == b"x" * size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    told = json.loads(daemon.ctl("--json", "task", task).stdout)
    assert [each["bytes"] for each in told["artefacts"]] == [size]
    (entry,) = on_disk(daemon)
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in entry.iterdir()} == {0o600}


def test_saving_overwrites_nothing_and_follows_no_link(muster: Musters, tmp_path: Path) -> None:
    daemon = start(muster)
    task = failed(daemon, "shots.fail")
    mine = tmp_path / "mine"
    mine.write_text("mine")
    there = tmp_path / "there"
    there.mkdir()
    (there / "attempt-1.page.html").symlink_to(mine)
    refused = daemon.ctl("task", task, "--save", str(there))
    assert refused.returncode == FAILED
    assert "exists already" in refused.stderr
    (tmp_path / "link").symlink_to(there)
    refused = daemon.ctl("task", task, "--save", str(tmp_path / "link"))
    assert refused.returncode == FAILED
    assert "no link" in refused.stderr
    refused = daemon.ctl("task", task, "--save", str(tmp_path / "no" / "such"))
    assert refused.returncode == FAILED
    assert mine.read_text() == "mine"
    with daemon.client() as client:
        good = client.submit("shots.second", {}, max_retries=1)
        assert good.result(SECONDS) == 2
    assert daemon.ctl("task", good.id, "--save", str(tmp_path / "good")).returncode == 0


def test_what_cannot_be_written_whole_is_not_left_there(muster: Musters, tmp_path: Path) -> None:
    daemon = start(muster)
    task = failed(daemon, "shots.fail")
    words = ("-m", "musterd.supervisor.ctl", "-s", daemon.control_socket, "task", task, "--save")
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", sys.executable, *words, str(tmp_path / "new")],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == FAILED
    assert f"cannot write to {tmp_path / 'new'}: File too large" in done.stderr
    assert list((tmp_path / "new").iterdir()) == []


def test_a_task_without_artefacts_says_so(muster: Musters, tmp_path: Path) -> None:
    daemon = start(muster, artefacts__enabled=False)
    task = failed(daemon, "shots.fail")
    refused = daemon.ctl("task", task, "--save", str(tmp_path / "new"))
    assert refused.returncode == FAILED
    assert "no artefacts" in refused.stderr
    assert on_disk(daemon) == []


# -- whose, and how many ----------------------------------------------------------------------


def test_only_failed_attempts_keep_them_timeouts_included(muster: Musters) -> None:
    daemon = start(muster)
    with daemon.client() as client:
        handle = client.submit("shots.second", {}, max_retries=1)
        assert handle.result(SECONDS) == 2
    assert names(daemon, handle.id) == ["attempt-1.page.html"]
    task = failed(daemon, "shots.late", timeout=0.2)
    assert names(daemon, task) == ["attempt-1.page.html"]
    daemon.ctl("purge", task)
    assert daemon.ask(rpc.ListArtefacts(id=task))["artefacts"] == []
    assert names(daemon, handle.id) == ["attempt-1.page.html"]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_limits_hold_over_many_failures_and_a_restart(
    muster: Musters, concurrency: int, waiting: Waiting
) -> None:
    count, attempts, size = 20, 600, 5000
    worker = "shots:Async" if concurrency > 1 else "shots:Shots"
    daemon = muster(
        {"shots": {"worker": worker, "size": 2, "concurrency": concurrency}},
        start=False,
        artefacts__count=count,
        store__durability="normal",
    )
    several = SHOTS + (
        "\nclass Async(Worker):\n    @task(max_retries=0)\n"
        "    async def fail(self, ctx, size: int = 10) -> None:\n"
        "        ctx.artefact('page.html', b'x' * size)\n        raise ValueError('no price')\n"
    )
    Path(daemon.folder, "shots.py").write_text(several)
    daemon.start()
    most = 0
    with daemon.client() as client:
        handles = [client.submit("shots.fail", {"size": size}) for _ in range(attempts)]
        for handle in handles:
            with pytest.raises(TaskFailed):
                handle.result(SECONDS)
            most = max(most, len(on_disk(daemon)))
    # Each worker may have added one that it has not trimmed yet.
    assert most <= count + 2
    assert len(on_disk(daemon)) == count
    assert names(daemon, failed(daemon, "shots.fail")) == ["attempt-1.page.html"]
    daemon.kill()
    config = daemon.config_path.read_text().replace(f'"count":{count}', '"count":3')
    daemon.config_path.write_text(config)
    daemon.start()
    waiting("the rest is trimmed", lambda: len(on_disk(daemon)) == 3)


def test_a_killed_worker_or_daemon_leaves_no_half_file(
    muster: Musters, tmp_path: Path, waiting: Waiting
) -> None:
    daemon = start(muster, pool={"max_crashes": 1})
    tell = tmp_path / "told"
    with daemon.client() as client:
        handle = client.submit("shots.stuck", {"tell": str(tell)})
        waiting("it has begun a file", tell.exists)
        pid = daemon.worker("shots/0").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TaskFailed):
            handle.result(SECONDS)
        assert on_disk(daemon) == []
        waiting("no half file is left", lambda: not list(daemon.state.rglob("half.bin")))
        tell.unlink()
        client.submit("shots.stuck", {"tell": str(tell)})
        waiting("it has begun another", tell.exists)
    daemon.kill()
    daemon.start()
    waiting("none is left again", lambda: not list(daemon.state.rglob("half.bin")))
    assert on_disk(daemon) == []


# -- parser.* ---------------------------------------------------------------------------------


def saved(daemon: Muster, task: str, folder: Path) -> str:
    done = daemon.ctl("task", task, "--save", str(folder))
    assert done.returncode == 0, done.stderr
    return (folder / "attempt-1.response.txt").read_text()


def test_the_parser_keeps_the_head_of_the_answer(
    muster: Musters, site: str, tmp_path: Path
) -> None:
    daemon = muster({"parser": {"worker": PARSER, "size": 1}})
    task = failed(daemon, "parser.fetch", {"url": f"{site}/down?token={WORD}"}, max_retries=0)
    head = saved(daemon, task, tmp_path / "down")
    assert "HTTP 503 Gone fishing" in head
    assert "X-Served-By: cache-7" in head
    assert "<h1>Gone fishing</h1>" in head
    assert len(head) < 2000
    assert "let-me-in" not in head
    assert WORD not in head
    # The site is well, and the answer is not what was wanted.
    task = failed(daemon, "parser.fetch", {"url": f"{site}/up", "max_bytes": 100}, max_retries=0)
    assert "HTTP 200" in saved(daemon, task, tmp_path / "up")
    with daemon.client() as client:
        client.submit("parser.fetch", {"url": f"{site}/up"}).result(SECONDS)
    assert len(on_disk(daemon)) == 2


@pytest.mark.parametrize("wanted", ["auto", "always"])
def test_nothing_is_kept_of_a_task_with_secrets_unless_asked_for(
    muster: Musters, site: str, tmp_path: Path, wanted: str
) -> None:
    pool = {"worker": PARSER, "size": 1, "env": {"SHOP_KEY": WORD}, "secrets": ["SHOP_KEY"]}
    daemon = muster({"parser": {**pool, "options": {"artefacts": wanted}}})
    args = {"url": f"{site}/down", "headers": {"Authorization": Secret("SHOP_KEY")}}
    task = failed(daemon, "parser.fetch", args, max_retries=0)
    assert names(daemon, task) == (["attempt-1.response.txt"] if wanted == "always" else [])


# -- the web ----------------------------------------------------------------------------------


def get(address: str, path: str, **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=SECONDS)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_the_web_sends_them_as_downloads_to_those_who_may_control(
    muster: Musters, tmp_path: Path, waiting: Waiting
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    daemon = start(muster, http__listen="127.0.0.1:0", http__token_file=str(token))
    address = waiting("the web process is up", lambda: daemon.status().web.address)
    size = 2 * rpc.ARTEFACT_PART_BYTES + 7
    task = failed(daemon, "shots.fail", {"size": size})
    entitled = {"Authorization": f"Bearer {TOKEN}"}
    path = f"/api/artefact?id={task}&name=attempt-1.page.html"

    status, body, headers = get(address, path, **entitled)
    assert (status, len(body)) == (200, size)
    assert headers["content-disposition"] == 'attachment; filename="attempt-1.page.html"'
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("sandbox;")
    assert headers["content-type"] == "application/octet-stream"

    assert get(address, path)[0] == 401
    assert get(address, path, Authorization="Bearer wrong")[0] == 401
    assert get(address, f"/api/artefact?id={task}&name=..%2F..%2Fstore.db", **entitled)[0] == 404
    assert get(address, f"/api/artefact?id={task}", **entitled)[0] == 400
    listed = json.loads(get(address, f"/api/task?id={task}", **entitled)[1])
    assert [each["name"] for each in listed["artefacts"]] == ["attempt-1.page.html"]
    assert "artefacts" not in json.loads(get(address, f"/api/task?id={task}")[1])
