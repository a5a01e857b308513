"""Name our commands by words that work when they are typed."""

import shlex
import shutil
import sys
from pathlib import Path

MODULES = {
    "musterctl": "musterd.supervisor.ctl",
    "musterd": "musterd.supervisor",
    "pytest": "pytest",
}


def typed(name: str, *arguments: str, cwd: Path | None = None) -> str:
    """Return a command line of one of MODULES as it can be typed.

    The plain name, if that is ours; else the path of ours, short if it lies below `cwd`.
    """
    path = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found is not None and path.exists() and Path(found).samefile(path):
        words = [name]
    elif path.exists():
        inside = cwd is not None and path.is_relative_to(cwd)
        words = [str(path.relative_to(cwd)) if inside and cwd is not None else str(path)]
    else:  # not installed: run from the source
        words = [sys.executable, "-m", MODULES[name]]
    return shlex.join([*words, *arguments])
