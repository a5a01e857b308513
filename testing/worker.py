"""A worker opened inside a test: run its tasks, let time pass, kill it, look at what it did."""

import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from msgspec import UNSET

from musterd.ipc.client.calls import Call, Fallback, R_co, called_place, made, make_call
from musterd.ipc.client.handle import Args, BaseHandle, TaskStatus, understood
from musterd.ipc.client.session import Session
from musterd.ipc.client.taskspec import SpecOptions, TaskOptions, make_spec
from musterd.ipc.errors import TaskFailed, UnknownTask
from musterd.ipc.wire.artefacts import artefacts_of
from musterd.ipc.wire.messages import Outcome, ProgressNote, TaskSpec
from musterd.supervisor.api.status import MetricStatus
from musterd.supervisor.core.model import events
from musterd.supervisor.views.fleet import counted
from musterd.testing.process import LocalProcess
from musterd.testing.settings import Given, Settings, name_of, settings_of
from musterd.testing.surroundings import Surroundings
from musterd.testing.watchdog import watchdog
from musterd.testing.world import Attempt, Story, Stuck, WorkerKilled, World
from musterd.workers.authoring.base import Worker
from musterd.workers.authoring.outcome import RUNTIME_CODE
from musterd.workers.runtime.handlers import Loaded, WorkerLoadError, load, look_at

if TYPE_CHECKING:
    from musterd.ipc.client.calls import AsyncHandler, Handler

OPEN_FAILURES_MAX = 5  # in a row; a daemon goes on, in ever longer pauses

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")


class LocalTask(BaseHandle[R_co]):
    """A task of a worker under test. Nothing of it runs before somebody waits."""

    __slots__ = ("_story",)

    _owner: "LocalWorker[Any]"

    def __init__(
        self,
        worker: "LocalWorker[Any]",
        spec: TaskSpec,
        story: Story,
        returns: Callable[[bytes], Any] | None = None,
    ) -> None:
        super().__init__(spec.id, spec.name, spec, worker, returns)
        self._story = story
        self._acknowledged = True
        self._hear()

    def _hear(self) -> bool:
        self._ending, notes = self._story.ending, self._story.notes
        self._note = notes[-1] if notes else None
        return self._ending is not None

    def done(self) -> bool:
        """Tell whether the task has ended."""
        return self._hear()

    @property
    def state(self) -> str:
        """The state that a client would have heard of."""
        self._hear()
        return super().state

    def result(self, timeout: float | None = None) -> R_co:
        """Run the worker until the task ends, and return its value; raise TaskFailed,
        TaskCancelled, TaskExpired or a rejection. `timeout` is in seconds of the worker's clock."""
        __tracebackhide__ = True  # pytest shows the line of the test, and those of the handler
        self._wait(timeout)
        try:
            return cast(R_co, self._value(Session()))
        except TaskFailed as failed:
            raised = self._raised()
            if raised is not None:
                failed.__notes__ = []  # its traceback in words: here is the error itself
            raise failed.with_traceback(None) from raised

    def _raised(self) -> BaseException | None:
        """Return what the handler has raised last, with its own lines alone."""
        if self._story.raised is None:
            return None
        error, trace = self._story.raised
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(RUNTIME_CODE):
            trace = trace.tb_next
        return error.with_traceback(trace)

    def outcome(self, timeout: float | None = None) -> Outcome:
        """Run the worker until the task ends; return how, whether well or not."""
        self._wait(timeout)
        return self._outcome(Session())

    def _wait(self, timeout: float | None) -> None:
        if not self._owner.wait(self._hear, timeout):
            raise TimeoutError(
                f"the end of task {self.id} ({self.name}) did not come within {timeout:g} s"
            )

    def status(self) -> TaskStatus:
        """Return the task as the daemon would show it now."""
        return self._seen(self._owner.world.look_at(self.id))

    def cancel(self) -> None:
        """Cancel the task; result() raises TaskCancelled unless the task ended before."""
        self._owner.world.cancel(self.id)

    def progress(self) -> Iterator[ProgressNote]:
        """Yield the ctx.progress() that a client would have seen so far."""
        yield from list(self._story.notes)

    @property
    def attempts(self) -> list[Attempt]:
        """Attempts that have ended, the first one first."""
        return list(self._story.attempts)

    @property
    def pauses(self) -> list[float]:
        """Seconds between the attempts. Jitter is left out."""
        return [each.pause for each in self._story.attempts[1:]]

    @property
    def artefacts(self) -> dict[str, bytes]:
        """Files that failed attempts have left, by name: "attempt-1.page.html"."""
        found = artefacts_of(str(self._owner.folder), self.id)
        return {each.name: Path(each.path).read_bytes() for each in found}


