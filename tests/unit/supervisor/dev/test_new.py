"""A project is made whole or not at all, under a name that can be imported."""

import os
from pathlib import Path

import pytest

from musterd.supervisor.dev import new
from musterd.supervisor.dev.new import NotMade, make, name_problem


@pytest.mark.parametrize("name", ["mybot", "my_bot", "shop2", "a"])
def test_names_that_a_module_and_a_pool_can_have(name: str) -> None:
    assert name_problem(name) == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my-bot", "such as my_bot"),
        ("My Bot", "such as my_bot"),
        ("../mybot", "such as mybot"),
        ("3x", "beginning with a letter"),
        ("_x", "use lower-case letters"),
        ("", "use lower-case letters"),
        ("é", "use lower-case letters"),
        ("class", "a word of Python"),
        ("json", "a module already"),
        ("conftest", "a module already"),
        ("all", "means all pools"),
        ("parser", "a pool that musterd comes with"),
        ("msgspec", "an installed package"),
        ("musterd", "an installed package"),
        ("x" * 100, "at most"),
    ],
)
def test_other_names_are_refused_with_the_reason(name: str, why: str) -> None:
    assert why in name_problem(name)
    assert "choose" in name_problem(name) or "use" in name_problem(name)


def test_a_project_has_its_name_everywhere_and_nothing_is_left_to_fill_in(tmp_path: Path) -> None:
    parent = tmp_path / "my bots"
    parent.mkdir()
    told = make("tea_shop", parent)
    made = parent / "tea_shop"
    assert sorted(each.name for each in made.iterdir()) == [
        ".gitignore",
        "README.md",
        "conftest.py",
        "musterd.toml",
        "tea_shop.py",
        "test_tea_shop.py",
    ]
    assert [each.name for each in parent.iterdir()] == ["tea_shop"]
    for file in made.iterdir():
        assert "{{" not in file.read_text()
    assert "class TeaShop(ParserWorker)" in (made / "tea_shop.py").read_text()
    assert 'worker = "tea_shop:TeaShop"' in (made / "musterd.toml").read_text()
    assert "musterctl submit tea_shop.check url=https://example.com/ --wait" in told
    umask = os.umask(0)
    os.umask(umask)
    assert made.stat().st_mode & 0o777 == 0o777 & ~umask


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(NotMade, match="exists: remove it, or choose another name"):
            make(name, tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder", "link"]


def test_half_a_project_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(text: str, _name: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new, "_filled", full)
    with pytest.raises(NotMade, match=r"mybot cannot be made: No space left on device"):
        make("mybot", tmp_path)
    assert list(tmp_path.iterdir()) == []
