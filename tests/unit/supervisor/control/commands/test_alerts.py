"""Requests about alerts on control.sock, by people and by the process that sends alerts."""

import os
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Struct

from musterd.supervisor.api import rpc
from musterd.supervisor.api.alerts import AlertsStatus, AlertStatus, AlertTested
from musterd.supervisor.control.answers import Pending
from musterd.supervisor.control.commands.dispatch import Commands
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.core.model.events import ALERTS, SidecarExited, SidecarReady
from musterd.supervisor.core.model.policy import FleetPolicy
from musterd.supervisor.sockets.listen import Caller

PID = 4242
OPS = AlertStatus(name="ops", destination="json://...", state="idle")


class Rig:
    def __init__(self, build: str = "a") -> None:
        self.fleet = Fleet(FleetPolicy(pools=(), alerts=build), Random(1))
        self.fleet.handle(1, events.Started())
        parts: Any = SimpleNamespace()
        self.commands = Commands(SimpleNamespace(fleet=self.fleet), parts, parts, parts)  # type: ignore[arg-type]
        self.published: list[Struct] = []
        self.commands.publish_with(lambda report, _at: self.published.append(report))

    def up(self) -> "Rig":
        self.fleet.handle(2, SidecarReady(1, PID, "", ALERTS))
        self.ask(rpc.ReportAlerts(AlertsStatus(alerts=[OPS], pid=PID)))
        return self

    def ask(self, params: rpc.Params, uid: int | None = None) -> Any:
        caller = Caller(1, os.geteuid() if uid is None else uid, 0)
        return self.commands.call(rpc.METHOD_OF[type(params)], params, caller)


def test_what_the_process_said_is_shown_as_long_as_it_lives() -> None:
    rig = Rig().up()
    shown = rig.ask(rpc.ListAlerts())
    assert (shown.pid, shown.state, shown.alerts) == (PID, "up", [OPS])
    rig.fleet.handle(3, SidecarExited(1, "it was ended by signal 9", name=ALERTS))
    shown = rig.ask(rpc.ListAlerts())
    assert (shown.pid, shown.state, shown.reason) == (0, "backoff", "it was ended by signal 9")
    assert shown.alerts == [OPS]


def test_without_alerts_nothing_is_shown() -> None:
    assert Rig("").ask(rpc.ListAlerts()) == AlertsStatus()


def test_only_the_daemons_own_user_and_root_may_report() -> None:
    rig = Rig().up()
    for params in (rpc.ReportAlerts(AlertsStatus()), rpc.TestedAlert("x")):
        refused = rig.ask(params, uid=os.geteuid() + 12345)
        assert isinstance(refused, rpc.RpcError)
        assert refused.code == rpc.NOT_ALLOWED
    assert rig.ask(rpc.ListAlerts()).alerts == [OPS]


@pytest.mark.parametrize("error", ["", "HTTP 404"])
def test_a_test_is_passed_on_and_answered_when_the_process_says_so(error: str) -> None:
    rig = Rig().up()
    pending = rig.ask(rpc.TestAlert("ops"))
    assert isinstance(pending, Pending)
    answers: list[object] = []
    pending.bind(answers.append)
    (report,) = rig.published
    assert isinstance(report, Report)
    assert (report.event, report.reason) == ("alert.test", "ops")
    rig.ask(rpc.TestedAlert("another"))
    assert answers == []
    rig.ask(rpc.TestedAlert(report.digest, error))
    rig.ask(rpc.TestedAlert(report.digest, error))  # no caller waits any more
    assert answers == [AlertTested(name="ops", error=error)]


def test_a_test_of_what_is_not_there_is_refused() -> None:
    refused = Rig().up().ask(rpc.TestAlert("nobody"))
    assert isinstance(refused, rpc.RpcError)
    assert (refused.code, refused.message) == (
        rpc.NO_SUCH_NAME,
        "no such alert: 'nobody': there are ops",
    )
    refused = Rig().ask(rpc.TestAlert("ops"))
    assert isinstance(refused, rpc.RpcError)
    assert "the process that sends alerts is starting" in refused.message


def test_who_waits_for_a_test_is_told_of_the_end() -> None:
    rig = Rig().up()
    answers: list[object] = []
    pending = rig.ask(rpc.TestAlert("ops"))
    pending.bind(answers.append)
    pending.end()
    assert isinstance(answers[0], rpc.RpcError)
