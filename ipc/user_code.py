"""Prepare a process for users' code: import modules from source, quiet chatty libraries.

Python keeps compiled modules in `__pycache__` and trusts one whose source still has the same size
and modification time, in seconds. A module that is written twice within a second, or by a tool that
sets times (`rsync -t`, `tar`, an image's layers), would be imported as it was before: a reload
would silently deploy the old code. So a module outside of the libraries is compiled at each import
(7 ms for 1,000 lines) and never written to `__pycache__`. Libraries are installed by tools that
remove old compiled modules, and stay cached.
"""

import logging
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

OUR_CODE = Path(__file__).absolute().parents[1]

# At info some of these log every request, at debug every byte. Their warnings stay.
CHATTY = (
    *("PIL", "aiohttp", "asyncio", "boto3", "botocore", "chardet", "charset_normalizer"),
    *("filelock", "fontTools", "h2", "hpack", "httpcore", "httpx", "matplotlib", "playwright"),
    *("pyppeteer", "s3transfer", "selenium", "seleniumwire", "trafilatura", "urllib3"),
    *("websocket", "websockets"),
)


class FromSource(SourceFileLoader):
    """Load a module without looking at its compiled form."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _Finder(MetaPathFinder):
    """Find what the other finders find; users' modules get the FromSource loader."""

    def __init__(self) -> None:
        self._libraries = tuple(f"{place}{os.sep}" for place in _libraries())

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return self._from_source(spec)
        return None

    def _from_source(self, spec: ModuleSpec) -> ModuleSpec:
        # Exactly this class: a foreign loader may do something else.
        if type(spec.loader) is SourceFileLoader:
            file = os.path.abspath(spec.loader.path)
            if not file.startswith(self._libraries):
                spec.loader = FromSource(spec.loader.name, spec.loader.path)
                spec.cached = None
        return spec


def _libraries() -> set[str]:
    """Return the folders of Python, installed packages and this program."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    return {*(sysconfig.get_path(name) for name in names), *packages, str(OUR_CODE)}


def make_importable() -> None:
    """Make users' code importable in a process that does nothing but run it."""
    if os.getcwd() not in sys.path:  # where people keep the worker they wrote; last, so that
        sys.path.append(os.getcwd())  # nothing there hides a module of Python
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def turn_down(level: str) -> None:
    """Let chatty libraries log warnings only, unless the level is "debug".

    A library whose level was set before keeps that level.
    """
    if level.lower() == "debug":
        return
    for name in CHATTY:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
