"""Files, environment and command line: what is read, in which order, and what is refused."""

import os
import sys
from pathlib import Path

import pytest

from musterd.supervisor.config.sources import (
    FILE_BYTES_MAX,
    Leaf,
    Unusable,
    plain,
    read_environment,
    read_file,
    read_files,
    read_overrides,
)

EXPECTED = {"retry": {"factor": 3, "base": "2s"}, "pools": {"a": {"options": {"x": [1, True]}}}}
TOML = '[retry]\nfactor = 3\nbase = "2s"\n[pools.a]\noptions.x = [1, true]\n'
YAML = "retry: {factor: 3, base: 2s}\npools:\n  a:\n    options:\n      x: [1, true]\n"
JSON = '{"retry": {"factor": 3, "base": "2s"}, "pools": {"a": {"options": {"x": [1, true]}}}}'


def refusal(path: Path) -> str:
    with pytest.raises(Unusable) as caught:
        read_file(path)
    return str(caught.value)


def short(value: object) -> str:
    """Shorten a value: a test's name must not be as long as its input."""
    return repr(value)[:30]


# -- one file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", TOML),
        ("a.yaml", YAML),
        ("a.yml", YAML),
        ("a.json", JSON),
        ("bom.toml", "\ufeff" + TOML),
    ],
)
def test_every_format_says_the_same(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert plain(read_file(path)) == EXPECTED


@pytest.mark.parametrize("name", ["a.toml", "a.yaml"])
def test_an_empty_file_says_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# nothing\n")
    assert plain(read_file(tmp_path / name)) == {}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.toml", "[retry]\nfactor 3\n", "not valid TOML: Expected '=' after a key"),
        ("a.toml", "[retry]\nfactor 3\n", "at line 2, column 8"),
        ("a.toml", "[retry]\nbase = '1s", "at line 2"),
        ("a.toml", "a = 1\na = 2\n", "at line 2"),
        ("a.json", '{"retry":\n 3 4}', "not valid JSON: Expecting ',' delimiter"),
        ("a.json", '{"retry":\n 3 4}', "at line 2, column 4"),
        ("a.json", '{"a": 1, "a": 2}', 'the key "a" is given twice'),
        ("a.yaml", "retry:\n  factor: [1\n", "not valid YAML: "),
        ("a.yaml", "retry:\n  factor: [1\n", "at line 3, column 1"),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", 'the key "a" is given twice'),
        ("a.yaml", "x: !!python/object/apply:os.getpid []\n", "not valid YAML: "),
        ("a.yaml", "x: \x07\n", "not valid YAML: "),
        ("a.yaml", "1: x\n", "the name 1 is not text"),
        ("a.yaml", "x: &a {b: *a}\n", "nested deeper than 20 levels"),
        ("a.yaml", "x: 2024-13-45\n", "holds a value that cannot be read"),
        ("a.yaml", "[1, 2]\n", "is not a table of sections"),
        ("a.json", "3", "is not a table of sections"),
        ("a.json", "null", "is not a table of sections"),
        ("a.json", '{"a":' * 100_000, "nested too deeply"),
        ("a.toml", "x = " + "[" * 100_000, "nested too deeply"),
        ("a.toml", "x = " + "9" * 5000, "holds a value that cannot be read"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "holds a value that cannot be read"),
        ("a.toml", "#" * (FILE_BYTES_MAX + 1), "is larger than"),
        ("a.conf", "", "unknown file extension: use .toml"),
    ],
    ids=short,
)
def test_a_file_that_cannot_be_understood_is_refused_with_the_place(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    (tmp_path / name).write_text(text)
    assert problem in refusal(tmp_path / name)


def test_a_file_that_is_not_utf_8_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"# one\n# caf\xe9\n")
    assert refusal(tmp_path / "a.toml") == "not UTF-8 text (at line 2): save it as UTF-8"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.toml") == "no such file: check the name, or create it"


def test_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").mkdir()
    assert refusal(tmp_path / "a.toml").startswith("cannot be read: ") or (
        "is not a regular file" in refusal(tmp_path / "a.toml")
    )


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.toml")
    assert "is not a regular file" in refusal(tmp_path / "a.toml")


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").symlink_to("a.toml")
    assert refusal(tmp_path / "a.toml").startswith("cannot be read: ")


def test_without_pyyaml_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)  # marks a module that cannot be imported
    assert "install musterd[yaml]" in refusal(tmp_path / "a.yaml")


# -- several files ----------------------------------------------------------------------------


def test_drop_ins_of_all_formats_are_read_in_name_order(tmp_path: Path) -> None:
    main = tmp_path / "m.toml"
    main.write_text("a = 0\nb = 0\nc = 0\nd = 0\n")
    folder = tmp_path / "m.d"
    folder.mkdir()
    (folder / "30.toml").write_text("c = 3\n")
    (folder / "10.json").write_text('{"a": 1, "b": 1, "c": 1}')
    (folder / "20.yaml").write_text("b: 2\nc: 2\n")
    for ignored in (".99.toml", "99.toml~", "README", "99.bak"):
        (folder / ignored).write_text("not [a configuration\n")
    problems: list[str] = []
    merged = read_files([main], tmp_path / "default.toml", problems)
    assert problems == []
    assert plain(merged) == {"a": 1, "b": 2, "c": 3, "d": 0}
    assert merged.entries["b"] == Leaf(2, str(folder / "20.yaml"))


