"""Pictures of changes: with the message where they can be, and never in its way."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from musterd.ipc.wire.artefacts import ATTACHED, PNG_END, Keep, publish
from musterd.supervisor.alerts import pictures
from musterd.supervisor.alerts.changes import Change
from musterd.supervisor.alerts.courier import Delivery, Outcome, deliver
from musterd.supervisor.alerts.couriers import COMMAND
from musterd.supervisor.alerts.pictures import pictures_of
from musterd.supervisor.alerts.rules import Message
from musterd.supervisor.alerts.settings import Destination
from support.loopback import Loopback

# Some of apprise's hundred plug-ins import old modules of Python.
OLD_MODULES = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CHANGE = Change("shop/kites", 2, 1.0, "t1", "d", "price 1 → 2", {"price": 1}, {"price": 2})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "artefacts"
    made.mkdir()
    return made


@pytest.fixture
def site() -> Iterator[Loopback]:
    made = Loopback()
    try:
        yield made
    finally:
        made.close()


def add(folder: Path, task: str, size: int = 100) -> bytes:
    staged = folder.parent / "staged"
    staged.mkdir()
    data = b"x" * (size - len(PNG_END)) + PNG_END
    (staged / ATTACHED).write_bytes(data)
    publish(Keep(str(folder), 100, 2**30, 10**18), task, 1, staged, 1)
    return data


def message(*changes: Change) -> Message:
    return Message("me", 1, 1.0, changes=list(changes))


def test_a_message_has_few_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [Change("s", number, task=f"t{number}") for number in range(1, 20)]
    for each in changes:
        add(folder, each.task)
    found = pictures_of(str(folder), message(*changes))
    names = [f"s-{number}.png" for number in range(1, pictures.PICTURES_MAX + 1)]
    assert [each.name for each in found] == names
    monkeypatch.setattr(pictures, "PICTURES_BYTES_MAX", 250)
    assert [each.name for each in pictures_of(str(folder), message(*changes))] == names[:2]
    assert pictures_of("", message(*changes)) == []
    assert pictures_of(str(folder / "gone"), message(*changes)) == []


def test_a_command_gets_the_path_of_the_picture(folder: Path, tmp_path: Path) -> None:
    data = add(folder, "t1")
    script = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    command = (sys.executable, "-c", script, str(tmp_path / "heard.json"))
    call = Delivery(
        Destination(command=command), message(CHANGE, Change("other")), "here", str(folder)
    )
    answer = subprocess.run(  # the courier ends all processes below it
        [*COMMAND, str(os.getpid())],
        input=msgspec.json.encode(call),
        capture_output=True,
        check=True,
    )
    assert msgspec.json.decode(answer.stdout, type=Outcome) == Outcome()
    heard = json.loads((tmp_path / "heard.json").read_text())
    first, second = (each["picture"] for each in heard["changes"])
    assert Path(first).read_bytes() == data
    assert second == ""


@OLD_MODULES
def test_a_service_that_refuses_the_picture_gets_the_message_without(
    folder: Path, site: Loopback
) -> None:
    pytest.importorskip("apprise")
    add(folder, "t1")
    site.takes_files = False
    call = Delivery(Destination(url=site.hook), message(CHANGE), "here", str(folder))
    assert deliver(call) == Outcome()
    assert site.calls == 2
    assert site.titles() == ["shop/kites: price 1 → 2 (again)"], "the first may have arrived"


@OLD_MODULES
def test_a_service_that_takes_no_pictures_is_asked_once(
    folder: Path, site: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = pytest.importorskip("apprise.plugins.custom_json")
    monkeypatch.setattr(plugin.NotifyJSON, "attachment_support", False)
    add(folder, "t1")
    call = Delivery(Destination(url=site.hook), message(CHANGE), "here", str(folder))
    assert deliver(call) == Outcome()
    assert site.titles() == ["shop/kites: price 1 → 2"]
    assert site.calls == 1
    assert not site.heard[0].get("attachments")
