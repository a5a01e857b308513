"""Selections: which tasks a list shows, and a command in bulk is for.

One struct serves musterctl, control.sock and the store. What is asked for is written in the fields
that are not empty; a task fits if it fits all of them.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from musterd.ipc.wire.messages import FINAL_STATES, Failure, Key, Target, TaskSpec

SCHEDULE_PREFIX = "@"  # begins the id of a task that a schedule made
ENDED = "finished"  # as a state: any of the final ones
TEXT_CHARS_MAX = 200
State = Literal[
    "", "queued", "waiting", "running", "succeeded", "failed", "cancelled", "expired", "finished"
]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Moment = Annotated[float, Meta(ge=0, le=9e9)]  # seconds since 1970; SQLite's nanoseconds end later


class Selection(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tasks in a state, of a pool, site, key or schedule, with an error, of some time."""

    state: State = ""
    pool: Text = ""
    target: Target = ""
    error: Text = ""  # a text in the error as lists show it, in any case
    key: Key = ""
    schedule: Text = ""
    since: Moment = 0  # ended then or later; one that has not ended: was submitted
    before: Moment = 0  # ended, or was submitted, before; 0: at any time

    @property
    def ended(self) -> bool:
        """Whether only tasks that have ended can fit."""
        return bool(self.error) or self.state in (*FINAL_STATES, ENDED)

    @property
    def live(self) -> bool:
        """Whether only tasks that have not ended can fit."""
        return self.state != "" and self.state not in (*FINAL_STATES, ENDED)

    @property
    def id_prefix(self) -> str:
        """What the ids begin with; "" for any ids."""
        return f"{SCHEDULE_PREFIX}{self.schedule}." if self.schedule else ""

    @property
    def since_ns(self) -> int:
        return round(self.since * 1e9)

    @property
    def before_ns(self) -> int:
        return round(self.before * 1e9)

    def fits(self, spec: TaskSpec, wall_ns: int) -> bool:
        """Whether a task fits as far as its submit tells, and its end, or its submit, at `wall_ns`.

        Not looked at: its state and its error.
        """
        if self.target and spec.target != self.target:
            return False
        if self.pool and spec.name.partition(".")[0] != self.pool:
            return False
        if self.key and spec.key != self.key:
            return False
        if self.schedule and spec.id.rpartition(".")[0] != f"{SCHEDULE_PREFIX}{self.schedule}":
            return False
        if self.since and wall_ns < self.since_ns:
            return False
        return not self.before or wall_ns < self.before_ns

    def fits_state(self, state: str) -> bool:
        if self.state == ENDED:
            return state in FINAL_STATES
        return not self.state or state == self.state

    def fits_error(self, failure: Failure | None) -> bool:
        if not self.error:
            return True
        return failure is not None and self.error.casefold() in error_text(failure).casefold()


def error_text(failure: Failure) -> str:
    """Return the text that an error is found by: its kind, then the line that lists show."""
    status = f" (HTTP {failure.status})" if failure.status else ""
    what = f"{failure.type or failure.kind}{status}"
    line = f"{what}: {failure.message}" if failure.message else what
    return f"{failure.kind} {line}"
