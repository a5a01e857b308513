"""The terminal of a debugger that is somewhere else: what is shown, and what is a prompt."""

from collections.abc import Callable

import pytest

from musterd.ipc.wire.debugger_messages import DEBUGGER_CHARS_MAX
from musterd.workers.runtime.debugger import KEPT_CHARS_MAX, PROMPT_CHARS_MAX, Console


class Person:
    """Types these lines, and remembers what was shown."""

    def __init__(self, *lines: str | None) -> None:
        self._lines = list(lines)
        self.seen: list[tuple[str, str]] = []

    def ask(self, text: str, prompt: str) -> str | None:
        self.seen.append((text, prompt))
        return self._lines.pop(0)


def console(person: Person, redact: Callable[[str], str] = str) -> Console:
    return Console(person.ask, redact)


def test_the_last_unfinished_line_is_the_prompt() -> None:
    person = Person("n", "")
    made = console(person)
    print("> shop.py(12)check()\n-> x = 1", file=made)
    made.write("(Pdb) ")
    assert made.readline() == "n\n"
    made.write("(com) ")
    assert made.readline() == "\n"
    assert person.seen == [("> shop.py(12)check()\n-> x = 1\n", "(Pdb) "), ("", "(com) ")]
    assert made.said() == ""


def test_nobody_is_asked_again_after_the_end() -> None:
    person = Person(None)
    made = console(person)
    assert made.readline() == made.readline() == ""
    assert len(person.seen) == 1
    made.write("bye\n")
    assert made.said() == "bye\n"


def test_much_is_cut_and_said_by_how_much_and_the_prompt_stays() -> None:
    person = Person("n")
    made = console(person)
    for _ in range(100):
        made.write("x" * 10_000)
    made.write("\n(Pdb) ")
    made.readline()
    ((text, prompt),) = person.seen
    assert len(text) <= DEBUGGER_CHARS_MAX
    kept = text.count("x")
    assert text.endswith(f"\n... and {1_000_007 - kept} characters more\n")
    assert prompt == "(Pdb) "


def test_a_prompt_without_end_is_cut() -> None:
    person = Person("n")
    made = console(person)
    made.write("x" * 10 * PROMPT_CHARS_MAX)
    made.readline()
    assert person.seen[0][1] == "x" * PROMPT_CHARS_MAX


@pytest.mark.parametrize("before", [0, 100, DEBUGGER_CHARS_MAX - 5, KEPT_CHARS_MAX - 5])
def test_a_secret_is_not_shown_wherever_the_text_is_cut(before: int) -> None:
    person = Person("n")
    made = console(person, lambda text: text.replace("hunter2hunter2", "***"))
    made.write("x" * before + "hunter2hunter2" + "y" * 100 + "\n(Pdb) ")
    made.readline()
    assert "hun" not in person.seen[0][0]


def test_half_a_surrogate_pair_can_be_shown() -> None:
    person = Person("n")
    made = console(person)
    made.write("price \ud83d\n(Pdb) ")
    made.readline()
    assert person.seen == [("price \\ud83d\n", "(Pdb) ")]
