"""A command that is nearly right, or a word of another program, is answered with what to type."""

import json
import re

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from musterd.supervisor import ctl
from musterd.supervisor.__main__ import main as musterd
from musterd.supervisor.ctl import suggest, supervisorctl
from musterd.supervisor.ctl.app import USAGE, Action, cli

COMMANDS = cli.list_commands(click.Context(cli))
ACTIONS = {
    name: list(parameter.type.choices)
    for name, command in cli.commands.items()
    for parameter in command.params
    if isinstance(parameter.type, Action)
}
# Slips that are as near to another command.
TWOFOLD = {"restart": {"start"}, "tasks": {"task"}, "task": {"tasks"}, "start": {"stat"}}


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["statsu"], "did you mean musterctl status?"),
        (["restrat", "parser/*"], "did you mean musterctl restart 'parser/*'?"),
        (["schedules"], "did you mean musterctl schedule?"),
        (["breakers"], "did you mean musterctl breaker?"),
        (["alert"], "did you mean musterctl alerts?"),
        (["sched"], "did you mean musterctl schedule?"),
        (["quti"], "did you mean musterctl quit?"),
        (["pool"], "type musterctl status"),
        (["ps"], "type musterctl status"),
        (["stat"], "type musterctl status"),
        (["kill", "parser/0"], "musterctl cancel ID to end a task"),
        (["logs"], "type musterctl tail -f NAME"),
        (["check-config"], "type musterd check-config"),
        (["run"], "musterd run to run the daemon"),
        (["xyzzy"], "musterctl --help lists them"),
        (["schedule", "delete", "kites"], "did you mean musterctl schedule remove? there are list"),
        (["schedule", "lst"], "did you mean musterctl schedule list?"),
        (["schedule", "kites"], "no command schedule kites: there are list, add, edit"),
        (["breaker", "opne", "site"], "did you mean musterctl breaker open?"),
        (["sessions", "delete", "acme"], "did you mean musterctl sessions forget?"),
        (["cluster", "node"], "did you mean musterctl cluster nodes?"),
        (["cluster", "xyzzy"], "see musterctl cluster --help"),
        (["status", "--jsn"], "? see musterctl status --help"),
    ],
)
def test_what_is_nearly_right_says_what_to_type(
    typed: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(typed) == USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1
    assert ctl.main(["--json", *typed]) == USAGE
    out, _ = capsys.readouterr()
    assert says in json.loads(out)["error"]["message"]


def slipped(word: str) -> set[str]:
    """Return the word with one letter too few, too many, or changed with the next."""
    found = {word[:at] + word[at + 1 :] for at in range(len(word))}
    found |= {word[: at + 1] + word[at:] for at in range(len(word))}
    found |= {word[:at] + word[at + 1] + word[at] + word[at + 2 :] for at in range(len(word) - 1)}
    return found - {word, *COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_one_slip_of_the_finger_is_understood(command: str) -> None:
    for typed in sorted(slipped(command) - TWOFOLD.get(command, set())):
        says = suggest.instead_of(typed, [], COMMANDS)
        meant = says.removeprefix("did you mean musterctl ").removesuffix("?")
        near = TWOFOLD.get(command, set())
        assert meant == command or meant in near or typed in suggest.OTHER_WORDS, (typed, says)


@pytest.mark.parametrize("command", ACTIONS)
def test_one_slip_in_an_action_is_understood(command: str) -> None:
    for action in ACTIONS[command]:
        for typed in sorted(slipped(action) - set(ACTIONS[command])):
            assert suggest.instead_of_action(typed, ACTIONS[command]) == action, typed


@pytest.mark.parametrize(
    ("typed", "meant", "count"),
    [
        ("status", "status", 0),
        ("statsu", "status", 1),
        ("statu", "status", 1),
        ("statuss", "status", 1),
        ("ststus", "status", 1),
        ("", "ab", 2),
        ("kill", "tail", 3),
    ],
)
def test_slips_are_counted(typed: str, meant: str, count: int) -> None:
    assert suggest.slips(typed, meant) == count


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_slips_are_as_many_in_both_directions(one: str, other: str) -> None:
    count = suggest.slips(one, other)
    assert count == suggest.slips(other, one)
    assert (count == 0) == (one == other)
    assert abs(len(one) - len(other)) <= count <= max(len(one), len(other))


def test_everything_that_is_suggested_exists() -> None:
    for word, says in suggest.OTHER_WORDS.items():
        typed = re.findall(r"musterctl ([a-z-]+)(?: ([a-z]+))?", says)
        assert typed or "musterd " in says, word
        for command, action in typed:
            assert command in COMMANDS, says
            if command in ACTIONS:
                assert action in ACTIONS[command], says
        for command in re.findall(r"musterd ([a-z-]+)", says):
            assert command in musterd.commands, says
    for actions in suggest.OTHER_ACTIONS.values():
        for action in actions:
            assert any(action in each for each in ACTIONS.values()), action


def test_no_other_word_is_a_command() -> None:
    ours = {*COMMANDS, *supervisorctl.LEAVE, *supervisorctl.HELP, *supervisorctl._INSTEAD}
    assert not ours & {*suggest.OTHER_WORDS, *suggest.OF_MUSTERD}


def test_an_action_that_a_command_has_is_that_action() -> None:
    for actions in ACTIONS.values():
        for action in actions:
            assert Action(actions).convert(action, None, None) == action


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["rnu", "-c", "bot.toml"], "did you mean musterd run -c bot.toml?"),
        (["chekc-config"], "did you mean musterd check-config?"),
        (["status", "parser"], "type musterctl status parser, which steers the daemon that runs"),
        (["staus"], "did you mean musterctl status?"),
        (["stop"], "type musterctl shutdown to end the daemon"),
        (["start"], "type musterd run -c FILE to run the daemon here"),
        (["strat"], "type musterd run -c FILE to run the daemon here"),
        (["logs", "parser"], "type musterctl tail -f NAME"),
        (["init"], "type musterd new NAME"),
        (["xyzzy"], "musterd --help lists them"),
    ],
)
def test_a_word_that_musterd_has_not_says_what_to_type(typed: list[str], says: str) -> None:
    done = CliRunner().invoke(musterd, typed)
    assert done.exit_code == USAGE
    assert done.output.startswith(f"musterd: there is no command {typed[0]}: {says}")
    (command,) = re.findall(r"\b(musterd|musterctl) ([a-z-]+)", done.output)[:1]
    assert command[1] in {"musterd": musterd, "musterctl": cli}[command[0]].commands or (
        says == "musterd --help lists them"
    )


def test_each_command_of_musterd_is_told_as_such() -> None:
    for command in musterd.commands:
        assert f"musterd {command}" in suggest.instead_of(command, [], COMMANDS), command
