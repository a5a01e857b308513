"""Commands about alerts on control.sock, for people and for the process that sends alerts.

That process is a client: it reports the state of its alerts and follows events. A test is an event
that is sent to it and not kept; the process reports how the test went.
"""

import secrets
import time
from collections.abc import Callable

from msgspec import Struct, structs

from musterd.supervisor.api import rpc
from musterd.supervisor.api.alerts import AlertsStatus, AlertTested
from musterd.supervisor.api.rpc import FAILED, NO_SUCH_NAME, RpcError
from musterd.supervisor.control.answers import Methods, Pending
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.core.model.events import ALERTS
from musterd.supervisor.shell import Shell

TEST = "alert.test"
OWN_ONLY = (rpc.ReportAlerts, rpc.TestedAlert)  # for root and the daemon's own user


Publish = Callable[[Struct, float], None]  # sends an event, with its time, to those who follow


class AlertCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.publish: Publish = lambda _report, _at: None
        self._status = AlertsStatus()
        # By token, which the process sees: bounded as all that callers wait for (answers.py).
        self._tests: dict[str, tuple[Pending, str]] = {}

    def methods(self) -> Methods:
        return {
            rpc.ListAlerts: lambda _: self._now(),
            rpc.TestAlert: self._test,
            rpc.ReportAlerts: self._report,
            rpc.TestedAlert: self._tested,
        }

    def _now(self) -> AlertsStatus:
        """Return what the process that lives has reported last."""
        process = self._shell.fleet.sidecars[ALERTS]
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
            why = now.reason or "it has not reported yet, or there are no alerts"
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