def test_each_given_file_has_its_drop_ins_and_the_default_is_left_out(tmp_path: Path) -> None:
    for name, text in (
        ("default.toml", "z = 1"),
        ("a.toml", "x = 1"),
        ("b.json", '{"x": 3}'),
        ("a.d/1.toml", "x = 2\ny = 2"),
        ("b.d/1.toml", "w = 4"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    problems: list[str] = []
    files = [tmp_path / "a.toml", tmp_path / "b.json"]
    merged = read_files(files, tmp_path / "default.toml", problems)
    assert problems == []
    assert plain(merged) == {"x": 3, "y": 2, "w": 4}


def test_the_default_file_may_be_missing_and_its_drop_ins_still_count(tmp_path: Path) -> None:
    problems: list[str] = []
    assert plain(read_files([], tmp_path / "m.toml", problems)) == {}
    (tmp_path / "m.d").mkdir()
    (tmp_path / "m.d" / "1.toml").write_text("x = 1")
    assert plain(read_files([], tmp_path / "m.toml", problems)) == {"x": 1}
    assert problems == []


def test_a_given_file_may_not_be_missing(tmp_path: Path) -> None:
    problems: list[str] = []
    read_files([tmp_path / "m.toml"], tmp_path / "default.toml", problems)
    assert problems == [f"{tmp_path / 'm.toml'}: no such file: check the name, or create it"]


def test_a_default_file_that_links_nowhere_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "m.toml").symlink_to("nowhere")
    problems: list[str] = []
    read_files([], tmp_path / "m.toml", problems)
    assert problems == [f"{tmp_path / 'm.toml'}: no such file: check the name, or create it"]


def test_all_files_are_tried_when_one_is_broken(tmp_path: Path) -> None:
    for name, text in (("a.toml", "x ="), ("b.toml", "y = 1"), ("c.json", "{")):
        (tmp_path / name).write_text(text)
    (tmp_path / "b.d").write_text("")  # a file in place of the directory
    problems: list[str] = []
    files = [tmp_path / name for name in ("a.toml", "b.toml", "c.json")]
    merged = read_files(files, tmp_path / "default.toml", problems)
    assert plain(merged) == {"y": 1}
    assert [line.partition(": ")[0] for line in problems] == [
        str(tmp_path / name) for name in ("a.toml", "b.d", "c.json")
    ]


# -- environment and command line --------------------------------------------------------------


def test_variables_with_two_underscores_are_keys_and_others_are_not() -> None:
    problems: list[str] = []
    table = read_environment(
        {
            "MUSTERD_TASKS": "/x/tasks.sock",
            "MUSTERD_SUPERVISOR__LOG_LEVEL": "debug",
            "MUSTERD_POOLS__PARSER__SIZE": "3",
            "MUSTERD_POOLS__PARSER__ENV__My__Var": "1",
            "OTHER__X": "1",
            "musterd_retry__factor": "1",
        },
        problems,
    )
    assert problems == []
    assert plain(table) == {
        "supervisor": {"log_level": "debug"},
        "pools": {"parser": {"size": 3, "env": {"My__Var": 1}}},
    }


@pytest.mark.parametrize(
    "name", ["MUSTERD_POOLS__", "MUSTERD___X", "MUSTERD_A____B", "MUSTERD_POOLS__P__ENV__"]
)
def test_a_variable_with_an_empty_part_is_a_problem(name: str) -> None:
    problems: list[str] = []
    read_environment({name: "1"}, problems)
    assert problems == [f"environment {name}: not a key: write MUSTERD_SECTION__KEY"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b=3", {"a": {"b": 3}}),
        ("a.b=30s", {"a": {"b": "30s"}}),
        ("a.b=", {"a": {"b": ""}}),
        ('a.b="3"', {"a": {"b": "3"}}),
        ("a.b=x=y", {"a": {"b": "x=y"}}),
        ("a.b=[1, 'x']", {"a": {"b": [1, "x"]}}),
        ("a={b = {c = true}}", {"a": {"b": {"c": True}}}),
        ("a.b=1979-05-27", {"a": {"b": "1979-05-27"}}),
        ("a.b=1\nc=2", {"a": {"b": "1\nc=2"}}),
        ('a."b.c".d=1', {"a": {"b.c": {"d": 1}}}),
        ("a.b=" + "[" * 100_000, {"a": {"b": "[" * 100_000}}),
    ],
    ids=short,
)
def test_an_override_is_a_toml_value_or_text(override: str, expected: object) -> None:
    problems: list[str] = []
    assert plain(read_overrides([override], problems)) == expected
    assert problems == []


@pytest.mark.parametrize("override", ["", "a", "=1", "a b=1", "a.=1", "#a=1"])
def test_an_override_without_key_and_value_is_a_problem(override: str) -> None:
    problems: list[str] = []
    read_overrides([override], problems)
    assert len(problems) == 1
    assert "cannot be used: write section.key=value" in problems[0]


def test_a_line_break_in_an_overrides_key_makes_no_second_key() -> None:
    problems: list[str] = []
    assert plain(read_overrides(["a\nb=1", "[x]\na=1"], problems)) == {}
    assert len(problems) == 2


def test_a_key_of_endless_parts_is_a_problem() -> None:
    problems: list[str] = []
    read_overrides([".".join("a" * 5000) + "=1"], problems)
    read_environment({"MUSTERD_" + "__".join("A" * 5000): "1"}, problems)
    assert [line.rpartition(": ")[0].endswith("more than 20 parts") for line in problems] == [
        True,
        True,
    ]


def test_later_overrides_win() -> None:
    assert plain(read_overrides(["a.b=1", "a.c=2", "a.b=3"], [])) == {"a": {"b": 3, "c": 2}}
