"""Run a real ControlServer in a process, with the answers of a module of `support`.

    python answers_standin.py SOCKET support.long_names

The module has `answer(params)` and `EVENTS`. The program prints "ready" once it listens, and ends
at SIGTERM.
"""

import importlib
import select
import sys
import time
from pathlib import Path

from musterd.supervisor.api.rpc import Params
from musterd.supervisor.control.server import ControlServer
from musterd.supervisor.sockets.listen import Caller

sys.path.insert(0, str(Path(__file__).parents[1]))


class StandIn:
    def __init__(self, module: str) -> None:
        self.answers = importlib.import_module(module)

    def call(self, method: str, params: Params, caller: Caller) -> object:
        return self.answers.answer(params)


if __name__ == "__main__":
    stand_in = StandIn(sys.argv[2])
    server = ControlServer(sys.argv[1], "", stand_in)
    poller = select.poll()
    poller.register(server, select.POLLIN)
    for event in stand_in.answers.EVENTS:
        server.publish(event)
    print("ready", flush=True)
    while True:
        poller.poll(1000)
        server.serve(time.monotonic_ns())
