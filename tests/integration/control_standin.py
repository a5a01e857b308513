"""Run a real ControlServer in a process, with a small made-up fleet.

    python control_standin.py SOCKET [GROUP]

The program prints "ready" once it listens. It answers commands that wait in a later turn of the
loop, as the daemon does. Tasks: parser.echo returns its arguments, parser.fail fails, parser.never
never ends, parser.full is rejected. `restart broken` fails; `signal` is published as an event.
"""

import os
import select
import sys
import time

import msgspec

from musterd.ipc.wire.messages import Failure, Rejection, TaskView
from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.rpc import NO_SUCH_NAME, Params, RpcError
from musterd.supervisor.api.status import (
    BACKOFF,
    RUNNING,
    STOPPED,
    WHOLE_POOL,
    CommandResult,
    FleetStatus,
    PidResult,
    PoolStatus,
    SlotPid,
    SlotResult,
    TailResult,
    TaskList,
    VersionResult,
    WorkerStatus,
    expand,
    task_status,
)
from musterd.supervisor.api.status import select as select_status
from musterd.supervisor.control.answers import Pending
from musterd.supervisor.control.server import ControlServer
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.sockets.listen import Caller


class StandIn:
    def __init__(self, path: str, group: str) -> None:
        self.states = {"parser": [RUNNING, RUNNING], "broken": [RUNNING]}
        self.tasks: dict[str, TaskView] = {}
        self.later: list[tuple[Pending, object]] = []  # answered in the next turn
        self.ending: Pending | None = None
        self.server = ControlServer(path, group, self)

    def run(self) -> None:
        poller = select.poll()
        poller.register(self.server, select.POLLIN)
        while self.ending is None:
            deadline = self.server.next_deadline()
            wait_ms = None
            if self.later:
                wait_ms = 0.0
            elif deadline is not None:
                wait_ms = max(0.0, (deadline - time.monotonic_ns()) / 1e6)
            poller.poll(wait_ms)
            self.server.serve(time.monotonic_ns())
            answers, self.later = self.later, []
            for pending, answer in answers:
                pending.resolve(answer)
        self.ending.resolve(CommandResult())
        self.server.close()

    def call(self, method: str, params: Params, caller: Caller) -> object:  # noqa: PLR0911
        match params:
            case rpc.Status(names=names):
                return select_status(self.fleet(), names)
            case rpc.Start(names=names) | rpc.Reset(names=names):
                return self.act(params, names, RUNNING)
            case rpc.Tail(names=names) | rpc.Events(names=names):
                expand(names, self.slots())
                return TailResult(workers=[])
            case rpc.Pause(names=names) | rpc.Drain(names=names) | rpc.Resume(names=names):
                expand(names, self.slots())
                return CommandResult()
            case rpc.Stop(names=names):
                return self.act(params, names, STOPPED)
            case rpc.Restart(names=names):
                broken = any(name == "broken" for name in names)
                return self.act(params, names, BACKOFF if broken else RUNNING)
            case rpc.Scale(pool=pool, size=size):
                expand([pool], self.slots())
                self.states[pool] = [RUNNING] * size
                return self.act(params, [pool], RUNNING)
            case rpc.Signal(signal=number, names=names):
                expand(names, self.slots())
                reason = f"signal {convert.signal_number(number)}"
                self.server.publish(Report("signal.sent", worker=names[0], reason=reason))
                return CommandResult()
            case rpc.Pid(names=names):
                return PidResult(supervisor=self.own_pid(), workers=self.pids(names))
            case rpc.Version():
                return VersionResult(version="9.9.9", pid=self.own_pid())
            case rpc.Shutdown(no_block=no_block):
                self.ending = Pending()
                return CommandResult(done=False) if no_block else self.ending
        return self.call_tasks(params)

    def call_tasks(self, params: Params) -> object:
        match params:
            case rpc.SubmitTask():
                return self.submit(params)
            case rpc.GetTask(id=task_id):
                if task_id not in self.tasks:
                    return RpcError(NO_SUCH_NAME, f"no such task: {task_id}: see musterctl tasks")
                return task_status(self.tasks[task_id])
            case rpc.ListTasks(state=state, limit=limit):
                found = [view for view in self.tasks.values() if state in ("", view.state)]
                shown = [task_status(view, with_value=False) for view in found[:limit]]
                return TaskList(tasks=shown, more=len(found) > limit)
            case rpc.CancelTasks(ids=ids):
                for task_id in ids:
                    view = self.tasks.get(task_id)
                    if view is not None and view.state == "running":
                        self.tasks[task_id] = msgspec.structs.replace(view, state="cancelled")
                known = [task_status(self.tasks[i]) for i in ids if i in self.tasks]
                return TaskList(tasks=known, missing=[i for i in ids if i not in self.tasks])
        raise AssertionError(f"no such command: {params}")

    def submit(self, params: rpc.SubmitTask) -> object:
        spec = convert.task_spec(params)
        view = TaskView(spec.id, spec.name, "running", params.priority, attempt=1)
        match spec.name:
            case "parser.echo":
                view = msgspec.structs.replace(view, state="succeeded", value=spec.args)
            case "parser.fail":
                failure = Failure("error", "ValueError", "bad page", "Traceback: line 7\nbad page")
                view = msgspec.structs.replace(view, state="failed", failure=failure)
            case "parser.never":
                pass
            case "parser.full":
                return convert.rejected(Rejection(spec.id, "QueueFull", "no room for normal"))
            case _:
                return convert.rejected(Rejection(spec.id, "UnknownTask", f"no task {spec.name}"))
        self.tasks[spec.id] = view
        pending = Pending()
        if params.wait and view.state == "running":
            return pending
        self.later.append((pending, task_status(view, with_value=params.wait)))
        return pending

    def act(self, params: Params, names: list[str], state: str) -> object:
        slots = []
        for pool, wanted in expand(names, self.slots()):
            for index in range(len(self.states[pool])) if wanted == WHOLE_POOL else [wanted]:
                self.states[pool][index] = state
                name, ok = f"{pool}/{index}", state != BACKOFF
                reason = "" if ok else "exit 1"
                slots.append(SlotResult(name=name, ok=ok, state=state, reason=reason))
        if params.no_block:  # type: ignore[attr-defined]
            return CommandResult(done=False)
        pending = Pending()
        self.later.append((pending, CommandResult(slots=slots)))
        return pending

    def slots(self) -> dict[str, list[int]]:
        return {pool: list(range(len(states))) for pool, states in self.states.items()}

    def own_pid(self) -> int:
        return os.getpid()

    def pids(self, names: list[str]) -> list[SlotPid]:
        return [
            SlotPid(worker.name, worker.pid)
            for pool in select_status(self.fleet(), names).pools
            for worker in pool.workers
            if worker.pid
        ]

    def fleet(self) -> FleetStatus:
        pools = []
        for pool, states in self.states.items():
            workers = [
                WorkerStatus(
                    name=f"{pool}/{index}",
                    state=state,
                    pid=1000 + index if state == RUNNING else 0,
                )
                for index, state in enumerate(states)
            ]
            running = states.count(RUNNING)
            pools.append(
                PoolStatus(
                    name=pool, state=RUNNING, size=len(states), running=running, workers=workers
                )
            )
        return FleetStatus(
            version="9.9.9", pid=self.own_pid(), uptime_seconds=5, state="running", pools=pools
        )


if __name__ == "__main__":
    stand_in = StandIn(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
    print("ready", flush=True)
    stand_in.run()
