"""Prepare a process for users' code: import modules from source, quiet chatty libraries.

Python keeps compiled modules in `__pycache__` and trusts one whose source still has the same size
and modification time, in seconds. A module that is written twice within a second, or by a tool that
sets times (`rsync -t`, `tar`, an image's layers), would be imported as it was before: a reload
would silently deploy the old code. So a module outside of the libraries is compiled at each import
(7 ms for 1,000 lines) and never written to `__pycache__`. Libraries are installed by tools that
remove old compiled modules, and stay cached.

What was imported is noted, with a checksum (`sources`), so that `changed_since` can tell whether
the files are other ones by now. A worker that is installed as a library is noted too, with its
package.
"""

import contextlib
import importlib
import logging
import os
import site
import sys
import sysconfig
import time
import traceback
import zlib
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Annotated

from msgspec import Meta, Struct

OUR_CODE = Path(__file__).absolute().parents[1]

# At info some of these log every request, at debug every byte. Their warnings stay.
CHATTY = (
    *("PIL", "aiohttp", "asyncio", "boto3", "botocore", "chardet", "charset_normalizer"),
    *("filelock", "fontTools", "h2", "hpack", "httpcore", "httpx", "matplotlib", "playwright"),
    *("pyppeteer", "s3transfer", "selenium", "seleniumwire", "trafilatura", "urllib3"),
    *("websocket", "websockets"),
)

# Bytes of notes that are told: a fork server tells them in one message. Some five hundred modules.
SOURCES_BYTES_MAX = 64 * 1024
SOURCE_BYTES = 90  # of the rest of a note
PATH_CHARS_MAX = 4096  # PATH_MAX of Linux, in bytes
STAMP_CHARS_MAX = 100  # five numbers
# A file system's clock ticks every few milliseconds: a file that is as young as this may be written
# again without another time.
YOUNG_NS = 50_000_000


class Source(Struct, array_like=True, frozen=True):
    """A file of users' code, as it was imported."""

    path: Annotated[str, Meta(max_length=PATH_CHARS_MAX)]
    stamp: Annotated[str, Meta(max_length=STAMP_CHARS_MAX)]  # of its state; "" if that says nothing
    checksum: Annotated[int, Meta(ge=0, le=2**32 - 1)]


_noted: dict[str, Source] = {}  # what this process has imported, by path


def sources() -> tuple[Source, ...]:
    """Return the files that this process has imported, up to SOURCES_BYTES_MAX of them."""
    left, found = SOURCES_BYTES_MAX, []
    for source in _noted.values():
        try:
            left -= len(source.path.encode()) + SOURCE_BYTES
        except UnicodeEncodeError:  # its path is no text, and cannot be told
            continue
        if left < 0:
            break
        found.append(source)
    return tuple(found)


def changed_since(noted: Iterable[Source]) -> list[str]:
    """Return the paths of files whose content is not what was imported. This reads files."""
    return [source.path for source in noted if _is_changed(source)]


def _is_changed(source: Source) -> bool:
    try:
        stamp = _stamp(source.path)
        if stamp and stamp == source.stamp:
            return False
        return _checksum(Path(source.path).read_bytes()) != source.checksum
    except OSError:  # removed, or not for us to read any more
        return True


def _stamp(path: str) -> str:
    found = os.stat(path)
    if time.time_ns() - found.st_ctime_ns < YOUNG_NS:
        return ""
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def _checksum(data: bytes) -> int:
    return zlib.crc32(data)


def _note(path: str) -> bytes:
    """Note a file that is about to be imported, and return its content.

    Its state is looked at first: if it is written meanwhile, the checksum decides later.
    """
    stamp = _stamp(path)
    data = Path(path).read_bytes()
    _noted[path] = Source(path, stamp, _checksum(data))
    return data


class FromSource(SourceFileLoader):
    """Load a module without looking at its compiled form."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(_note(os.path.abspath(path)), path)
        return code


class _Finder(MetaPathFinder):
    """Find what the other finders find; users' modules get the FromSource loader."""

    def __init__(self, package: str) -> None:
        self._libraries = tuple(f"{place}{os.sep}" for place in _libraries())
        self._package = package  # of the worker, which may be installed among the libraries

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
            elif spec.name.partition(".")[0] == self._package:
                with contextlib.suppress(OSError):  # only the compiled module is there
                    _note(file)
        return spec


def _libraries() -> set[str]:
    """Return the folders of Python, installed packages and this program."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    return {*(sysconfig.get_path(name) for name in names), *packages, str(OUR_CODE)}


def make_importable(worker: str = "") -> None:
    """Make users' code importable in a process that does nothing but run it; `worker` is the dotted
    name of the worker class."""
    if os.getcwd() not in sys.path:  # where people keep the worker they wrote; last, so that
        sys.path.append(os.getcwd())  # nothing there hides a module of Python
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        package = worker.partition(":")[0].partition(".")[0]
        sys.meta_path.insert(
            0, _Finder("" if package == __package__.partition(".")[0] else package)
        )


# -- errors of users' code ------------------------------------------------------------------------


def error_place(error: BaseException, ours: frozenset[str] = frozenset()) -> str:
    """Return "FILE:LINE" of the innermost line of users' code that an error has; `ours` are files
    that are none. "" if there is no such line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame) and frame.filename not in ours:
            return f"{frame.filename}:{frame.lineno}"
    return ""


def users_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of what imports users' code."""
    told = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = told
    while each is not None:
        each.stack = traceback.StackSummary.from_list([f for f in each.stack if _is_users(f)])
        each = each.__cause__ or each.__context__
    return "".join(told.format())


def _is_users(frame: traceback.FrameSummary) -> bool:
    machinery = frame.filename == importlib.__file__ or frame.filename.startswith("<frozen ")
    return not machinery and not frame.filename.startswith(f"{OUR_CODE}{os.sep}")


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
