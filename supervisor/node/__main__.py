"""Entry point of the cluster sidecar: see process.py."""

import os
import signal
import sys

import msgspec

from musterd.supervisor.settings.node import NodeSettings
from musterd.supervisor.system.linux import die_with_parent

EXIT_CONFIGURATION = 78


def main(arguments: list[str]) -> int:
    parent, beat_fd = map(int, arguments)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the daemon has already ended
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=NodeSettings)
    try:
        from musterd.supervisor.node.process import run
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        why = f"{error.name} is not installed" if missing else f"psycopg does not work: {error}"
        print(f"{why}: pip install 'musterd[cluster]'", file=sys.stderr)
        return EXIT_CONFIGURATION
    return run(settings, beat_fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
