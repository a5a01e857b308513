"""docs/migrating.md: the code on both sides works and gives the same results."""

import configparser
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.supervisor.config import load as configuration
from musterd.supervisor.config.schema import Config
from support.daemon import Jobs
from support.surroundings import Document
from support.waiting import Waiting

PAGE = "docs/migrating.md"
ROOT = Path(__file__).parents[2]
SECONDS = 60
LETTERS = ("dear shop", "dear bank", "dear aunt")
# Celery is not a dependency. Without a broker, a call runs the task in the calling process.
EAGER = """
import prices_celery, runpy
prices_celery.app.conf.update(
    task_always_eager=True, broker_url="memory://", result_backend="cache+memory://"
)
runpy.run_path("buy_celery.py")
"""

Documents = Callable[[str], Any]


@pytest.fixture
def page(document: Documents) -> Any:
    return document(PAGE)


def keys(cls: Any = Config, prefix: str = "") -> Iterator[str]:
    """Return every dotted key of the configuration, as docs/configuration.md writes it."""
    for field in msgspec.structs.fields(cls):
        key = f"{prefix}{field.encode_name}"
        kind, sections = configuration._kind(field.type), configuration._sections(field.type)
        if kind is None:
            yield from keys(sections or field.type, f"{key}.NAME." if sections else f"{key}.")
        else:
            yield key


def rows(section: str) -> list[list[str]]:
    """Return the cells of the page's table."""
    found = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return [[there, here] for there, here in found if there != "there"]


# -- supervisord ------------------------------------------------------------------------------


def test_the_worker_sends_the_letters_that_a_shell_and_a_program_submit(page: Document) -> None:
    daemon = page.start("letters.toml")
    page.run("sh", "-euc", page.commands("From supervisord"))
    with daemon.client() as client:
        for text in LETTERS[1:]:
            client.submit("letters.send", {"text": text}).result(SECONDS)
    assert tuple((page.folder / "sent.txt").read_text().splitlines()) == LETTERS


def test_every_key_of_the_example_for_supervisord_has_its_row(page: Document) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(next(text for kind, text in page.blocks if kind == "ini"))
    (program,) = parser.sections()
    assert program.startswith("program:")
    there = "".join(cells[0] for cells in rows(page.section("Keys")))
    assert [key for key in parser[program] if f"`{key}`" not in there] == []


def test_the_keys_on_our_side_exist(page: Document) -> None:
    known = set(keys())
    named = [
        key
        for heading in ("Keys", "Names")
        for _, here in rows(page.section(heading))
        for key in re.findall(r"`((?:pools\.NAME|supervisor|store)\.[a-z_.]+)`", here)
    ]
    assert len(named) > 20
    assert [key for key in named if key not in known] == []


def test_a_program_that_a_worker_owns_is_started_again_and_ends_with_it(
    page: Document, waiting: Waiting
) -> None:
    daemon = page.start("program.toml")

    def program() -> int:
        """Return the program's pid as we see it: the worker's only child."""
        children = f"/proc/{daemon.worker('ticker/0').pid}/task/*/children"
        found = [file.read_text() for file in Path("/").glob(children[1:])]
        return int("".join(found).split()[0]) if "".join(found).split() else 0

    first = waiting("it runs", program)
    subprocess.run(["kill", "-KILL", str(first)], check=True)
    second = waiting(
        "another one runs",
        lambda: daemon.worker("ticker/0").state == "RUNNING" and program() not in (0, first),
    )
    assert second
    with daemon.client() as client:
        assert client.submit("ticker.pid").result(SECONDS) > 0
    last = program()
    daemon.kill()
    waiting("it is gone", lambda: not Path(f"/proc/{last}").exists())
    daemon.start()


# -- Celery -----------------------------------------------------------------------------------


def printed(page: Document, first: str) -> str:
    return next(text for kind, text in page.blocks if not kind and text.startswith(first))


def test_the_tasks_of_celery_say_the_same_as_those_of_musterd(page: Document) -> None:
    page.start("prices.toml")
    assert page.run("buy.py") == printed(page, "{'shop'")


def test_the_tasks_of_celery_work_as_they_are_printed(page: Document) -> None:
    pytest.importorskip("celery", reason="Celery is not installed")
    assert page.run(sys.executable, "-c", EAGER) == printed(page, "{'shop'")


def test_a_chord_as_a_task_does_not_run_its_parts_again(page: Document, waiting: Waiting) -> None:
    daemon = page.daemon
    daemon = page.start("sweep.toml", pools__sweep__env={"MUSTERD_TASKS": daemon.tasks_socket})
    with daemon.client() as client:
        args = {"shops": ["aurora", "borealis"], "item": "tea"}
        daemon.ctl("pause", "prices")
        sweep = client.submit("sweep.cheapest", args)
        waiting("its parts wait", lambda: sum(daemon.pool("prices").queued.values()) == 2)
        worker = daemon.worker("sweep/0")
        subprocess.run(["kill", "-KILL", str(worker.pid)], check=True)
        waiting("another worker has it", lambda: daemon.worker("sweep/0").restarts == 1)
        daemon.ctl("resume", "prices")
        assert sweep.result(SECONDS) == "borealis"
    done = [worker.tasks_done for worker in daemon.pool("prices").workers]
    assert sum(done) == 3, "two parts and the last step"


def test_with_one_crash_allowed_nothing_is_begun_twice(jobs: Jobs) -> None:
    daemon = jobs(size=1, pool={"max_crashes": 1})
    with daemon.client() as client:
        for how in (signal.SIGKILL, signal.SIGSEGV):
            outcome = client.submit("jobs.die", {"signal": how}, max_retries=0).outcome(SECONDS)
            assert outcome.state == "failed"
            assert "PoisonTask" in str(outcome.error)
    assert daemon.pool("jobs").lost == {"signal": 2}, "one worker for each"


# -- a pool of processes in your own program ------------------------------------------------------


def test_pools_of_ones_own_and_the_daemon_get_the_same_sum(page: Document) -> None:
    said = re.search(r"Both print (\d+)\.", page.text)
    assert said is not None
    page.start("sums.toml")
    assert [page.run(name) for name in ("sums_pool.py", "sums_client.py")] == [f"{said[1]}\n"] * 2


# -- the page itself --------------------------------------------------------------------------


def test_every_configuration_of_the_page_is_good(page: Document) -> None:
    names = sorted(path.name for path in page.folder.glob("*.toml"))
    assert names == ["letters.toml", "prices.toml", "program.toml", "sums.toml", "sweep.toml"]
    for name in names:
        page.run("musterd", "check-config", "-c", name)


def test_links_of_the_page_lead_somewhere(page: Document) -> None:
    anchors = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", page.text, re.MULTILINE)
    }
    for file, anchor in re.findall(r"\]\(([^)#:]*)#?([^)]*)\)", page.text):
        if file:
            assert (ROOT / "docs" / file).exists(), file
        else:
            assert anchor in anchors, anchor
