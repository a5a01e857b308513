"""The resilience policy of a task, in words: each value and where it comes from.

The first of these that gives a value wins: the submit, `@task`, the target, the class, the pool,
the default. This reads what core/model/task.py reads, but also for tasks that have ended.
"""

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import NOT_GIVEN, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.policy import GatePolicy


def applied_policy(fleet: Fleet, spec: TaskSpec) -> str:
    """Return the policy for `musterctl task ID`; "" if there is no such pool any more."""
    pool_name, _, method = spec.name.partition(".")
    pool = fleet.pools.get(pool_name)
    if pool is None:
        return ""
    policy = fleet.policy
    target = policy.target_of(spec.target)
    own_class = spec.policy if spec.policy in policy.classes else ""
    name = own_class or target.policy
    of_class = policy.classes.get(name, GatePolicy())
    declared = (pool.declarations or {}).get(method)
    timeouts_ns = {
        "submit": spec.timeout_ns,
        "@task": declared.timeout_ns if declared is not None else 0,
        "target": target.timeout_ns,
        "class": of_class.timeout_ns,
        "pool": pool.policy.task_timeout_ns,
    }
    retries = {
        "submit": spec.max_retries,
        "@task": declared.max_retries if declared is not None else NOT_GIVEN,
        "target": target.max_retries,
        "class": of_class.max_retries,
        "default": pool.retry.max_retries,
    }
    timeout_by = next(origin for origin, given_ns in timeouts_ns.items() if given_ns)
    retries_by = next(origin for origin, given in retries.items() if given != NOT_GIVEN)
    parts = [f"class {name} ({'submit' if own_class else 'target'})"] if name else []
    parts.append(f"timeout {timeouts_ns[timeout_by] / SECOND_NS:g} s ({timeout_by})")
    count = retries[retries_by]
    parts.append(f"{count} {'retry' if count == 1 else 'retries'} ({retries_by})")
    if spec.target:
        words = {
            "submit": spec.on_open,
            "target": target.on_open,
            "class": of_class.on_open,
            "default": "wait",
        }
        origin = next(origin for origin, word in words.items() if word)
        parts.append(f"breaker open: {words[origin]} ({origin})")
    words = {
        "submit": spec.fallback_on,
        "@task": declared.fallback_on if declared is not None else "",
        "target": target.fallback_on if spec.target else "",
        "class": of_class.fallback_on,
    }
    origin = next((origin for origin, word in words.items() if word), "")
    if origin and words[origin] == "failure":
        parts.append(f"falls back on failure ({origin})")
    return ", ".join(parts)
