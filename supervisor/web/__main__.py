"""Entry point of the web process, started by the daemon (processes/sidecars.py)."""

import os
import signal
import sys
from pathlib import Path

import msgspec

from musterd.supervisor.settings.sidecars import WebSettings
from musterd.supervisor.system.linux import die_with_parent

OOM_SCORE = 500  # when memory runs out, the kernel kills this process before any worker


def main(arguments: list[str]) -> int:
    parent, beat_fd = (int(each) for each in arguments)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the daemon has already ended
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=WebSettings)
    Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    from musterd.supervisor.web.server import run

    return run(settings, beat_fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
