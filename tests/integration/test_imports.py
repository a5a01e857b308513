"""musterctl import on a real daemon: each kind of file, what is refused, thousands of sites."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_added_schedules import TURN_SECONDS_MAX, names, slowest_turn

from support.daemon import Muster, Musters

PATIENCE_SECONDS = 60.0
MANY = 5000
PAGE = (
    b"<html><body><h1>Kites</h1><script>var x</script><b class=price>49 EUR</b>"
    b"<b class=price>39 EUR</b></body></html>"
)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/kites"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def daemon(muster: Musters) -> Muster:
    ours = {"task": "parser.extract", "cron": "0 0 1 1 *"}
    return muster({"parser": {"size": 1}}, schedule__ours=ours)


def imported(daemon: Muster, *words: str, code: int = 0) -> str:
    ended = daemon.ctl("import", *words)
    said = ended.stdout + ended.stderr
    assert ended.returncode == code, said
    assert all(len(line) <= 80 for line in said.splitlines() if "/tmp" not in line)  # a path
    return said


def test_a_site_of_each_kind_is_imported_and_runs(daemon: Muster, url: str, tmp_path: Path) -> None:
    table, jobs, watches = (tmp_path / name for name in ("s.csv", "urls.yaml", "watches.json"))
    table.write_text(f"name,url,select.price,every\nsheet,{url},.price,5m\n")
    jobs.write_text(f"name: A job\nurl: {url}\nfilter: [{{css: b.price}}, html2text]\n")
    watch = {"url": url, "title": "A watch", "paused": True, "tags": ["x"]}
    watches.write_text(json.dumps({"watching": {"uuid": watch}}))
    would = imported(daemon, str(table), "--dry-run")
    assert "sheet: parser.extract, every 5m\n" in would
    assert "would make 1 schedule, refuse 0" in would
    assert names(daemon).keys() == {"ours"}

    assert imported(daemon, str(table)) == "made 1 schedule, refused 0\n"
    imported(daemon, str(jobs), "--every", "7m")
    assert 'watch 1 (a-watch): tags = ["x"] is lost' in imported(daemon, str(watches))
    found = names(daemon)
    assert {name: (each["state"], each["when"]) for name, each in found.items()} == {
        "ours": ("active", found["ours"]["when"]),
        "sheet": ("active", "every 5m"),
        "a-job": ("active", "every 7m"),
        "a-watch": ("paused", "every 1h"),
    }
    assert all(name in daemon.ctl("schedule").stdout for name in found)
    with daemon.client() as client:
        results = {
            name: client.schedules.run(name).result(PATIENCE_SECONDS)
            for name in ("sheet", "a-job", "a-watch")
        }
    assert results == {
        "sheet": {"price": "49 EUR"},
        "a-job": {"text": ["49 EUR", "39 EUR"]},
        "a-watch": {"text": ["Kites", "49 EUR", "39 EUR"]},
    }


def test_what_a_site_would_be_given_is_shown_before(daemon: Muster, tmp_path: Path) -> None:
    """A list of somebody else may send a secret of the pool to a site of theirs."""
    table = tmp_path / "sites.csv"
    headers = '{"X-Key": {"$secret": "SHOP_KEY"}, "X-Plain": "value"}'.replace('"', '""')
    table.write_text(
        f'name,url,args.headers,args.max_bytes\nsheet,https://evil.example/,"{headers}",9000\n'
    )
    would = imported(daemon, str(table), "--dry-run")
    assert "    args.headers = (not shown)\n    args.max_bytes = 9000\n" in would
    assert "    is given the secrets: SHOP_KEY\n" in would
    assert "value" not in would


def test_what_is_refused_is_told_by_entry_and_the_others_are_made(
    daemon: Muster, tmp_path: Path
) -> None:
    site = "https://shop.example/"
    table = tmp_path / "sites.csv"
    table.write_text(
        "name,url,every,evry,login,task\n"
        f"good,{site},5m,,,\n"
        f"slow,{site},5x,,,\n"
        f"typo,{site},,5m,,\n"
        f"code,{site},,,os:system,\n"
        f"pool,{site},,,,nobody.extract\n"
        f"ours,{site},,,,\n"
        "none,,,,,\n"
    )
    said = " ".join(imported(daemon, str(table), code=1).split())
    assert "made 1 schedule, refused 6" in said
    assert "line 3 (slow): refused: key 'every': value \"5x\" has the unit" in said
    assert "line 4 (typo): refused: key 'evry': unknown key: did you mean 'every'" in said
    assert "line 5 (code): refused: key 'login': is for configuration files only" in said
    assert "line 6 (pool): refused: key 'task': value \"nobody.extract\" has no pool" in said
    assert "line 7 (ours): refused: schedule 'ours' is in" in said
    assert "line 8 (none): refused: it has no url" in said
    assert names(daemon).keys() == {"ours", "good"}

    table.write_text(f"name,url,every\ngood,{site}new,9m\n")
    assert "is there already" in imported(daemon, str(table), code=1)
    assert "is there already" in imported(daemon, str(table), "--dry-run", code=1)
    assert names(daemon)["good"]["when"] == "every 5m"
    assert "would make 1" in imported(daemon, str(table), "--dry-run", "--replace")
    assert names(daemon)["good"]["when"] == "every 5m"
    imported(daemon, str(table), "--replace")
    assert names(daemon)["good"]["when"] == "every 9m"

    ended = daemon.ctl("--json", "import", str(table))
    assert ended.returncode == 1
    [refused] = json.loads(ended.stdout)["refused"]
    assert (refused["entry"], refused["name"]) == ("line 2", "good")


def test_files_that_cannot_be_used_are_told(daemon: Muster, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.json"
    garbage.write_bytes(b"\x00\x01garbage")
    assert "not valid JSON" in imported(daemon, str(garbage), code=1)
    assert "no such file" in imported(daemon, str(tmp_path / "missing.csv"), code=1)
    assert "must end in .csv" in imported(daemon, str(tmp_path / "sites.txt"), code=2)
    assert "Is a directory" in imported(daemon, _folder(tmp_path / "dir.csv"), code=1)
    empty = tmp_path / "empty.csv"
    empty.write_text("url\n")
    assert "has no entries" in imported(daemon, str(empty), code=1)
    large = tmp_path / "large.csv"
    large.write_bytes(b"url\n")
    with large.open("r+b") as file:
        file.truncate(33 * 1024 * 1024)
    assert "is larger than" in imported(daemon, str(large), code=1)
    assert names(daemon).keys() == {"ours"}


def _folder(path: Path) -> str:
    path.mkdir()
    return str(path)


@pytest.mark.timeout(300)
def test_thousands_are_imported_at_once(daemon: Muster, tmp_path: Path) -> None:
    table = tmp_path / "sites.csv"
    rows = [f"https://site-{number}.example/,site-{number},yes" for number in range(MANY)]
    table.write_text("\n".join(["url,name,paused", *rows]))
    assert f"made {MANY} schedules, refused 0" in imported(daemon, str(table))
    found = names(daemon)
    assert sum(each["state"] == "paused" for each in found.values()) == MANY
    daemon.kill()
    daemon.start()
    assert names(daemon).keys() == found.keys()
    assert names(daemon)["site-4711"]["state"] == "paused"
    assert slowest_turn(daemon.log()) <= TURN_SECONDS_MAX
