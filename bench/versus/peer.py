"""Define what a system must do to be measured, and serve the requests of the benchmark.

Each peer is a program that runs in its own virtual environment. Requests come as lines of JSON on
standard input, {"do": "throughput", "seconds": 3}; each is answered by one line on standard output,
{"ok": ...} or {"error": "..."}. This module uses the standard library only.
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
BIN = Path(sys.executable).parent  # of the peer's virtual environment
FOLDER = Path(os.environ["BENCH_FOLDER"])  # for its files, on a disk
REDIS = os.environ.get("BENCH_REDIS", "")  # the URL of a server for this peer alone
# For clients that wait for results: redis-py gives up a blocking command after 5 s.
PATIENT_REDIS = f"{REDIS}?socket_timeout=200"
STOP_SECONDS = 10.0


class Peer:
    """A system with its client: started, given tasks, stopped."""

    in_process = False  # True: its main process is this one, which ends with it
    queues_alone = True  # tasks can be queued before workers run
    priorities = True
    version = ""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, workers: int) -> None:
        """Start everything but the broker."""
        raise NotImplementedError

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        """Submit a task; return its handle once it is acknowledged."""
        raise NotImplementedError

    def result(self, handle: Any, seconds: float) -> Any:
        """Return the task's result; raise TimeoutError if it takes longer, else its error."""
        raise NotImplementedError

    def submit_all(self, name: str, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Submit many tasks in the fastest documented way."""
        return [self.submit(name, *arguments) for arguments in each]

    def run_all(self, count: int) -> int:
        """Submit `count` echo tasks and wait for them; return how many results were right."""
        handles = self.submit_all("echo", [(tasks.ARGUMENT,)] * count)
        results = (self.result(handle, measures.ANSWER_SECONDS) for handle in handles)
        return sum(result == tasks.ARGUMENT for result in results)

    def worker_pid(self, told: int) -> int:
        """Return the pid by which the benchmark can kill the worker that reported this one."""
        return told

    def mains(self) -> list[int]:
        """Return the processes whose kill stands for a crash of the supervisor."""
        return [process.pid for process in self.processes]

    def renew(self) -> None:
        """Replace a pool that broke as a whole; most do not break."""

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
        """Start one of its programs, such as its worker, with its output in a file."""
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
    # Output of a library must not get between the answers.
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
