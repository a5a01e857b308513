"""Write to standard output and standard error, whose readers may go away at any time."""

import os
import sys

import msgspec

from musterd.supervisor.text.fitting import wrapped
from musterd.supervisor.text.printable import printable, printable_json


def prepare_output() -> None:
    """Escape what the terminal's encoding cannot show, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def emit(text: str) -> bool:
    """Write a line to standard output and flush it; return False if its reader has gone.

    A reader that leaves early changes neither what the command did nor its exit code.
    """
    if sys.stdout is None:
        return False
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes again when it ends: give it somewhere to flush to.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return False
    return True


def emit_json(encoded: bytes | msgspec.Raw) -> bool:
    """Write JSON to standard output, indented."""
    return emit(printable_json(msgspec.json.format(bytes(encoded), indent=2).decode()))


def warn(message: str) -> None:
    """Write `musterctl: message` to standard error."""
    if sys.stderr is None:
        return
    lines = f"musterctl: {printable(message, keep=chr(10))}".split("\n")
    try:
        if sys.stderr.isatty():
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            lines = [part for line in lines for part in wrapped(line, columns)]
    except OSError:
        pass  # it has no size
    try:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
    except BrokenPipeError:
        return  # nobody reads it
