"""ctx.artefact(): kept of failed attempts alone, never of private ones unless asked for."""

import math
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from musterd.ipc.watching.rules import Rules, encode_rules
from musterd.ipc.wire import artefacts
from musterd.ipc.wire.artefacts import ATTEMPT_BYTES_MAX, FILE_BYTES_MAX, FILES_MAX, Keep
from musterd.ipc.wire.messages import Lease
from musterd.workers.authoring import settings
from musterd.workers.authoring.base import Context

Make = Callable[..., Context]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep artefacts in this folder."""
    folder, temporary = tmp_path / "artefacts", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    keep = Keep(str(folder), 100, 2**30, 10**15)
    monkeypatch.setattr(settings, "_settings", settings.Settings(artefacts=keep))
    return folder


def context(session: str = "", *, opened: bool = False, used: bool = False) -> Context:
    lease = Lease(1, "task", "x", b"", 1, 0, session=session)
    vault = SimpleNamespace(
        opened=opened, used=used, redact=lambda text: text.replace("hunter2", "***")
    )
    channel: Any = SimpleNamespace(vault=vault)
    return Context("task", 3, math.inf, channel, lease)


def files(folder: Path) -> dict[str, bytes]:
    found = artefacts.artefacts_of(str(folder), "task")
    return {each.name: Path(each.path).read_bytes() for each in found}


def test_a_failed_attempt_keeps_them_for_its_owner_alone_without_known_secrets(kept, tmp_path):
    ctx = context()
    ctx.artefact("page.html", "<p>hunter2\udc80")
    ctx.artefact("shot.png", b"\x89PNG hunter2")
    ctx.artefact("late.txt", lambda: "made when it failed")
    assert list(kept.iterdir()) == []
    ctx.keep_artefacts()
    assert files(kept) == {
        "attempt-3.late.txt": b"made when it failed",
        "attempt-3.page.html": b"<p>***?",
        "attempt-3.shot.png": b"\x89PNG hunter2",
    }
    (entry,) = kept.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in entry.iterdir()} == {0o600}
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_attempt_that_succeeds_or_is_cancelled_leaves_nothing(kept, tmp_path):
    ctx = context()
    path = ctx.artefact_path("trace.zip")
    assert path is not None
    path.write_bytes(b"t")
    ctx.drop_artefacts()
    ctx = context()
    ctx.artefact("page.html", "<p>")
    ctx.cancelled = True
    ctx.keep_artefacts()
    assert list(kept.iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("private", [{"session": "acme"}, {"opened": True}, {"used": True}])
def test_nothing_is_kept_of_a_private_attempt_unless_asked_for(kept, private):
    ctx = context(**private)
    ctx.artefact("page.html", "<p>")
    assert ctx.artefact_path("trace.zip") is None
    ctx.keep_artefacts()
    assert files(kept) == {}
    ctx = context(**private)
    ctx.artefact("page.html", "<p>", always=True)
    ctx.keep_artefacts()
    assert files(kept) == {"attempt-3.page.html": b"<p>"}


def test_a_secret_that_is_looked_up_later_takes_them_away(kept):
    ctx = context()
    ctx.artefact("page.html", "<p>")
    assert ctx._channel is not None
    ctx._channel.vault.used = True  # type: ignore[misc]
    ctx.keep_artefacts()
    assert files(kept) == {}


def test_what_a_tool_wrote_is_kept_within_the_limits_and_links_are_not(kept, tmp_path):
    ctx = context()
    for name, size in (("a", 10), ("b", FILE_BYTES_MAX), ("c", FILE_BYTES_MAX)):
        path = ctx.artefact_path(name)
        assert path is not None
        with path.open("wb") as file:
            file.truncate(size)
    over = ctx.artefact_path("over")
    assert over is not None
    with over.open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    (tmp_path / "secret").write_bytes(b"s")
    link = ctx.artefact_path("link")
    assert link is not None
    link.symlink_to(tmp_path / "secret")
    folder = ctx.artefact_path("folder")
    assert folder is not None
    folder.mkdir()
    (folder / "deep").write_bytes(b"d")
    ctx.keep_artefacts()
    assert not list(kept.rglob("deep"))
    assert sum(map(len, files(kept).values())) <= ATTEMPT_BYTES_MAX
    assert sorted(files(kept)) == ["attempt-3.a", "attempt-3.b"]
    assert (tmp_path / "secret").exists()


def test_bad_names_and_too_many_are_refused(kept):
    ctx = context()
    for name in ("", "../x", "A", ".hidden", "x" * 65, "a/b"):
        with pytest.raises(ValueError, match="give a name"):
            ctx.artefact(name, b"")
    for number in range(FILES_MAX):
        ctx.artefact(f"f{number}", b"")
    with pytest.raises(ValueError, match="at most"):
        ctx.artefact("more", b"")
    with pytest.raises(ValueError, match="over the limit"):
        ctx.artefact("f1", bytes(FILE_BYTES_MAX + 1))


def test_a_disk_that_takes_nothing_does_not_hide_the_failure(kept, caplog):
    kept.rmdir()
    ctx = context()
    ctx.artefact("page.html", "<p>")
    ctx.keep_artefacts()
    assert "not kept" in caplog.text


def test_outside_of_a_worker_and_where_they_are_off_nothing_is_held(tmp_path):
    ctx = context()
    ctx.artefact("page.html", "<p>")
    ctx.keep_artefacts()
    assert not ctx.wants_artefacts(always=True)


def test_a_successful_attempt_leaves_the_picture_that_its_schedule_asks_for(kept, tmp_path):
    for rules, left in ((Rules(picture=True), {"attempt-1.attached.png": b"png"}), (Rules(), {})):
        lease = Lease(1, "task", "x", b"", 1, 0, session="acme", watch=encode_rules(rules))
        ctx = Context("task", 1, math.inf, None, lease)
        assert ctx.attaches == rules.picture
        ctx.attach(b"png")
        ctx.drop_artefacts()
        assert files(kept) == left
        for each in kept.iterdir():
            assert stat.S_IMODE(each.stat().st_mode) == 0o700
            assert stat.S_IMODE((each / "attached.png").stat().st_mode) == 0o600
        artefacts.remove_attached(str(kept), "task")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_picture_is_not_kept_of_an_attempt_that_fails_or_where_it_is_too_large(kept):
    watch = encode_rules(Rules(picture=True))
    ctx = Context("task", 1, math.inf, None, Lease(1, "task", "x", b"", 1, 0, watch=watch))
    ctx.attach(b"png")
    ctx.keep_artefacts()
    assert files(kept) == {}
    ctx.attach(b"x" * (artefacts.ATTACHED_BYTES_MAX + 1))
    ctx.drop_artefacts()
    assert files(kept) == {}


def test_a_disk_that_is_full_costs_the_picture_and_not_the_task(kept, caplog):
    kept.rmdir()
    watch = encode_rules(Rules(picture=True))
    ctx = Context("task", 1, math.inf, None, Lease(1, "task", "x", b"", 1, 0, watch=watch))
    ctx.attach(b"png")
    ctx.drop_artefacts()
    assert "the picture of the page is not kept" in caplog.text
