"""Tests of the example: what musterd.toml says of each exchange, the login, and the bot.

    pytest examples/promo_watch

Parsers run in the tests themselves; the bot speaks to a real daemon. Both come with musterd.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bot import Bot
from sites import PASSWORD, PORT

from musterd import AsyncClient, TaskFailed
from musterd.testing import LocalDaemon, LocalTask, LocalWorker, OpenWorker, StartDaemon

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Serve the exchanges on a free port; nothing changes by itself."""
    command = [sys.executable, str(HERE / "sites.py"), "--port", "0", "--still"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sites:
        assert sites.stdout is not None
        yield f"http://127.0.0.1:{int(sites.stdout.readline())}"
        sites.terminate()


@pytest.fixture(scope="module")
def config(site: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "musterd.toml"
    text = (HERE / "musterd.toml").read_text(encoding="utf-8")
    path.write_text(text.replace(f"http://127.0.0.1:{PORT}", site), encoding="utf-8")
    return path


@pytest.fixture
def patience() -> float | None:
    """Give each exchange as much real time as it takes."""
    return None


@pytest.fixture
def parser(musterd_worker: OpenWorker, config: Path, patience: float | None) -> LocalWorker[Any]:
    secrets = {"VAULT_PASSWORD": PASSWORD}
    return musterd_worker(
        "musterd.workers.parser:ParserWorker", config=config, secrets=secrets, patience=patience
    )


def look(parser: LocalWorker[Any], site: str, name: str, **options: Any) -> LocalTask[Any]:
    """Look at an exchange as its schedule does."""
    shown = "price" if name == "vault" else "promo"
    args = {"url": f"{site}/{name}", "select": {shown: f".{shown}"}}
    return parser.submit("extract", args, target=name, **options)


def test_a_page_is_read(parser: LocalWorker[Any], site: str) -> None:
    assert look(parser, site, "aurora").result()["promo"] == "no fees in November"


def test_whoever_is_not_known_is_logged_in_once(parser: LocalWorker[Any], site: str) -> None:
    prices = [look(parser, site, "vault", session="vault").result()["price"] for _ in range(2)]
    parser.crash()
    prices.append(look(parser, site, "vault", session="vault").result()["price"])
    assert prices == ["49.00 €"] * 3
    logins = parser.run("extract", url=f"{site}/login", select={"count": "form + p"})
    assert logins["count"] == "logins: 1"


def test_an_exchange_that_fails_half_the_time_is_asked_again(
    parser: LocalWorker[Any], site: str
) -> None:
    first = look(parser, site, "gremlin")  # broken, then well
    assert first.result()["promo"] == "a token for every bug"
    assert (len(first.attempts), first.pauses) == (2, [0.2])
    # Busy: no error where nobody watches.
    assert look(parser, site, "gremlin").result() == {"promo": None}


@pytest.mark.parametrize("patience", [1.0])  # who has been silent for so long never answers
def test_an_exchange_that_never_answers_is_left_alone(parser: LocalWorker[Any], site: str) -> None:
    for _ in range(3):
        with pytest.raises(TaskFailed, match="SiteTimeout"):
            look(parser, site, "abyss").result()
    began = parser.elapsed
    with pytest.raises(TaskFailed, match="BreakerOpen"):
        look(parser, site, "abyss").result()
    assert parser.elapsed == began, "it was not even asked"
    assert look(parser, site, "aurora").result(), "nobody else waits for it"
    parser.advance(301)
    with pytest.raises(TaskFailed, match="SiteTimeout"):
        look(parser, site, "abyss").result()


@pytest.fixture(scope="module")
def daemon(musterd_daemon: StartDaemon, config: Path) -> LocalDaemon:
    """Run a daemon with the parsers alone."""
    return musterd_daemon(
        config, pools={"browser": {"enabled": False}}, secrets={"VAULT_PASSWORD": PASSWORD}
    )


def test_the_bot_watches_what_it_is_told(
    daemon: LocalDaemon, site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def talk(*lines: str) -> None:
        spoken: asyncio.Queue[str] = asyncio.Queue()
        async with AsyncClient() as musterd:
            for line in (*lines, "quit"):
                spoken.put_nowait(line)
            await Bot(musterd).run(spoken)

    asyncio.run(talk(f"/watch {site}/kiosk"))
    said = capsys.readouterr().out
    assert f"{site}/kiosk is watched as watch-" in said
    assert "'a coffee with every trade'" in said
    daemon.kill()
    daemon.start()
    name = said.partition("is watched as ")[2].split()[0]
    asyncio.run(talk(f"/unwatch {name}", "/unwatch aurora"))
    said = capsys.readouterr().out
    assert f"{name} is not watched any more" in said
    assert "There are" in said
