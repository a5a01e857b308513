"""Entry point of the alerts process: see process.py."""

import sys

import msgspec
from setproctitle import setproctitle

from musterd.supervisor.alerts.process import AlertProcess
from musterd.supervisor.alerts.settings import AlertSettings


def main(arguments: list[str]) -> int:
    parent, beat_fd = map(int, arguments)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=AlertSettings)
    setproctitle("musterd: alerts")
    AlertProcess(settings, parent, beat_fd).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
