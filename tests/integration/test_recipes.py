"""The programs of docs/recipes work as they are printed, with a real daemon and loopback sites."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlencode

import pytest

from support.bot_api import TOKEN, BotApi
from support.daemon import Muster, Musters
from support.loopback import Loopback
from support.waiting import Waiting
from support.walk import files_of

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
END_SECONDS = 60
IMPORT_SECONDS_MAX = 100  # aiogram takes three seconds of a processor to be imported
CHAT = 1001
LIBRARIES = {"aiogram": "aiogram", "python-telegram-bot": "telegram"}


def recipe(name: str, library: str) -> dict[str, str]:
    """Return the files of a recipe; skip the test without its library."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'musterd[recipes]'")
    return files_of((RECIPES / f"{name}.md").read_text())


@pytest.fixture(scope="module")
def daemon(module_muster: Musters) -> Iterator[Muster]:
    """A daemon with the pools of the recipe for users of Scrapy, one of which others use."""
    files = files_of((RECIPES / "scrapy.md").read_text())
    settings = tomllib.loads(files["musterd.toml"])
    pools = settings.pop("pools")
    if importlib.util.find_spec("parsel") is None:
        del pools["kites"]
    made = module_muster(pools, start=False)
    config = json.loads(made.config_path.read_text())
    made.config_path.write_text(json.dumps({**config, **settings}))
    write(made, files)
    yield made.start()
    made.close()


def write(daemon: Muster, files: dict[str, str]) -> None:
    for name, text in files.items():
        (daemon.folder / name).write_text(text)


@contextmanager
def running(daemon: Muster, *words: str, **variables: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program beside the daemon; it has to end well at SIGINT."""
    log = daemon.folder / "program.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=daemon.folder,
            env={**os.environ, "MUSTERD_TASKS": daemon.tasks_socket, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGINT)
        process.wait(END_SECONDS)
    except BaseException:
        print(log.read_text())
        raise
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def shop() -> Iterator[Loopback]:
    shop = Loopback()
    yield shop
    shop.close()


# -- bots -------------------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[BotApi]:
    api = BotApi()
    yield api
    api.close()


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_bot_watches_answers_its_button_and_tells_changes(
    name: str, daemon: Muster, api: BotApi, shop: Loopback, waiting: Waiting
) -> None:
    write(daemon, recipe(name, LIBRARIES[name]))
    shop.show("49.00 €")
    with running(daemon, "bot.py", BOT_API=api.url, BOT_TOKEN=TOKEN), daemon.client() as client:
        api.write(CHAT, "/watch kites")
        usage = ["/watch https://shop.example/kites"]
        waiting("it is up and says how", lambda: api.texts(CHAT) == usage, IMPORT_SECONDS_MAX)
        api.write(CHAT, f"/watch {shop.url}")
        waiting("it watches", lambda: len(api.texts(CHAT)) == 2)
        assert api.texts(CHAT)[1] == f"{shop.url} is watched"

        api.press(api.sent[-1])
        waiting("the button is answered", lambda: api.answered)
        waiting("it has looked", lambda: api.texts(CHAT)[2:] == ["now: 49.00 €"])

        shop.show("39.00 €")
        [schedule] = [each.name for each in client.schedules.list() if f"{CHAT}" in each.name]
        client.schedules.run(schedule).result(END_SECONDS)
        waiting("it tells", lambda: api.texts(CHAT)[3:] == ["price 49.00 € → 39.00 €"])
        client.schedules.delete(schedule)


# -- servers ----------------------------------------------------------------------------------


def asked(url: str, data: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """Return the status and the JSON of an answer."""
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=END_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_service_of_fastapi_takes_tasks_and_shows_results(
    daemon: Muster, shop: Loopback, waiting: Waiting
) -> None:
    write(daemon, recipe("fastapi", "fastapi"))
    shop.show("49.00 €")
    port = free_port()
    checks = f"http://127.0.0.1:{port}/checks"
    json_type = {"Content-Type": "application/json"}
    with running(daemon, "-m", "uvicorn", "app:app", "--port", str(port)):
        waiting("it is up", lambda: is_open(port))
        check = json.dumps({"url": shop.url, "select": {"price": ".price"}}).encode()
        status, told = asked(checks, check, **json_type)
        assert status == 202
        one = f"{checks}/{told['id']}"
        with urllib.request.urlopen(f"{one}/progress", timeout=END_SECONDS) as stream:
            assert stream.read().decode().endswith("event: end\ndata: succeeded\n\n")
        assert asked(one) == (200, {"state": "succeeded", "result": {"price": "49.00 €"}})
        assert asked(f"{checks}/unknown")[0] == 404
        assert asked(checks, b'{"url": "kites"}', **json_type)[0] == 422


def test_a_form_of_django_submits_and_its_page_shows_the_result(
    daemon: Muster, shop: Loopback, waiting: Waiting
) -> None:
    write(daemon, recipe("django", "django"))
    shop.show("49.00 €")
    port = free_port()
    site = f"http://127.0.0.1:{port}/"
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

    def opened(address: str, **form: str) -> tuple[str, str]:
        """Return the page, and the address that redirects have led to."""
        data = urlencode(form).encode() if form else None
        with browser.open(address, data, END_SECONDS) as answer:
            return answer.read().decode(), answer.url

    with running(daemon, "prices.py", "runserver", "--noreload", str(port)):
        waiting("it is up", lambda: is_open(port))
        token = re.search(r'csrfmiddlewaretoken" value="(\w+)"', opened(site)[0])
        assert token is not None
        _, where = opened(site, url=shop.url, csrfmiddlewaretoken=token[1])
        waiting("it has the price", lambda: '<p class="price">49.00 €</p>' in opened(where)[0])
        assert "http-equiv" not in opened(where)[0], "it does not look again"
        with pytest.raises(urllib.error.HTTPError) as missing:
            opened(f"{site}tasks/unknown")
        missing.value.close()
        assert missing.value.code == 404


# -- a spider ---------------------------------------------------------------------------------


class Catalogue(BaseHTTPRequestHandler):
    """A shop with three pages of two kites each."""

    visits: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.visits.append(self.path)
        number = int(self.path[1:]) if self.path[1:].isdigit() else 0
        kites = "".join(
            f"<div class=kite><h2>Kite {number}.{n}</h2><p class=price>{n}9.00 €</p></div>"
            for n in (1, 2)
        )
        link = f"<a class=next href={number + 1}>more</a>" if number < 3 else ""
        body = f"<html><body>{kites}{link}</body></html>".encode()
        self.send_response(200 if number else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def catalogue() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Catalogue)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_spider_and_its_worker_find_the_same(daemon: Muster, catalogue: str) -> None:
    recipe("scrapy", "scrapy")

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=daemon.folder,
            env={**os.environ, "MUSTERD_TASKS": daemon.tasks_socket},
            capture_output=True,
            text=True,
            timeout=END_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    spider = ("-m", "scrapy", "runspider", "kites_spider.py", "-a", f"first={catalogue}")
    run(*spider, "-O", "kites.json")
    found = json.loads((daemon.folder / "kites.json").read_text())
    assert len(found) == 6
    assert found[0] == {"name": "Kite 1.1", "price": "19.00 €"}

    Catalogue.visits.clear()
    for _ in range(2):  # the second time out of the cache
        assert json.loads(run("crawl.py", catalogue)) == found
    assert Catalogue.visits == ["/1", "/2", "/3"]
