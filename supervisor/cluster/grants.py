"""Grants of the engine, as attempts for the supervisor."""

from collections.abc import Callable, Iterable

from musterd.ipc.wire import node_messages as wire
from musterd.ipc.wire.messages import (
    BATCH_BYTES_MAX,
    FAILURE_CHARS_MAX,
    INVALID,
    Failure,
    TaskSpec,
)
from musterd.supervisor.cluster import engine
from musterd.supervisor.cluster.logging_in import LoginView
from musterd.supervisor.core.model.held import held_failure, held_why

# Says of tasks, by their ids, why they must not run.
Problems = Callable[[list[TaskSpec]], dict[str, str]]


def attempt_of(grant: engine.Grant, called_ns: int) -> wire.Attempt:
    """Return the grant for the supervisor, with instants of this machine's clock."""
    return wire.Attempt(
        grant.spec,
        grant.claim,
        grant.attempt,
        grant.crashes,
        grant.interruptions,
        grant.policy,
        called_ns + grant.expires_in_ns if grant.expires_in_ns else 0,
        grant.again,
        grant.login_error,
    )


def refusal_of(grant: engine.Grant, why: str) -> wire.AttemptEnd:
    """Return the end of an attempt that must not begin."""
    failure = Failure(INVALID, "InvalidTask", why[:FAILURE_CHARS_MAX])
    return wire.AttemptEnd(grant.id, grant.claim, "failed", b"", failure)


def held_back(grant: engine.Grant, held: LoginView) -> wire.AttemptEnd:
    """Return the end of an attempt whose session may not log in for a while."""
    why = held_why(held.session, held.left_ns, held.failures, held.problem, cluster=True)
    return wire.AttemptEnd(grant.id, grant.claim, "failed", b"", held_failure(why))


def none(_specs: list[TaskSpec]) -> dict[str, str]:
    """Find no problems."""
    return {}


def divided(
    grants: list[engine.Grant], problems: Problems, called_ns: int
) -> tuple[dict[str, list[wire.Attempt]], list[wire.AttemptEnd]]:
    """Return the attempts for the supervisor, by pool, and the ends of those that must not begin.

    Whoever submits to the engine itself may get past the checks of clients.
    """
    pools: dict[str, list[wire.Attempt]] = {}
    refusals: list[wire.AttemptEnd] = []
    found = problems([grant.spec for grant in grants])
    for grant in grants:
        if grant.id in found:
            refusals.append(refusal_of(grant, found[grant.id]))
        elif grant.held is not None and not grant.login_error:
            refusals.append(held_back(grant, grant.held))
        else:
            pool = grant.spec.name.partition(".")[0]
            pools.setdefault(pool, []).append(attempt_of(grant, called_ns))
    return pools, refusals


def next_wants(wants: dict[str, wire.Want], sent: dict[str, int], left: int) -> list[engine.Want]:
    """Return what to claim: what is wanted, without what is on its way to the supervisor."""
    chosen = []
    for pool, want in wants.items():
        count = min(left, want.count - (sent.get(pool, 0) - want.seen))
        if count > 0:
            chosen.append(engine.Want(pool, count, want.names))
            left -= count
    return chosen


def portions(attempts: list[wire.Attempt]) -> Iterable[list[wire.Attempt]]:
    """Cut attempts into messages of about BATCH_BYTES_MAX, at least one in each."""
    portion: list[wire.Attempt] = []
    size = 0
    for attempt in attempts:
        size += len(attempt.spec.args)
        if portion and size > BATCH_BYTES_MAX:
            yield portion
            portion, size = [], len(attempt.spec.args)
        portion.append(attempt)
    if portion:
        yield portion
