"""`musterd check-config` reports every mistake at once, each with its file and key."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from musterd.supervisor.__main__ import _tell_unread

WORK = """
import time
from musterd import Worker, task

class Work(Worker):
    @task
    def fetch(self, ctx, url: str, depth: int = 1) -> None: ...

    @task
    def anything(self, ctx, **more: int) -> None: ...

class Blocked(Exception):
    pass

def no_exception(): ...
"""
POOL = '[pools.work]\nworker = "work:Work"\n'
# Words of the implementation, which mean nothing to users.
INTERNAL = re.compile(
    r"Traceback|WorkerLoadError|make_spec|unpack|subscriptable|NoneType|KeyError|AttributeError"
    r"|object has no|msgspec|<class|0x[0-9a-f]{6}"
)


class Checked:
    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.lines = text.removeprefix("musterd: ").splitlines()

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def line(self, *words: str) -> str:
        """Return the one line that has all of these words."""
        found = [line for line in self.lines if all(word in line for word in words)]
        assert len(found) == 1, f"{words} in {len(found)} lines of:\n{self!r}"
        return found[0]


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., Checked]:
    """Check a configuration: check("text of musterd.toml", **{"50.toml": "text of a drop-in"})."""
    (tmp_path / "work.py").write_text(WORK)

    def check(text: str, **drop_ins: str) -> Checked:
        path = tmp_path / "musterd.toml"
        path.write_text(text)
        for name, more in drop_ins.items():
            (tmp_path / "musterd.d").mkdir(exist_ok=True)
            (tmp_path / "musterd.d" / f"{name}.toml").write_text(more)
        done = subprocess.run(
            [sys.executable, "-m", "musterd.supervisor", "check-config", "-c", str(path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "MUSTERD_SUPERVISOR__RUNTIME_DIR": "/tmp/md-check"},
        )
        checked = Checked(done.returncode, done.stderr)
        for line in checked.lines:
            assert not INTERNAL.search(line), line
        return checked

    return check


def schedule(name: str, task: str, args: str = "{}") -> str:
    return f'[[schedule]]\nname = "{name}"\ntask = "{task}"\nargs = {args}\nevery = "5m"\n'


# -- schedules --------------------------------------------------------------------------------


def test_a_schedule_whose_task_and_arguments_fit_is_good(check: "Callable[..., Checked]") -> None:
    text = POOL
    text += schedule("plain", "work.fetch", '{url = "https://site.example/"}')
    text += schedule("secret", "work.fetch", '{url = {"$secret" = "URL"}, depth = 3}')
    text += schedule("more", "work.anything", "{a = 1, b = 2}")
    found = check(text)
    assert found.code == 0, found


@pytest.mark.parametrize(
    ("task", "args", "key", "words"),
    [
        ("work.fetsh", "{}", "task", "has no task 'fetsh'; it has anything, fetch"),
        ("work.fetch", "{}", "args", "the argument 'url' is missing"),
        ("work.fetch", "{url = 5}", "args", "url must be str, not int"),
        ("work.fetch", '{url = "x", deep = 1}', "args", "there is no argument 'deep'"),
        ("work.fetch", '{url = "x", depth = "1"}', "args", "depth must be int, not str"),
        ("work.fetch", '{url = "x", depth = {"$secret" = "N"}}', "args", "depth must be int"),
        ("work.anything", '{a = "x"}', "", ""),
        ("nowhere.fetch", "{}", "task", "has no pool: the pools are work"),
    ],
)
def test_a_schedule_that_cannot_be_is_found(
    check: "Callable[..., Checked]", task: str, args: str, key: str, words: str
) -> None:
    found = check(POOL + schedule("promos", task, args))
    if not key:  # values of **kwargs are not checked
        assert found.code == 0, found
        return
    assert found.code == 78
    assert found.line(f"musterd.toml: key 'schedule.promos.{key}'", words)
    assert len(found.lines) == 1, found


def test_a_schedule_out_of_service_may_be_wrong(check: "Callable[..., Checked]") -> None:
    text = POOL + schedule("promos", "work.fetsh") + "enabled = false\n"
    assert check(text).code == 0


# -- imports ----------------------------------------------------------------------------------


def test_the_time_of_an_import_is_the_start_timeout_of_its_pool(
    check: "Callable[..., Checked]", tmp_path: Path
) -> None:
    # Shorter than the limit for functions of no pool, and than the default of start_timeout.
    (tmp_path / "slow.py").write_text(WORK + "\ntime.sleep(20)\n")
    text = POOL + '[pools.slow]\nworker = "slow:Work"\nstart_timeout = "700ms"\n'
    found = check(text)
    assert found.code == 78
    assert found.line(
        "musterd.toml: key 'pools.slow.worker'",
        '"slow:Work"',
        "longer than start_timeout (700ms): raise it",
    )


def test_exceptions_that_a_breaker_is_to_count_must_be_there(
    check: "Callable[..., Checked]",
) -> None:
    text = POOL + '[targets."site.example"]\ncounts = ["work:Blocked", "usual", "TimeoutError"]\n'
    assert check(text).code == 0
    text += '[classes.soft]\ncounts = ["work:Bloked", "wrok:Blocked", "work:no_exception"]\n'
    found = check(text)
    assert found.line("musterd.toml: key 'classes.soft.counts'", "has no exception 'Bloked'")
    assert found.line("musterd.toml: key 'classes.soft.counts'", "No module named 'wrok'")
    assert found.line("musterd.toml: key 'classes.soft.counts'", "has no exception 'no_exception'")


def test_what_a_module_prints_is_not_taken_for_the_answer(
    check: "Callable[..., Checked]", tmp_path: Path
) -> None:
    (tmp_path / "loud.py").write_text('print("{}")\nprint("[]")\n' + WORK)
    text = '[pools.loud]\nworker = "loud:Work"\n' + schedule("a", "loud.nothing")
    assert check(text).line("schedule.a.task", "has no task 'nothing'")


# -- all at once ------------------------------------------------------------------------------


def test_everything_is_told_at_once_with_its_file(check: "Callable[..., Checked]") -> None:
    text = (
        POOL
        + '[supervisor]\ncontrol_group = "no-such-group-here"\n'
        + "[retry]\nmax_retries = -1\n"
        + '[pools.gone]\nworker = "gone:Work"\n'
        + '[pools.broken]\nworker = "work:Work"\nsize = "many"\n'
        + schedule("typo", "work.fetsh")
        + schedule("of-broken", "broken.fetch", '{url = "x"}')
        + schedule("nowhere", "nowhere.fetch")
        + '[[schedule]]\ntask = "work.fetch"\nevery = "soon"\n'
        + '[targets.aurora]\nclass = "hard"\n'
        + "[classes.soft]\nmax_concurrent = -2\n"
        + '[targets.borealis]\nclass = "soft"\n'
    )
    found = check(text, first='[pools.late]\nworker = "work:Late"\n')
    assert found.code == 78
    expected = [
        ("musterd.toml: supervisor.control_group = 'no-such-group-here'", "no such group"),
        ("musterd.toml: key 'retry.max_retries'", "out of range"),
        ("musterd.toml: key 'pools.gone.worker'", "there is no module 'gone'"),
        ("musterd.toml: key 'pools.broken.size'", "not an integer"),
        ("musterd.toml: key 'schedule.typo.task'", "has no task 'fetsh'"),
        ("musterd.toml: key 'schedule.nowhere.task'", "has no pool"),
        ("musterd.toml: key 'schedule': entry 4 has no name",),
        ("musterd.toml: key 'schedule.entry-4.every'", "soon"),
        ("musterd.toml: key 'targets.aurora.class'", "is not a class of [classes]"),
        ("musterd.toml: key 'classes.soft.max_concurrent'", "out of range"),
        ("musterd.d/first.toml: key 'pools.late.worker'", "has no class 'Late'"),
    ]
    for words in expected:
        assert found.line(*words), words
    assert len(found.lines) == len(expected), found


def test_a_section_that_is_no_table_is_told(check: "Callable[..., Checked]") -> None:
    for section in ("supervisor", "retry", "pools", "schedule"):
        found = check(f"{section} = 5\n")
        assert found.code == 78, section
        assert found.line(f"musterd.toml: key '{section}': value 5 is not a table")


def test_a_file_that_cannot_be_read_does_not_hide_the_others(
    check: "Callable[..., Checked]",
) -> None:
    text = POOL + schedule("typo", "work.fetsh")
    found = check(text, a="this is not TOML", b="[retry]\nmax_retires = 1\n")
    assert found.line("musterd.d/a.toml: not valid TOML")
    assert found.line("musterd.d/b.toml: key 'retry.max_retires'", "did you mean 'max_retries'?")
    assert found.line("musterd.toml: key 'schedule.typo.task'")


def test_a_configuration_that_is_not_named_is_not_taken_for_the_one_that_was_checked(
    tmp_path: Path,
) -> None:
    def check(*files: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "musterd.supervisor", "check-config", *files],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=tmp_path,
        )

    assert "not read" not in check().stderr
    (tmp_path / "musterd.toml").write_text("[pools.parser]\nsize = 2\n")
    if not Path("/etc/musterd/musterd.toml").exists():  # else it is told on terminals alone
        said = "musterd: musterd.toml in this folder is not read: type -c musterd.toml\n"
        assert check().stderr == said
    assert "not read" not in check("-c", "musterd.toml").stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_folder_that_is_not_for_this_user_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shut" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "shut" / "inner")
    (tmp_path / "shut" / "inner").chmod(0)
    os.seteuid(65534)
    try:
        _tell_unread(())
    finally:
        os.seteuid(0)
        (tmp_path / "shut" / "inner").chmod(0o700)
    assert capsys.readouterr().err == ""
