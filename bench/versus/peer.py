"""What a system must be able to do to be measured, and the loop that serves the benchmark.

Each peer is a program of its own, run by the interpreter of its own virtual environment. Requests
come as lines of JSON on standard input, {"do": "throughput", "seconds": 3}; each is answered by one
line on standard output, {"ok": ...} or {"error": "..."}. Only the standard library is used here.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measures
import tasks

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent  # of the peer's virtual environment, not of the system's
FOLDER = Path(os.environ["BENCH_FOLDER"])  # for files of its own, on a disk
REDIS = os.environ.get("BENCH_REDIS", "")  # the URL of a server that nobody else uses
# For clients that wait for results: redis-py gives up on a blocking command after 5 s.
PATIENT_REDIS = f"{REDIS}?socket_timeout=200"
STOP_SECONDS = 10.0


class Peer:
    """A system with its client: started, given tasks, stopped."""

    in_process = False  # True: its main process is this one, and with it everything ends
    queues_alone = True  # tasks can be queued while no worker runs
    priorities = True
    version = ""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, workers: int) -> None:
        """Start everything but the broker."""
        raise NotImplementedError

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        """A handle of the task, which is then acknowledged."""
        raise NotImplementedError

    def result(self, handle: Any, seconds: float) -> Any:
        """What the task returned. TimeoutError if that takes longer, else the error it ended in."""
        raise NotImplementedError

    def submit_all(self, name: str, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The fastest documented way to submit many."""
        return [self.submit(name, *arguments) for arguments in each]

    def run_all(self, count: int) -> int:
        """Submit so many `echo`, and wait for all results: how many were right."""
        handles = self.submit_all("echo", [(tasks.ARGUMENT,)] * count)
        results = (self.result(handle, measures.ANSWER_SECONDS) for handle in handles)
        return sum(result == tasks.ARGUMENT for result in results)

    def worker_pid(self, told: int) -> int:
        """The pid by which the benchmark can kill the worker that told its own."""
        return told

    def mains(self) -> list[int]:
        """The processes to be killed in place of a supervisor that crashes."""
        return [process.pid for process in self.processes]

    def renew(self) -> None:
        """Make the pool anew that broke as a whole; most do not."""

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()

    def spawn(self, *command: str) -> None:
        """One of its programs, such as its worker; its output goes into a file."""
        with (FOLDER / "workers.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [str(BIN / command[0]), *command[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=FOLDER,
                    env={**os.environ, "PYTHONPATH": str(HERE)},
                )
            )


def serve(peer: Peer) -> None:
    """Answer requests until standard input ends, then stop."""
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"ok": _do(peer, **request)}
            except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark is told
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        peer.stop()


def _do(peer: Peer, do: str, **arguments: Any) -> Any:
    match do:
        case "hello":
            return {
                "version": peer.version,
                "in_process": peer.in_process,
                "priorities": peer.priorities,
            }
        case "start":
            return peer.start(**arguments)
        case "mains":
            return peer.mains()
        case "stop":
            return peer.stop()
    return getattr(measures, do)(peer, **arguments)
