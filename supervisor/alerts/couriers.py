"""Start a courier for each message, and collect the outcomes."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable

import msgspec
from msgspec import Struct

from musterd.supervisor.alerts.courier import Delivery, Outcome
from musterd.supervisor.alerts.rules import Message
from musterd.supervisor.alerts.settings import Destination
from musterd.supervisor.system.linux import memory_file

COMMAND = (sys.executable, "-P", "-m", "musterd.supervisor.alerts.courier")  # -P: cwd is not first
COURIERS_MAX = 4  # at a time: each takes some 50 MB with apprise
# For loading, and beyond the timeout that a courier applies itself.
SLACK_NS = 15_000_000_000
ANSWER_BYTES_MAX = 4096

Then = Callable[[Outcome], None]


class _Courier(Struct, eq=False):
    process: "subprocess.Popen[bytes]"
    pidfd: int
    deadline_ns: int
    then: Then
    overdue: bool = False


class Couriers:
    def __init__(self, selector: selectors.BaseSelector, host: str, pictures: str = "") -> None:
        """`pictures` is the folder of those that go with messages; "": none do."""
        self._selector = selector
        self._host = host
        self._pictures = pictures
        self._out: list[_Courier] = []
        self._waiting: list[tuple[Message, Destination, Then]] = []  # at most one of each rule

    @property
    def busy(self) -> bool:
        return bool(self._out or self._waiting)

    def send(self, now_ns: int, message: Message, destination: Destination, then: Then) -> None:
        self._waiting.append((message, destination, then))
        self._start(now_ns)

    def _start(self, now_ns: int) -> None:
        while self._waiting and len(self._out) < COURIERS_MAX:
            message, destination, then = self._waiting.pop(0)
            try:
                self._out.append(self._make(now_ns, message, destination, then))
            except OSError as error:
                then(Outcome(f"no courier can be started: {error.strerror}"))

    def _make(
        self, now_ns: int, message: Message, destination: Destination, then: Then
    ) -> _Courier:
        call = Delivery(destination, message, self._host, self._pictures)
        given = memory_file(msgspec.json.encode(call))  # not in arguments, which ps shows
        try:
            process = subprocess.Popen(
                [*COMMAND, str(os.getpid())],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # output of libraries may hold the secret
                process_group=0,
            )
        finally:
            os.close(given)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.communicate()
            raise
        deadline_ns = now_ns + destination.timeout_ns + SLACK_NS
        courier = _Courier(process, pidfd, deadline_ns, then)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._back(courier))
        return courier

    def _back(self, courier: _Courier) -> None:
        """Collect a courier that has ended."""
        self._selector.unregister(courier.pidfd)
        os.close(courier.pidfd)
        self._out.remove(courier)
        process = courier.process
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with process.stdout:
            said = process.stdout.read(ANSWER_BYTES_MAX) or b""
        code = process.wait()
        if courier.overdue:
            outcome = Outcome("it was killed: it took too long")
        else:
            try:
                outcome = msgspec.json.decode(said, type=Outcome)
            except msgspec.DecodeError:
                outcome = Outcome(f"its courier ended with {code} and said nothing")
        courier.then(outcome)

    def turn(self, now_ns: int) -> None:
        """Kill couriers that are overdue, and start waiting ones."""
        for courier in self._out:
            if now_ns >= courier.deadline_ns and not courier.overdue:
                courier.overdue = True
                self._kill(courier)
        self._start(now_ns)

    def next_deadline(self) -> int | None:
        return min((each.deadline_ns for each in self._out if not each.overdue), default=None)

    def _kill(self, courier: _Courier) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(courier.pidfd, signal.SIGKILL)

    def close(self) -> None:
        for courier in list(self._out):
            self._kill(courier)
            courier.process.wait()
            self._selector.unregister(courier.pidfd)
            os.close(courier.pidfd)
            if courier.process.stdout is not None:
                courier.process.stdout.close()
        self._out = []
