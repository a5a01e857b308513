"""Which service a process belongs to, and what was written since it began."""

import os
import time
from pathlib import Path

import pytest

from musterd.supervisor.ctl import unit
from musterd.supervisor.ctl.unit import unit_of, written_since_start

OF_USER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/musterd.service"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("0::/system.slice/musterd.service\n", ("musterd.service", False)),
        ("9:name=systemd:/system.slice/musterd@bot.service/x\n", ("musterd@bot.service", False)),
        ("8:pids:/\n9:name=systemd:/\n0::/system.slice/m.service\n", ("m.service", False)),
        (f"{OF_USER}/parser-3\n", ("musterd.service", True)),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ("", False)),
        ("0::/\n", ("", False)),
    ],
)
def test_the_unit_of_a_process(
    groups: str, expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit.Path, "read_text", lambda _path: groups)
    assert unit_of(1) == expected


def test_a_process_that_is_gone_or_no_service_has_nothing_to_tell() -> None:
    assert unit_of(2**22 + 1) == ("", False)
    assert written_since_start(2**22 + 1) == ([], "")


def test_only_what_was_written_since_the_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, key = (tmp_path / name for name in ("old.env", "new.env", "key"))
    for each in (old, new, key):
        each.write_text("A=1\n")
    fragment = tmp_path / "musterd.service"
    fragment.write_text(
        f"[Service]\nLoadCredential=KEY:{key}\nLoadCredential=OTHER:%d/other\nLoadCredential=X\n"
    )
    began = time.time() - 100
    now = {str(old): began - 1, str(new): began + 1, str(key): began + 1}
    shown = [
        ("MainPID", "4711"),
        ("EnvironmentFiles", f"{tmp_path}/*.env (ignore_errors=no)"),
        ("EnvironmentFiles", f"{tmp_path}/absent (ignore_errors=yes)"),
        ("FragmentPath", str(fragment)),
        ("DropInPaths", f"{tmp_path}/gone.conf"),
        ("NeedDaemonReload", "no"),
    ]
    monkeypatch.setattr(unit, "unit_of", lambda _pid: ("musterd.service", True))
    monkeypatch.setattr(unit, "_started_at", lambda _pid: began)
    monkeypatch.setattr(unit, "_show", lambda _unit, of_user: shown if of_user else [])
    monkeypatch.setattr(unit, "_changed_at", now.__getitem__)
    changed, restart = written_since_start(4711)
    assert changed == [str(new), str(key)]
    assert restart == "systemctl --user restart musterd.service"
    assert written_since_start(4712) == ([], "")


def test_when_a_process_began(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    started = unit._started_at(os.getpid())
    assert started is not None
    assert started < unit._changed_at(str(tmp_path / "before"))
    assert unit._changed_at(str(tmp_path / "absent")) == 0.0
