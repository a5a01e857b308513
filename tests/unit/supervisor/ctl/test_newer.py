"""What musterctl says about code and secrets that are newer than what workers are made of."""

from pathlib import Path

import pytest

from musterd.supervisor.api.status import NewerCode
from musterd.supervisor.ctl import newer
from musterd.supervisor.ctl.app import Settings

HERE = NewerCode(pool="shop", files=["/srv/bot/shop.py"])
MANY = NewerCode(pool="shop", files=[f"/srv/bot/m{n}.py" for n in range(5)], secrets=["KEY"])


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newer.os, "getcwd", lambda: "/srv/bot")


def test_a_restart_says_that_it_keeps_the_code_and_what_to_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    newer.tell_restarted(Settings(), [HERE, NewerCode(pool="other", secrets=["KEY"])])
    assert capsys.readouterr() == (
        "",
        "musterctl: shop.py has changed since pool shop imported it; a restart keeps the code as "
        "it was: to import it anew, type musterctl reload shop\n",
    )


def test_the_command_names_the_socket_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    newer.tell_kept(Settings(socket="/tmp/my bot/control.sock"), [MANY])
    assert capsys.readouterr() == (
        "pool shop: new secrets (KEY), which its tasks read by themselves\n",
        "musterctl: m0.py, m1.py, m2.py and 2 more have changed since pool shop imported it: "
        "type musterctl -s '/tmp/my bot/control.sock' reload shop\n",
    )


def test_json_is_not_mixed_with_words(capsys: pytest.CaptureFixture[str]) -> None:
    newer.tell_kept(Settings(json=True), [MANY])
    assert capsys.readouterr().out == ""


def test_what_is_new_for_a_pool_that_is_replaced() -> None:
    assert newer.newer_text(HERE) == "new code (shop.py)"
    assert newer.newer_text(MANY) == "new code (m0.py, m1.py, m2.py and 2 more), new secrets (KEY)"
    elsewhere = NewerCode(pool="shop", files=[str(Path("/usr/lib/shop.py"))])
    assert newer.newer_text(elsewhere) == "new code (/usr/lib/shop.py)"
