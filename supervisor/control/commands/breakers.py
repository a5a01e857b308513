"""What people ask about breakers on control.sock."""

from collections.abc import Callable
from typing import Any, Protocol

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import BreakerList, BreakerStatus
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.gates import Site


class Office(Protocol):
    """What these commands need of the daemon."""

    fleet: Fleet

    def feed(self, event: object) -> None: ...
    def now_ns(self) -> int: ...


class BreakerCommands:
    def __init__(self, office: Office) -> None:
        self._office = office

    def methods(self) -> dict[type, Callable[[Any], object]]:
        return {rpc.ListBreakers: self._list, rpc.SetBreaker: self._set}

    def _list(self, _params: rpc.ListBreakers) -> object:
        sites = self._office.fleet.sites
        return BreakerList(breakers=[self._status(sites[name]) for name in sorted(sites)])

    def _set(self, params: rpc.SetBreaker) -> object:
        sites = self._office.fleet.sites
        if params.command in ("close", "reset") and params.target not in sites:
            # Nothing is there to be undone; to hold a site open before it was ever seen is sound.
            raise rpc.RpcError(
                rpc.NO_SUCH_NAME,
                f"no such target: {params.target!r}: see musterctl breaker list",
            )
        self._office.feed(events.BreakerCommanded(params.target, params.command))
        return self._status(self._office.fleet.sites[params.target])

    def _status(self, site: Site) -> BreakerStatus:
        breaker = site.breaker
        left_ns = breaker.open_until_ns - self._office.now_ns() if breaker.state == "open" else 0
        return BreakerStatus(
            target=site.target,
            state=str(breaker.state),
            open_seconds=max(0, left_ns) / 1e9,
            failures=breaker.failures,
            reopenings=breaker.reopenings,
            running=site.inside,
            waiting=sum(lane.alive for lane in site.lanes if lane.room is not None),
        )
