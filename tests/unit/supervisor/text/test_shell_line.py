"""Lines that are being typed are read as shells read them, and completed as bash inserts words."""

import shlex

import pytest
from click import Command
from click.shell_completion import CompletionItem
from hypothesis import given
from hypothesis import strategies as st

from musterd.supervisor.text.shell_line import Bash, escape, read_line


@pytest.mark.parametrize(
    ("line", "words", "begun", "quote"),
    [
        ("", [], "", ""),
        ("musterctl ", ["musterctl"], "", ""),
        ("musterctl st", ["musterctl"], "st", ""),
        ("a  b\tc", ["a", "b"], "c", ""),
        ("pause 'цены на", ["pause"], "цены на", "'"),
        ('pause "a \\"b', ["pause"], 'a "b', '"'),
        ("pause a\\ b", ["pause"], "a b", ""),
        ("pause 'a'b", ["pause"], "ab", ""),
        ("pause '' x", ["pause", ""], "x", ""),
        ("pause a\\", ["pause"], "a", ""),
        ("pause 'a\\", ["pause"], "a\\", "'"),
    ],
)
def test_a_line_is_read_up_to_the_cursor(
    line: str, words: list[str], begun: str, quote: str
) -> None:
    assert read_line(line) == (words, begun, quote)


@given(st.lists(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1)))
def test_what_is_escaped_is_read_as_it_was(words: list[str]) -> None:
    line = " ".join(escape(word) for word in words)
    read, begun, quote = read_line(f"{line} ")
    assert (read, begun, quote) == (words, "", "")
    assert shlex.split(line) == words


@pytest.mark.parametrize(
    ("line", "value", "inserted"),
    [
        ("musterctl pause ", "parser/0", "parser/0"),
        ("musterctl pause pa", "parser/0", "parser/0"),
        ("musterctl breaker close 127.0.0.1:80", "127.0.0.1:8000", "8000"),
        ("musterctl breaker close 127.0.0.1:", "127.0.0.1:8000", "8000"),
        ("musterctl breaker close 127", "127.0.0.1:8000", "127.0.0.1:8000"),
        ("musterctl schedule run a:b=c", "a:b=c d", "c\\ d"),
        ("musterctl schedule run це", "цены на змеев", "цены\\ на\\ змеев"),
        ("musterctl schedule run 'це", "цены на змеев", "цены на змеев"),
        ("musterctl schedule run 'a:b", "a:b c", "a:b c"),
        ("musterctl schedule run x", "x$(id)&", "x\\$\\(id\\)\\&"),
    ],
)
def test_bash_gets_what_it_inserts_behind_the_last_colon(
    line: str, value: str, inserted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_WORDBREAKS", " \t\n\"'@><=;|&(:")
    bash = Bash(Command("musterctl"), {}, "musterctl", "_MUSTERCTL_COMPLETE")
    assert bash.format_completion(CompletionItem(value)) == f"plain,{inserted}"
    monkeypatch.setenv("COMP_WORDBREAKS", " \t\n\"'><;|&(")
    whole = value if "'" in line else escape(value)
    assert bash.format_completion(CompletionItem(value)) == f"plain,{whole}"


def test_a_script_of_an_older_version_still_gets_whole_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COMP_LINE", raising=False)
    monkeypatch.setenv("COMP_WORDS", "musterctl pause pa")
    monkeypatch.setenv("COMP_CWORD", "2")
    bash = Bash(Command("musterctl"), {}, "musterctl", "_MUSTERCTL_COMPLETE")
    assert bash.get_completion_args() == (["pause"], "pa")
    assert bash.format_completion(CompletionItem("a b")) == "plain,a b"
