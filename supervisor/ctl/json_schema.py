"""The JSON schema of what musterctl prints with --json, made of the structs of the answers.

    make schema        writes docs/musterctl.schema.json; a test compares it

Each command is a property of the schema, as it is typed: `breaker list`, `breaker`. In place of
`retry --target` stands each `retry` that says by options which tasks. Objects always have all their
keys. Others may be added by a later version, so they are not forbidden here.
"""

import sys
from typing import Any

import msgspec
from msgspec import Struct

from musterd.supervisor.api import envelope, status
from musterd.supervisor.api.alerts import AlertsStatus, AlertTested
from musterd.supervisor.api.events import Dropped, Event, OutputPortion
from musterd.supervisor.api.history import HistoryList
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.ctl import (
    cluster_adopt,
    cluster_commands,
    cluster_policy,
    history,
    import_sites,
    top_feed,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Refusal(Struct, frozen=True):
    """What every command prints instead of its answer when it fails."""

    error: envelope.ErrorBody


ERROR = "error"  # the property that describes failures
# Commands that print lines, each an object of one of these; all others print one object.
LINES: dict[str, tuple[type[Struct], ...]] = {
    "events": (Event, Dropped),
    "tail --follow": (OutputPortion, Dropped),
    "changes": (history.Change,),
    "status --watch": (status.FleetStatus,),
}
ANSWERS: dict[str, type[Struct]] = {
    **dict.fromkeys(
        ("start", "stop", "restart", "reset", "scale", "pause", "drain", "resume", "signal"),
        status.CommandResult,
    ),
    "status": status.FleetStatus,
    "pid": status.PidResult,
    "tail": status.TailResult,
    "top": top_feed.Snapshot,
    "memory": MemoryStatus,
    "submit": status.TaskStatus,
    "task": status.TaskStatus,
    "tasks": status.TaskList,
    "dead": status.TaskList,
    "cancel": status.TaskList,
    "retry": status.RetryResult,
    "purge": status.PurgeResult,
    **{f"{each} --target": status.BulkResult for each in ("cancel", "retry", "purge")},
    "cache clear": status.CacheResult,
    "sessions list": status.SessionList,
    "sessions forget": status.SessionStatus,
    "sessions reset": status.SessionStatus,
    "breaker list": status.BreakerList,
    **{f"breaker {each}": status.BreakerStatus for each in ("open", "close", "reset", "disable")},
    "history": HistoryList,
    "schedule list": status.ScheduleList,
    "schedule remove": status.CommandResult,
    **{
        f"schedule {each}": status.ScheduleStatus
        for each in ("add", "edit", "run", "pause", "resume")
    },
    "import": import_sites.Report,
    "alerts list": AlertsStatus,
    "alerts test": AlertTested,
    "reread": status.ReloadResult,
    "reload": status.ReloadResult,
    "update": status.ReloadResult,
    "shutdown": status.CommandResult,
    "version": status.VersionResult,
    "clock show": status.ClockStatus,
    "clock accept": status.ClockStatus,
    "cluster migrate": cluster_commands.MigrationResult,
    "cluster nodes": status.NodeList,
    "cluster drain": status.NodeStatus,
    "cluster forget": status.NodeStatus,
    "cluster show": cluster_policy.ShowResult,
    "cluster apply": cluster_policy.ApplyResult,
    "cluster adopt": cluster_adopt.Adopted,
}


def schema() -> dict[str, Any]:
    """Return the schema of all answers."""
    kinds = [Refusal, *ANSWERS.values(), *(kind for each in LINES.values() for kind in each)]
    unique = list(dict.fromkeys(kinds))
    made, components = msgspec.json.schema_components(unique, ref_template="#/$defs/{name}")
    reference = dict(zip(unique, made, strict=True))
    for component in components.values():
        component["required"] = list(component["properties"])
        for each in component["properties"].values():
            each.pop("default", None)  # of an answer nothing is left out
    properties: dict[str, Any] = {ERROR: reference[Refusal]}
    for command, kind in ANSWERS.items():
        properties[command] = reference[kind]
    for command, lines in LINES.items():
        of_line = [reference[kind] for kind in lines]
        properties[command] = {
            "description": "Each line is such an object.",
            **(of_line[0] if len(of_line) == 1 else {"anyOf": of_line}),
        }
    return {
        "$schema": DIALECT,
        "title": "musterctl --json",
        "description": "What each command of musterctl prints with --json, by command. Moments are "
        "seconds since 1970 and null where there is none; durations are seconds.",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "$defs": dict(sorted(components.items())),
    }


def text() -> str:
    """Return the schema as the file has it."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=1).decode() + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
