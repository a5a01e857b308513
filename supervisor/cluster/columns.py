"""Tasks and ends as columns: what the functions of the schema take, one list for each argument.

A column in which every task has what a submit leaves out is None, and takes nothing on the wire.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import msgpack

from musterd.ipc.wire.messages import NORMAL, NOT_GIVEN, TaskSpec
from musterd.supervisor.cluster.engine import End, NodeCard

T = TypeVar("T")
Column = tuple[Callable[[T], Any], Any]  # how to get it, and what is left out

ERROR_CHARS_MAX = 1000  # of the error that people look for; the failure itself has all of it
KINDS = {"succeeded": 0, "failed": 1, "untouched": 2, "interrupted": 3, "crashed": 4}
BIGINT_MAX = 2**63
INT_MAX = 2**31

# The arguments of the functions that the engine calls.
SIGNATURES = {
    "announce_1": "bigint bigint bigint",
    "apply_1": "bytea int",
    "beat_1": "int",
    "begun_1": "int text[] bigint[]",
    "breaker_1": "text text",
    "cancel_1": "text[]",
    "cards_1": "text",
    "changed_1": "text int",
    "changes_1": "text",
    "claim_1": "int text[] int[] text[]",
    "counts_1": "",
    "delete_1": "text[]",
    "drain_1": "text bool",
    "due_1": "",
    "ended_1": "bigint text int",
    "find_1": "text text smallint[] text text text int",
    "finish_1": "int text[] bigint[] smallint[] bytea[] bigint[] bytea[] text[] bool[] bigint[] "
    "bigint[] bigint[] text[] bool[] bytea[]",
    "forget_1": "text bool",
    "history_1": "text bigint[] int",
    "invalidate_1": "text bool",
    "join_1": "text text bigint text bytea text[] int[] bigint[] int[] bigint[] bigint[] text[] "
    "text[] bigint[] bigint[]",
    "give_back_1": "text",
    "judged_1": "text[] bigint[] bytea[] text[] bigint[] text[] bigint[] bigint[] bigint[] bytea[] "
    "text[] bigint[] text[] text[] text[] text[] bigint[] bigint[] bigint[] text[] bigint[] "
    "text[]",
    "leave_1": "int",
    "lock_wake_1": "int[]",
    "granted_logins_1": "text[]",
    "login_over_1": "text text text",
    "login_said_1": "int text[] text[] smallint[] int[] bigint[] bigint[] text[] text[] bytea[]",
    "logins_due_1": "bigint",
    "logins_1": "text[]",
    "locks_1": "int text[] bigint[] smallint[] text[]",
    "look_up_1": "text[]",
    "fetch_1": "text[] bigint",
    "make_way_1": "text text[] text[] bool",
    "marks_1": "bigint bigint",
    "nodes_1": "",
    "pause_1": "text bool",
    "policy_1": "",
    "progress_1": "int text[] real[] text[]",
    "purge_1": "text text smallint[] text text text text[] bigint",
    "ran_1": "text bigint bigint text bigint",
    "reap_1": "",
    "recent_1": "bigint",
    "redeclare_1": "int text bigint text bytea text[] int[] bigint[] int[] bigint[] bigint[] "
    "text[] text[] bigint[] bigint[]",
    "rejoin_1": "int text[] bigint[]",
    "release_1": "int text[] bigint[]",
    "retain_1": "bigint",
    "retry_1": "text[]",
    "put_1": "text[] bytea[] bool[] bytea[] bigint[] bytea[] bool[] bool",
    "reset_login_1": "text",
    "schedules_1": "text text int",
    "sessions_1": "",
    "session_load_1": "text",
    "forget_session_1": "text",
    "settle_1": "text bigint bigint bigint bytea bigint bool text[]",
    "sites_1": "",
    "state_load_1": "text",
    "state_save_1": "text bytea bigint",
    "states_1": "int text[] bigint[] text[] bool[] bytea[] bigint[]",
    "statistics_1": "bigint",
    "submit_1": "text[] text[] bytea[] smallint[] text[] text[] bigint[] int[] bigint[] bigint[] "
    "bigint[] bigint[] bytea[] text[] text[] text[] bytea[] text[] bigint bool",
    "tick_1": "text",
    "told_1": "bigint[]",
    "untold_1": "bigint",
    "view_1": "text",
    "watched_1": "text[]",
    "wake_1": "int[] bigint text[] text[] text[] text[] text[] bigint bigint[]",
}

_pack = msgpack.Encoder().encode

SPEC_COLUMNS: tuple[Column[TaskSpec], ...] = (
    (lambda s: s.id, ...),
    (lambda s: s.name, ...),
    (lambda s: s.args, ...),
    (lambda s: s.priority, NORMAL),
    (lambda s: s.target, ""),
    (lambda s: s.key, ""),
    (lambda s: s.timeout_ns, 0),
    (lambda s: s.max_retries, NOT_GIVEN),
    (lambda s: s.delay_ns, 0),
    (lambda s: s.expires_ns, 0),
    (lambda s: s.cache_ns, 0),
    (lambda s: s.debounce_ns, 0),
    (lambda s: s.fallback, None),
    (lambda s: s.fallback_on, ""),
    (lambda s: s.policy, ""),
    (lambda s: s.on_open, ""),
    (lambda s: s.watch, b""),
    (lambda s: s.session, ""),
)


def _error(end: End) -> str | None:
    """Return the failure in one line that PostgreSQL can keep: no NUL, and not too long."""
    failure = end.failure
    if failure is None:
        return None
    line = f"{failure.type or failure.kind}: {failure.message}"
    return line[:ERROR_CHARS_MAX].replace("\0", "")


END_COLUMNS: tuple[Column[End], ...] = (
    (lambda e: e.id, ...),
    (lambda e: e.claim, ...),
    (lambda e: KINDS[e.kind], ...),
    (lambda e: e.value, b""),
    (lambda e: e.run_ns, ...),
    (lambda e: _pack(e.failure) if e.failure is not None else None, None),
    (_error, None),
    (lambda e: e.failure is not None and e.failure.unwell, ...),
    (lambda e: e.failure.retry_after_ns if e.failure is not None else 0, ...),
    (lambda e: e.retry_ns, ...),
    (lambda e: e.patience_ns, ...),
    (lambda e: e.clears, ""),
    (lambda e: e.keeps, False),
    (lambda e: _pack(e.view) if e.view is not None else None, None),
)


def columns(of: Sequence[Column[T]], rows: Sequence[T]) -> list[list[Any] | None]:
    """Return a list for each column, with None where a row leaves it out; None for an empty one."""
    lists: list[list[Any] | None] = []
    for get, left_out in of:
        values = [get(row) for row in rows]
        if left_out is not ...:
            values = [None if value == left_out else value for value in values]
            if not any(value is not None for value in values):
                lists.append(None)
                continue
        lists.append(values)
    return lists


def possible(names: Sequence[str]) -> list[str]:
    """Return the ids or keys that tasks can have: PostgreSQL has no text with a NUL."""
    return [name for name in names if "\0" not in name]


def unsendable(spec: TaskSpec) -> str:
    """Say why a task cannot even be sent to PostgreSQL, or ""; its functions check the rest."""
    names = (spec.id, spec.name, spec.target, spec.key, spec.session)
    if any("\0" in text for text in (*names, spec.policy, spec.on_open, spec.fallback_on)):
        return "a name, target or key has a NUL character"
    numbers = (spec.timeout_ns, spec.delay_ns, spec.expires_ns, spec.cache_ns, spec.debounce_ns)
    if any(abs(number) >= BIGINT_MAX for number in numbers) or abs(spec.max_retries) >= INT_MAX:
        return "a number is out of bounds"
    return ""


def declared(card: NodeCard) -> tuple[object, ...]:
    """Return what a node says of itself, as join_1 and redeclare_1 take it."""
    pools, tasks = card.pools, [(p.name, task) for p in card.pools for task in p.tasks]
    return (
        card.name,
        card.lease_ns,
        card.software,
        _pack(card),
        [each.name for each in pools],
        [each.queue_size for each in pools],
        [each.aging_ns for each in pools],
        [each.max_crashes for each in pools],
        [each.cache_ns for each in pools],
        [each.debounce_ns for each in pools],
        [f"{pool}.{task.method}" for pool, task in tasks],
        [task.fallback_on for _, task in tasks],
        [task.cache_ns for _, task in tasks],
        [task.debounce_ns for _, task in tasks],
    )
