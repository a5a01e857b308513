"""Which methods of control.sock are for callers who may only look."""

import pytest

from musterd.supervisor.api import rpc
from musterd.supervisor.control.access import Access, Admitted, Caller, Rank

# What shows arguments, results, pictures, output or code, or changes anything, is none of these.
LOOKS = {
    *("status", "memory", "metrics", "events", "pid", "version", "clock", "alerts"),
    *("breaker.list", "schedule.list", "sessions.list", "changes", "history"),
}


@pytest.mark.parametrize("method", rpc.METHODS)
def test_a_watcher_may_look_at_the_fleet_and_at_nothing_of_tasks(method: str) -> None:
    access = Access("", "")
    caller = Caller(1, 54321, 54321)
    access.check(Admitted(caller, Rank.CONTROL), method)
    if method in LOOKS:
        access.check(Admitted(caller, Rank.VIEW), method)
        return
    with pytest.raises(rpc.RpcError, match=f"not {method}: use sudo"):
        access.check(Admitted(caller, Rank.VIEW), method)


def test_the_methods_to_look_at_exist() -> None:
    assert rpc.METHODS.keys() >= LOOKS
