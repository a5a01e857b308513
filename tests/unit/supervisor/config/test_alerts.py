"""[[alerts]]: which values are accepted, and which are never shown."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.alerts.courier import Undelivered, url_of, without_secrets
from musterd.supervisor.alerts.kinds import KINDS, USUAL
from musterd.supervisor.alerts.rules import Line, Message
from musterd.supervisor.alerts.settings import Destination
from musterd.supervisor.alerts.template import PLACEHOLDERS
from musterd.supervisor.alerts.wording import Room, as_data, texts
from musterd.supervisor.config.alerts import file_problem, machine_problems
from musterd.supervisor.config.load import Loaded, load, show
from musterd.supervisor.settings.diff import compare
from musterd.supervisor.settings.policy import fleet_policy
from musterd.supervisor.settings.sidecars import alert_settings

TOKEN = "123456789:AAEsecretsecret"
URL = f"tgram://{TOKEN}/987654321"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(text: str, mode: int = 0o600) -> Path:
        path = tmp_path / "musterd.toml"
        path.write_text(text)
        path.chmod(mode)
        return path

    return make


def loaded(path: Path, *sets: str) -> Loaded:
    return load([path], None, list(sets), {})


def problem(path: Path, *sets: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        loaded(path, *sets)
    return str(error.value)


def alert(lines: str = "", url: str = f'url = "{URL}"') -> str:
    return f'[[alerts]]\nname = "ops"\n{url}\n{lines}\n'


def test_a_name_and_a_destination_are_enough(write: Callable[..., Path]) -> None:
    config = loaded(write(alert())).config.alerts["ops"]
    assert (config.on, config.url, config.resolved) == (USUAL, URL, True)


def test_an_unknown_event_is_refused_with_those_that_are_known(write: Callable[..., Path]) -> None:
    said = problem(write(alert('on = ["memory.critcal"]')))
    assert 'has "memory.critcal", which is no event: did you mean "memory.critical"?' in said
    assert "worker.fatal" in said
    assert "which is no event" in problem(write(alert('on = ["cat.*"]')))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (alert(url=""), "has no destination: give url_file"),
        (alert('url_file = "/x"'), "has url and url_file: give one destination"),
        (alert(url='url = "nothing"'), "is not an apprise URL"),
        (alert(url="url = 5"), "is not text"),
        (alert(url='command = ["tell"]'), "does not begin with an absolute path"),
        (alert(url='url_secret = "not a name"'), "is not a valid secret name"),
        (alert('timeout = "1h"'), "is longer than 300 s"),
        (alert("on = []"), "has not 1 to 100 events"),
    ],
)
def test_what_cannot_be_used_is_refused(write: Callable[..., Path], text: str, said: str) -> None:
    assert said in problem(write(text))


@pytest.mark.parametrize(
    "text",
    [
        alert(url=f'url = "tgram:/{TOKEN}"'),
        alert('url_file = "/x"'),
        alert('on = ["nothing"]'),
        alert(url=f'url = ["{URL}"]'),
        alert('url_file = "relative"'),
    ],
)
def test_no_problem_shows_the_url(write: Callable[..., Path], text: str) -> None:
    assert TOKEN not in problem(write(text))


# -- urls that others can read ----------------------------------------------------------------


def test_a_url_in_a_file_that_everybody_can_read_is_refused(write: Callable[..., Path]) -> None:
    said = problem(write(alert(), 0o644))
    assert "everybody can read this file: chmod o-r it" in said
    assert TOKEN not in said


def test_a_url_of_a_profile_in_such_a_file_is_refused_too(write: Callable[..., Path]) -> None:
    text = f'[profiles.night.alerts.ops]\nurl = "{URL}"\n[supervisor]\nprofile = "night"\n'
    assert "everybody can read" in problem(write(text, 0o644))


def test_a_url_on_the_command_line_is_refused(write: Callable[..., Path]) -> None:
    said = problem(
        write(alert(url='url_file = "/x"')), 'alerts.ops.url_file=""', f"alerts.ops.url={URL}"
    )
    assert "visible to everybody who lists processes" in said


@pytest.mark.parametrize(
    "url", ["json://127.0.0.1:8080/hook", "jsons://localhost/a/b", "form://[::1]"]
)
def test_a_web_hook_on_this_machine_is_no_secret(write: Callable[..., Path], url: str) -> None:
    assert loaded(write(alert(url=f'url = "{url}"'), 0o644)).config.alerts["ops"].url == url


@pytest.mark.parametrize(
    "url", ["json://a:b@127.0.0.1/x", "json://127.0.0.1/x?token=abc", "json://h/x"]
)
def test_other_web_hooks_are(write: Callable[..., Path], url: str) -> None:
    assert "everybody can read" in problem(write(alert(url=f'url = "{url}"'), 0o644))


def test_a_file_of_a_url_that_everybody_can_read_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "url"
    assert "No such file" in file_problem(str(path))
    path.write_text(URL)
    path.chmod(0o644)
    assert "can be read by everybody" in file_problem(str(path))
    path.chmod(0o640)
    assert file_problem(str(path)) == ""


def test_check_config_looks_at_what_this_machine_has(write: Callable[..., Path]) -> None:
    alerts = loaded(write(alert(url='command = ["/nonexistent/tell"]'))).config.alerts
    assert list(machine_problems(alerts)) == [
        "key 'alerts.ops.command': \"/nonexistent/tell\" cannot be run: correct the path"
    ]
    alerts = loaded(write(alert(url='url_file = "/nonexistent/url"'))).config.alerts
    (said,) = machine_problems(alerts)
    assert "cannot be read: No such file" in said


# -- what is shown ----------------------------------------------------------------------------


def test_the_url_is_not_shown_and_what_is_shown_is_not_taken_for_it(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    shown = show(loaded(write(alert())))
    assert TOKEN not in shown
    assert 'url = "(hidden ' in shown
    assert "is the mark of a hidden URL" in problem(write(shown))


def test_another_url_is_a_change_that_a_reload_takes_over(write: Callable[..., Path]) -> None:
    old = loaded(write(alert()))
    new = loaded(write(alert(url='url = "tgram://987654:AAEotherothr/1"')))
    (change,) = compare(old, new).changes
    assert (change.key, change.effect) == ("alerts.ops.url", "at once")
    assert "AAE" not in change.old + change.new
    assert fleet_policy(old.config).alerts != fleet_policy(new.config).alerts
    assert compare(old, loaded(write(alert()))).changes == []


def test_what_is_not_enabled_is_not_sent(write: Callable[..., Path]) -> None:
    config = loaded(write(alert("enabled = false"))).config
    assert alert_settings(config).rules == []
    assert fleet_policy(config).alerts == ""


# -- the secret itself ------------------------------------------------------------------------


def test_the_url_is_found_where_it_was_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "TELEGRAM"
    path.write_text(f"{URL}\n")
    assert url_of(Destination(url_file=str(path))) == URL
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert url_of(Destination(url_secret="TELEGRAM")) == URL
    monkeypatch.setenv("TELEGRAM", "json://here")
    assert url_of(Destination(url_secret="TELEGRAM")) == "json://here"
    path.write_text(f"{URL}\n{URL}\n")
    with pytest.raises(Undelivered, match="more than one line"):
        url_of(Destination(url_file=str(path)))
    with pytest.raises(Undelivered) as caught:
        url_of(Destination(url_secret="NOBODY"))
    assert str(caught.value) == (
        "secret 'NOBODY' is missing or empty: the daemon has no environment variable NOBODY and no "
        "systemd credential of that name: give it one, and start it again"
    )


def test_no_part_of_a_url_is_left_in_a_reason() -> None:
    url = "mailto://me%40mail.example:p%40ssw0rd@smtp.mail.example/?to=you@other.example"
    text = f"login as me%40mail.example with p@ssw0rd at smtp.mail.example failed: {url}"
    said = without_secrets(text, url)
    assert "ssw0rd" not in said
    assert "mail.example" not in said
    assert "failed" in said


def test_settings_go_over_the_wire(write: Callable[..., Path]) -> None:
    settings = alert_settings(loaded(write(alert('for = "5m"'))).config)
    data = msgspec.json.encode(settings)
    assert msgspec.json.decode(data, type=type(settings)) == settings
    assert settings.rules[0].for_ns == 300 * 10**9


# -- the documentation ------------------------------------------------------------------------

DOCUMENT = (Path(__file__).resolve().parents[4] / "docs" / "alerts.md").read_text()


def test_the_examples_load(write: Callable[..., Path]) -> None:
    examples = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert examples
    for example in examples:
        assert loaded(write(example)).config.alerts


def test_every_condition_with_an_end_is_described() -> None:
    missing = [name for name, kind in KINDS.items() if kind.lasts and f"`{name}`" not in DOCUMENT]
    assert missing == []


def test_the_message_to_a_command_is_as_described() -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
    described = json.loads(shown)
    line = Line("breaker.open", "site.example", since=described["began"][0]["since"])
    message = Message("sites", 3, described["at"], [line])
    told = msgspec.json.decode(msgspec.json.encode(as_data(message, "vps1", Destination())))
    times = re.compile(r"\[.*?\]")  # times are shown in the zone of this machine
    told["body"], described["body"] = (times.sub("", each["body"]) for each in (told, described))
    assert told == described


@pytest.mark.parametrize(
    ("message", "title", "body"),
    [
        (
            Message("ops", 1, 0.0, [Line("task.dead", "p", "boom", 0.0, times=7)], more=3),
            "1 alerts, 3 more",
            "task.dead p: tasks failed for good; boom (7 times) [",
        ),
        (
            Message("ops", 1, 0.0, [Line("worker.fatal", "p/0", "", 10.0, 75.0)]),
            "worker.fatal p/0",
            ", over after 1 min 5 s]",
        ),
        (
            Message("ops", 1, 0.0, ended=[Line("memory.critical", "", "", 0.0, 7300.0)]),
            "resolved: memory.critical",
            "resolved: memory.critical after 2 h 1 min",
        ),
        (Message("ops", 0, 0.0, test=True), "test of alert ops", "This is a test message."),
    ],
)
def test_what_a_message_says(message: Message, title: str, body: str) -> None:
    [text] = texts(message, "vps1", Destination(), Room())
    assert text.title == f"musterd on vps1: {title}"
    assert body in text.body


@pytest.mark.parametrize("key", ["title", "body"])
def test_an_unknown_placeholder_is_an_error_that_lists_the_known(
    key: str, write: Callable[..., Path]
) -> None:
    good = f'[[alerts]]\nname = "me"\ncommand = ["/bin/true"]\n{key} = "{{{{x}}}} {{summary}}"\n'
    assert getattr(loaded(write(good)).config.alerts["me"], key) == "{{x}} {summary}"
    for wrong, why in [
        ("{sumary}", "unknown placeholder {sumary}: known are {after}, {alert}, {at}, {before}"),
        ("{summary.real}", "unknown placeholder {summary.real}"),
        ("{summary!r}", "unknown placeholder {summary!r}"),
        ("{at:>10}", "unknown placeholder {at:>10}"),
        ("{0}", "unknown placeholder {0}"),
        ("{", "single { or }"),
        ("x" * 2001, "longer than 2000 characters"),
    ]:
        with pytest.raises(ConfigurationError, match=re.escape(why)):
            loaded(write(good.replace("{{x}} {summary}", wrong)))


def test_every_placeholder_is_described() -> None:
    assert [name for name in PLACEHOLDERS if f"`{{{name}}}`" not in DOCUMENT] == []
