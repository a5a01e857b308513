"""Commands about breakers on control.sock: list them, open, close, reset or disable one."""

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import BreakerList, BreakerStatus
from musterd.supervisor.control.answers import Methods
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.gates import Site
from musterd.supervisor.shell import Shell


class BreakerCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def methods(self) -> Methods:
        return {rpc.ListBreakers: self._list, rpc.SetBreaker: self._set}

    def _list(self, _params: rpc.ListBreakers) -> BreakerList:
        sites = self._shell.fleet.sites
        return BreakerList(breakers=[self._status(sites[name]) for name in sorted(sites)])

    def _set(self, params: rpc.SetBreaker) -> BreakerStatus:
        sites = self._shell.fleet.sites
        if params.command in ("close", "reset") and params.target not in sites:
            # There is nothing to undo. To open the breaker of a site before its first task is fine.
            raise rpc.RpcError(
                rpc.NO_SUCH_NAME,
                f"no such target: {params.target!r}: see musterctl breaker list",
            )
        self._shell.feed(events.BreakerCommanded(params.target, params.command))
        return self._status(self._shell.fleet.sites[params.target])

    def _status(self, site: Site) -> BreakerStatus:
        breaker = site.breaker
        left_ns = breaker.open_until_ns - self._shell.now_ns() if breaker.state == "open" else 0
        return BreakerStatus(
            target=site.target,
            state=str(breaker.state),
            open_seconds=None if breaker.state == "forced-open" else max(0, left_ns) / 1e9,
            failures=breaker.failures,
            reopenings=breaker.reopenings,
            running=site.inside,
            waiting=sum(lane.alive for lane in site.lanes if lane.waits_among is not None),
        )
