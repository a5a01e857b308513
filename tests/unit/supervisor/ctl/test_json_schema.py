"""The schema of --json is current, complete, and has the names of the Python API."""

import inspect
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from jsonschema import Draft202012Validator
from msgspec import structs

from musterd.ipc.client.changes import ResultChange
from musterd.ipc.client.handle import TaskStatus
from musterd.ipc.client.history import KeptResult
from musterd.ipc.client.schedules import Schedule
from musterd.ipc.errors import TaskFailed
from musterd.ipc.wire.messages import FailedAttempt, Failure
from musterd.supervisor.api import status
from musterd.supervisor.api.events import Event, filled
from musterd.supervisor.api.history import HistoryItem
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.ctl import history, json_schema
from musterd.supervisor.ctl.app import cli
from musterd.supervisor.log.worker_output import OutputChunk

FILE = Path(__file__).parents[4] / "docs" / "musterctl.schema.json"


def names(kind: type[Any]) -> set[str]:
    return {field.encode_name for field in structs.fields(kind)}


def test_the_file_is_current() -> None:
    assert FILE.read_text() == json_schema.text(), "make schema"


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(msgspec.json.decode(FILE.read_bytes()))


def test_every_key_is_always_there() -> None:
    for name, component in json_schema.schema()["$defs"].items():
        assert component["required"] == list(component["properties"]), name


def commands(group: click.Group, before: str = "") -> list[str]:
    """Return all commands as they are typed, each with its actions."""
    found = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += commands(command, f"{name} ")
            continue
        actions = [
            parameter.type.choices
            for parameter in command.params
            if isinstance(parameter, click.Argument) and isinstance(parameter.type, click.Choice)
        ]
        found += [f"{before}{name} {each}" for each in actions[0]] if actions else [before + name]
    return found


def test_it_has_every_command_and_no_other() -> None:
    described = {name for name in json_schema.schema()["properties"] if "--" not in name}
    assert described - {"error"} == set(commands(cli)) - {"debug"}  # it talks to people


def test_no_struct_of_an_answer_leaves_a_key_out() -> None:
    """A field that is left out where it has its default would be no key of the JSON."""
    pending: list[Any] = [
        *json_schema.ANSWERS.values(), json_schema.Refusal, *sum(json_schema.LINES.values(), ())
    ]  # fmt: skip
    seen = set()
    while pending:
        kind = pending.pop()
        if kind in seen:
            continue
        seen.add(kind)
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
            assert not kind.__struct_config__.omit_defaults, kind
            pending += [field.type for field in structs.fields(kind)]
        pending += getattr(kind, "__args__", ())
    assert status.TaskFailure in seen


@pytest.mark.parametrize(
    ("python", "json", "others"),
    [
        (TaskStatus, status.TaskStatus, set()),
        (FailedAttempt, status.AttemptStatus, set()),
        # Durations are seconds in JSON, as in the errors that are raised.
        (Failure, status.TaskFailure, {"retry_after_ns"}),
        (Schedule, status.ScheduleKeys, set()),
        (KeptResult, HistoryItem, set()),
    ],
)
def test_names_are_those_of_python(python: type[Any], json: type[Any], others: Any) -> None:
    assert names(python) - names(json) == others


def test_a_change_has_the_names_of_python() -> None:
    found = {name for name in dir(ResultChange) if not name.startswith("_")}
    assert found - names(history.Change) == set()


def test_a_failure_has_the_names_of_the_error_that_is_raised() -> None:
    attributes = set(vars(TaskFailed("why")))
    assert attributes - names(status.TaskFailure) == {"attempts"}, "of the task: its `attempt`"


def test_an_event_has_every_field_of_a_report() -> None:
    assert names(Report) <= names(Event)
    sent = {"at": 1.5, "event": "worker.ready", "pool": "parser"}
    whole = filled(sent)
    assert set(whole) == names(Event)
    assert whole["changed_at"] is None
    assert {key: whole[key] for key in sent} == sent
    assert msgspec.convert(whole, Event).pool == "parser"
    assert filled({"dropped": 7}) == {"dropped": 7}


def test_a_portion_of_output_has_every_field() -> None:
    sent = {"at": 1.5, "worker": "parser/0", "lines": ["x"]}
    assert filled(sent) == {**sent, "left_out": 0}
    assert set(filled(sent)) == {"at", *names(OutputChunk)}
