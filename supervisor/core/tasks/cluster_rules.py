"""The cluster's policy on this node: what holds for its attempts, and what differs from ours.

The cluster sidecar tells the policy that was applied (`musterctl cluster apply`). Its targets,
classes and retries hold for each attempt that this node is granted. Where nothing is applied yet
(version 0), those of the local configuration hold. A node wants no attempts while it does not know
the policy that its membership names.

Whatever the local configuration has and the cluster overrules is said once, at the start, and when
either of them changes.
"""

from itertools import islice

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import NOT_GIVEN, TaskSpec
from musterd.ipc.wire.node_messages import Attempt
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import NewsTold, Report
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy
from musterd.supervisor.core.model.shared import (
    ClusterPolicy,
    differences,
    is_shared,
    shared_policy,
)
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Claim, Route

KEYS_SHOWN_MAX = 10  # of those that differ

_NO_CLASS = GatePolicy()
_NO_TARGET = TargetPolicy()


class ClusterRules:
    def __init__(self, state: State) -> None:
        self._state = state
        self._wanted = 0  # the version that the membership names
        self.version = 0  # of what is known here
        self._policy: ClusterPolicy | None = None  # None: nothing is applied
        self._heard = False
        self._said: tuple[int, tuple[str, ...]] | None = None

    @property
    def known(self) -> bool:
        """Whether this node knows the policy of the cluster."""
        return self.version >= self._wanted

    def named(self, version: int) -> None:
        self._wanted = version

    def shared(self, event: events.PolicyShared) -> None:
        """Take over the policy of the cluster; one that cannot be read changes nothing."""
        self.version, self._heard = event.version, True
        if event.policy is not None:
            self._policy = event.policy if event.version else None
        else:
            why = f"policy {event.version} is of a newer musterd: upgrade this machine"
            self._state.report("cluster.policy_unread", "error", reason=why)
        self.compare()

    def compare(self) -> None:
        """Say which keys of the local configuration do not hold, or are not shared yet."""
        policy = self._state.policy
        if not self._heard or not any(pool.clustered for pool in policy.pools):
            return
        schedules = tuple([each for each in policy.schedules if is_shared(policy, each)])
        local = shared_policy(policy, schedules)
        keys = tuple(differences(local, self._policy or ClusterPolicy()))
        if (self.version, keys) == self._said:
            return
        self._said = (self.version, keys)
        if keys and self._policy is None:
            why = (
                f"{_shown(keys)}: each machine has its own, and schedules of the cluster's pools "
                "do not run: share them with musterctl cluster apply FILE"
            )
            self._state.report("cluster.policy_missing", "warning", reason=why)
        elif keys:
            why = (
                f"{_shown(keys)}: policy {self.version} of the cluster holds for its pools, see "
                "musterctl cluster show: change it there, or remove these keys here"
            )
            self._state.report("cluster.policy_differs", "warning", reason=why)

    def noted(self, event: events.ScheduleNoted) -> None:
        """Report what happened to a schedule of the cluster."""
        self._state.out.append(
            Report(
                event.event,
                "info" if event.event in ("task.changed", "watch.recovered") else "warning",
                pool=event.pool,
                task=event.task,
                reason=event.reason,
                schedule=event.schedule,
                count=event.count,
                digest=event.digest,
                elsewhere=event.elsewhere,
                number=event.number,
                number_before=event.number_before,
                changed_at=event.at_ns / SECOND_NS,
                again=event.again,
                summary=event.summary,
                before=event.before,
                after=event.after,
            )
        )
        if event.change:
            self._state.out.append(NewsTold(event.change))

    def resolve(self, attempt: Attempt, route: Route) -> tuple[TaskSpec, Claim]:
        """Return the spec of the local task and its claim: what holds for it, all in all."""
        given, rules = attempt.spec, self._policy or self._state.policy
        of_class = rules.classes.get(attempt.policy, _NO_CLASS)
        target = rules.targets.get(given.target, rules.target) if given.target else _NO_TARGET
        retries = (given.max_retries, route.max_retries, target.max_retries, of_class.max_retries)
        counts = target.counts if target.counts is not None else of_class.counts
        fallback_on = (
            given.fallback_on or route.fallback_on or target.fallback_on or of_class.fallback_on
        )
        on_open = given.on_open or target.on_open or of_class.on_open
        spec = TaskSpec(
            given.id,
            given.name,
            given.args,
            given.priority,
            timeout_ns=(
                given.timeout_ns or route.timeout_ns or target.timeout_ns or of_class.timeout_ns
            ),
            max_retries=next(
                (each for each in retries if each != NOT_GIVEN), rules.retry.max_retries
            ),
            watch=given.watch,
            session=given.session,
        )
        claim = Claim(
            attempt.claim,
            attempt.attempt,
            given.target,
            target.backoff or of_class.backoff or rules.retry.backoff,
            counts if given.target else None,
            given.fallback is not None or fallback_on == "failure" or on_open == "fallback",
            fallback_on == "failure",
            fetching=target.fetching,
        )
        return spec, claim


def _shown(keys: tuple[str, ...]) -> str:
    names = ", ".join(islice(keys, KEYS_SHOWN_MAX))
    more = len(keys) - KEYS_SHOWN_MAX
    return f"{names} and {more} more" if more > 0 else names