class LocalWorker(Generic[W]):
    """A worker that is open in this process; see open_worker()."""

    def __init__(
        self, loaded: Loaded, settings: Settings, folder: Path, patience: float | None
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.world = World(settings, loaded.declarations, patience)
        self._loaded = loaded
        self._surroundings = Surroundings(settings, self.world, folder)
        self._process: LocalProcess | None = None
        self._problem: BaseException | None = None  # of the last open()
        self._failures = 0  # of open(), in a row
        self._closed = False

    def __repr__(self) -> str:
        return f"<LocalWorker {self.settings.pool} ({self._loaded.worker})>"

    # -- tasks --------------------------------------------------------------------------------

    @overload
    def run(self, name: str, /, **arguments: Any) -> Any: ...
    @overload
    def run(self, handler: "AsyncHandler[P, R]", /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def run(self, handler: "Handler[P, R]", /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def run(self, task: Any, /, *args: Any, **arguments: Any) -> Any:
        """Run a task to its end, and return its result: `worker.run(Promos.check, shop="aurora")`,
        or by its name, `worker.run("check", shop="aurora")`. Raises what result() raises."""
        __tracebackhide__ = True
        if not isinstance(task, str):
            return self.submit(make_call(task, args, arguments)).result()
        if args:
            raise TypeError("a task that is given by its name takes arguments by their names")
        return self.submit(task, arguments).result()

    @overload
    def submit(
        self, name: str, args: Args = None, **options: Unpack[TaskOptions]
    ) -> LocalTask[Any]: ...
    @overload
    def submit(
        self, call: Call[R], /, *, fallback: Fallback, **options: Unpack[SpecOptions]
    ) -> LocalTask[R | Fallback]: ...
    @overload
    def submit(self, call: Call[R], /, **options: Unpack[SpecOptions]) -> LocalTask[R]: ...
    @overload
    def submit(
        self, handler: "AsyncHandler[P, R]", /, *args: P.args, **kwargs: P.kwargs
    ) -> LocalTask[R]: ...
    @overload
    def submit(
        self, handler: "Handler[P, R]", /, *args: P.args, **kwargs: P.kwargs
    ) -> LocalTask[R]: ...
    def submit(  # type: ignore[misc]
        self, task: Any = UNSET, args: Any = UNSET, /, *more: Any, **options: Any
    ) -> LocalTask[Any]:
        """Submit a task as Client.submit() does, with the same options.

            submit("check", {"shop": "aurora"}, priority="high")            by name
            submit(Promos.check, shop="aurora")                             typed
            submit(call(Promos.check, shop="aurora"), priority="high")      typed, with options

        Nothing runs yet: result() and the like run the worker.
        """
        self._check_open()
        task, args, options = understood(task, (args, *more), options)
        if isinstance(task, Call):
            spec, _, _, returns = made(task, self._name_of_call(task), options)
        else:
            spec, returns = make_spec(self._full_name(task), args, **options), None
        return LocalTask(self, spec, self.world.submit(spec), returns)

    def _full_name(self, name: Any) -> Any:
        pool = self.settings.pool
        whole = not isinstance(name, str) or name.startswith(f"{pool}.")
        return name if whole else f"{pool}.{name}"

    def _name_of_call(self, call: Call[Any]) -> str:
        for each in self._loaded.handlers:
            if called_place(each.function) == call.place:
                return f"{self.settings.pool}.{each.method}"
        raise UnknownTask(
            f"{call.place} is no task of {self._loaded.worker}, which has "
            f"{', '.join(each.method for each in self._loaded.handlers)}"
        )

    # -- time ---------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Seconds since the worker was opened, by its clock."""
        return (self.world.now_ns() - self.world.began_ns) / 1e9

    def advance(self, seconds: float) -> None:
        """Let time pass: tasks run that are due meanwhile, and healthy() is called."""
        self.wait(bool, seconds)

    def after(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Call this in so many seconds, in the middle of a handler if one waits then."""
        self.world.at(seconds, lambda: call(*args))

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Run the worker until done() holds; return False if the time is over before."""
        self._check_open()
        if self._process is not None and self._process.running:
            self._process.run(lambda: None)  # which says what is wrong
        limit_ns = math.inf if timeout is None else self.world.now_ns() + round(timeout * 1e9)
        return self.world.wait(done, self._turn, limit_ns)

    # -- the worker ---------------------------------------------------------------------------

    @property
    def instance(self) -> W:
        """The object of the worker class; another one after a crash."""
        while self._process is None:
            self.wait(lambda: self._process is not None)
        return cast(W, self._process.runtime.worker)

    def crash(self) -> None:
        """Kill the worker as `kill -9` does, in the middle of a handler too; another one is opened.

        Called in a handler, or in what it calls, it does not return.
        """
        self._check_open()
        process = self._process
        if process is None:
            return
        process.kill()
        if process.running:
            raise WorkerKilled
        self._bury(process, process.turn())

    def check_health(self) -> bool:
        """Call healthy() as the daemon does; if it says no, the worker is replaced."""
        self._check_open()
        process = self._process
        if process is None:
            return False
        code = process.check_health()
        self._bury(process, code)
        return code is None

    @contextmanager
    def hold_lock(self, name: str) -> Iterator[None]:
        """Hold a lock of ctx.lock() in the place of another worker."""
        give_back = self.world.hold_lock(name)
        try:
            yield
        finally:
            give_back()

    @property
    def log(self) -> list[str]:
        """Lines that the daemon would have in its log of this worker, without secrets."""
        return self._surroundings.lines

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the worker: `worker.metrics["promos_found"]`, 'pages{site="a.example"}'."""
        pool = self.world.fleet.pools[self.settings.pool]
        return {_shown(each): each.value for each in counted(pool)}

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> Self:
        """Open the worker; raise what its open() raises."""
        self._turn()
        process = self._process
        if process is None:
            assert self._problem is not None
            raise self._problem
        return self

    def close(self) -> None:
        """Let the worker end as a stop does, and raise what its close() raises."""
        if self._closed:
            return
        try:
            process = self._process
            if process is not None and not process.dead:
                self.world.feed(events.StopRequested(((self.settings.pool, -1),)))
                self.world.wait(lambda: self._process is None, self._turn)
                if process.problem is not None:
                    raise process.problem
        finally:
            self._closed = True
            if self._process is not None:  # it was interrupted
                self._process.end()
            self.world.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self!r} is closed")

    def _turn(self) -> None:
        """Do what is next: open a worker, run it, or let time pass."""
        world, process = self.world, self._process
        if world.spawns:
            self._open(world.spawns.pop(0))
        elif process is None:
            world.pass_time(world.next_due_ns())
        else:
            self._bury(process, process.turn())

    def _open(self, number: int) -> None:
        process = LocalProcess(number, self.world, self._loaded, self._surroundings)
        self._process = self.world.process = process
        self.world.feed(events.WorkerForked(number, 0))
        code = process.open()
        self._bury(process, code)
        problem = process.problem
        if code is not None and problem is None:
            seconds = self.settings.start_timeout_ns / 1e9
            problem = TimeoutError(f"open() took longer than start_timeout, {seconds:g} s")
        self._problem = problem
        self._failures = self._failures + 1 if problem is not None else 0
        if self._failures >= OPEN_FAILURES_MAX:
            raise Stuck(
                f"open() has failed {self._failures} times in a row: {problem}"
            ) from problem

    def _bury(self, process: LocalProcess, code: int | None) -> None:
        """Tell the world of the end of a worker, if it has come to its end."""
        if code is None:
            return
        self._process = None
        event, began = process.exit_event(code)
        process.end()
        self.world.exited(event, began)


def _shown(metric: MetricStatus) -> str:
    """Return a metric's name and labels as Prometheus writes them."""
    labels = ",".join(f'{name}="{text}"' for name, text in sorted(metric.labels.items()))
    return f"{metric.name}{{{labels}}}" if labels else metric.name


class WorkerOptions(TypedDict, total=False):
    """What open_worker() takes beside the worker."""

    config: Given  # as the daemon has it: a file, several, or a table
    pool: str  # of the configuration, where several run the worker; else its name
    options: Mapping[str, Any] | None  # laid over those of the pool
    secrets: Mapping[str, str] | None  # that the pool has
    concurrency: int | None  # tasks at once, in place of what the pool says
    # Real seconds for which the clock of the worker waits for sockets, threads and whatever it does
    # not know, before it goes on to the next deadline; None: as long as it takes.
    patience: float | None


@overload
def open_worker(
    worker: type[W], **given: Unpack[WorkerOptions]
) -> AbstractContextManager[LocalWorker[W]]: ...
@overload
def open_worker(
    worker: ModuleType | str, **given: Unpack[WorkerOptions]
) -> AbstractContextManager[LocalWorker[Worker]]: ...
def open_worker(
    worker: Any, **given: Unpack[WorkerOptions]
) -> AbstractContextManager[LocalWorker[Any]]:
    """Open a worker class, or a module of functions, in this process; close it after the block.

    Without a configuration the worker has what a daemon without one gives it. See WorkerOptions.
    """
    return _open_worker(worker, **given)


def _check_class(worker: Any) -> None:
    if not isinstance(worker, type):
        raise WorkerLoadError(
            f"{worker!r} is no worker: give a class, a module of functions, or a name such as "
            "'package.module:Class'"
        )
    if not issubclass(worker, Worker):
        raise WorkerLoadError(
            f"{worker.__name__} is not a subclass of musterd.Worker; "
            f"write class {worker.__name__}(Worker)"
        )


@contextmanager
def _open_worker(
    worker: Any,
    *,
    config: Given = None,
    pool: str = "",
    options: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    concurrency: int | None = None,
    patience: float | None = None,
) -> Iterator[LocalWorker[Any]]:
    if not isinstance(worker, str | ModuleType):
        _check_class(worker)
    if isinstance(worker, str):
        loaded = load(worker)
        owner = loaded.factory or sys.modules[worker]
    else:
        loaded, owner = look_at(name_of(worker), worker), worker
    folder = Path(tempfile.mkdtemp(prefix="musterd-test-"))
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        settings = settings_of(
            owner,
            folder,
            config=config,
            pool=pool,
            options=options or {},
            secrets=secrets or {},
            concurrency=concurrency,
        )
        watchdog.begin()
        undo.callback(watchdog.end)
        opened: LocalWorker[Any] = LocalWorker(loaded, settings, folder, patience)
        undo.callback(opened.close)
        yield opened.open()
