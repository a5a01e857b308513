"""The table of commands: which method of control.sock is carried out where.

A command gets typed parameters (api/rpc.py) and returns its result, an RpcError or a Pending. The
commands about the daemon itself are here, the others in the modules beside this one.
"""

import os
import platform

from musterd import __version__
from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import RpcError
from musterd.supervisor.api.status import ClockStatus, CommandResult, VersionResult, select
from musterd.supervisor.control.answers import LaterAnswers, Methods, Pending
from musterd.supervisor.control.commands.alerts import OWN_ONLY, AlertCommands, Publish
from musterd.supervisor.control.commands.artefacts import ArtefactCommands
from musterd.supervisor.control.commands.breakers import BreakerCommands
from musterd.supervisor.control.commands.cluster import ClusterCommands
from musterd.supervisor.control.commands.dead import DeadCommands
from musterd.supervisor.control.commands.debug import DebugCommands
from musterd.supervisor.control.commands.history import HistoryCommands
from musterd.supervisor.control.commands.lists import ListCommands
from musterd.supervisor.control.commands.reload import ReloadCommands
from musterd.supervisor.control.commands.schedules import ScheduleCommands
from musterd.supervisor.control.commands.sessions import SessionCommands
from musterd.supervisor.control.commands.slots import SlotCommands
from musterd.supervisor.control.commands.tasks import TaskCommands
from musterd.supervisor.service.reload import Reloading
from musterd.supervisor.service.wall_clock import WallClock
from musterd.supervisor.shell import Shell
from musterd.supervisor.sockets.listen import Caller
from musterd.supervisor.store.requests import BUSY
from musterd.supervisor.views.metrics import Figures

ASK_THE_STORE = (
    *(rpc.SubmitTask, rpc.GetTask, rpc.ListTasks, rpc.CancelTasks),
    *(rpc.ListDead, rpc.RetryTasks, rpc.PurgeTasks, rpc.ListChanges, rpc.ShowHistory),
    *(rpc.ListSessions, rpc.ForgetSession, rpc.ResetSession),
)


class Commands:
    def __init__(
        self, shell: Shell, reloading: Reloading, figures: Figures, clock: WallClock
    ) -> None:
        self._shell = shell
        self._clock = clock
        self.answers = LaterAnswers()
        self._alerts = AlertCommands(shell)
        self.debug = DebugCommands(shell)
        self._methods: Methods = {
            rpc.Status: lambda params: select(shell.status(), params.names),
            rpc.Shutdown: self._shutdown,
            rpc.Version: self._version,
            rpc.ShowClock: lambda _: clock.status(),
            rpc.AcceptClock: self._accept_clock,
            rpc.ShowMemory: lambda _: shell.memory_status(),
            rpc.Metrics: lambda _: figures.all(),
            **SlotCommands(shell, self.answers, reloading).methods(),
            **TaskCommands(shell, self.answers).methods(),
            **ListCommands(shell).methods(),
            **DeadCommands(shell, self.answers).methods(),
            **ReloadCommands(shell, self.answers, reloading).methods(),
            **ScheduleCommands(shell, self.answers).methods(),
            **HistoryCommands(shell).methods(),
            **BreakerCommands(shell).methods(),
            **SessionCommands(shell).methods(),
            **ArtefactCommands(shell).methods(),
            **ClusterCommands(shell).methods(),
            **self._alerts.methods(),
        }

    def publish_with(self, publish: Publish) -> None:
        """Use this to tell those who follow events; the ControlServer is made after this."""
        self._alerts.publish = publish

    def call(self, method: str, params: rpc.Params, caller: Caller) -> object:
        """Return a result, an RpcError or a Pending; called by the ControlServer."""
        if isinstance(params, OWN_ONLY) and caller.uid not in (0, os.geteuid()):
            return RpcError(rpc.NOT_ALLOWED, f"not allowed: {method} is for the daemon's own")
        if isinstance(params, rpc.Debug):
            return self.debug.begin(params, caller)
        if isinstance(params, ASK_THE_STORE) and self._shell.store_requests.full:
            return RpcError(rpc.LIMIT_REACHED, BUSY)
        return self._methods[type(params)](params)

    def _version(self, _params: rpc.Version) -> VersionResult:
        return VersionResult(version=__version__, pid=os.getpid(), python=platform.python_version())

    def _accept_clock(self, _params: rpc.AcceptClock) -> ClockStatus:
        self._clock.accept()
        return self._clock.status()

    def _shutdown(self, params: rpc.Shutdown) -> object:
        self._shell.shut_down("asked for by musterctl")
        if params.no_block:
            return CommandResult(done=False)
        return Pending(last_answer=CommandResult())
