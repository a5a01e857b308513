"""What is asked about alerts on control.sock: by people, and by the process that sends them.

That process is a client: it says how its alerts stand, and follows the events; a test is an event
that is passed on to it and not kept, and it says what became of it.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct, structs

from musterd.supervisor.api import rpc
from musterd.supervisor.api.alerts import AlertsStatus, AlertTested
from musterd.supervisor.api.rpc import FAILED, NO_SUCH_NAME, RpcError
from musterd.supervisor.control.connection import Pending
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.actions import Report

TEST = "alert.test"
OWN_ONLY = (rpc.ReportAlerts, rpc.TestedAlert)  # for root and the daemon's own user


Publish = Callable[[Struct, float], None]  # to those who follow events; the time is shown


class Office(Protocol):
    """What these commands need of the daemon."""

    fleet: Fleet


class AlertCommands:
    def __init__(self, office: Office) -> None:
        self._office = office
        self.publish: Publish = lambda _report, _at: None
        self._status = AlertsStatus()
        self._tests: dict[str, tuple[Pending, str]] = {}

    def methods(self) -> dict[type, Callable[[Any], object]]:
        return {
            rpc.ListAlerts: lambda _: self._now(),
            rpc.TestAlert: self._test,
            rpc.ReportAlerts: self._report,
            rpc.TestedAlert: self._tested,
        }

    def _now(self) -> AlertsStatus:
        """What the process that lives has said last."""
        process = self._office.fleet.sidecars.alerts
        if not process.build:
            return AlertsStatus()
        pid = process.pid if process.pid == self._status.pid else 0
        return structs.replace(self._status, pid=pid, state=process.state, reason=process.reason)

    def _report(self, params: rpc.ReportAlerts) -> object:
        self._status = params.status
        return True

    def _test(self, params: rpc.TestAlert) -> object:
        now = self._now()
        known = [each.name for each in now.alerts]
        if not now.pid:
            why = now.reason or "it has not spoken yet, or there are no alerts"
            return RpcError(FAILED, f"the process that sends alerts is {now.state}: {why}")
        if params.name not in known:
            names = ", ".join(known) or "none"
            return RpcError(NO_SUCH_NAME, f"no such alert: {params.name!r}: there are {names}")
        token = secrets.token_hex(8)
        pending = Pending(on_abandoned=lambda: self._tests.pop(token, None))
        self._tests[token] = (pending, params.name)
        report = Report(TEST, "debug", reason=params.name, digest=token)
        self.publish(report, time.time())
        return pending

    def _tested(self, params: rpc.TestedAlert) -> object:
        waiting = self._tests.pop(params.token, None)
        if waiting is not None:
            pending, name = waiting
            pending.resolve(AlertTested(name=name, error=params.error))
        return True

    def ending(self) -> None:
        for pending, _ in self._tests.values():
            pending.fail(RpcError(FAILED, "the daemon is shutting down"))
        self._tests = {}
