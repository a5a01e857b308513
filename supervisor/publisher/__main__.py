"""Entry point of the publisher: see process.py."""

import os
import signal
import sys
from pathlib import Path

import msgspec

from musterd.supervisor.settings.sidecars import PublisherSettings
from musterd.supervisor.system.linux import die_with_parent

OOM_SCORE = 500  # when memory runs out, the kernel kills this process before any worker
EXIT_CONFIGURATION = 78


def main(arguments: list[str]) -> int:
    parent, beat_fd = map(int, arguments)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the daemon has already ended
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=PublisherSettings)
    Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    try:
        from musterd.supervisor.publisher.process import run
    except ImportError as error:
        print(f"{error.name} is not installed: pip install pyzmq", file=sys.stderr, flush=True)
        return EXIT_CONFIGURATION
    return run(settings, beat_fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
