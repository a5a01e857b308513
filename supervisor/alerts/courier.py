"""Deliver one message in a process of its own, and report the outcome.

    python -m musterd.supervisor.alerts.courier PARENT    a Delivery on standard input, as JSON

Standard output gets one JSON line: {"error": ""}, or why delivery failed, without secrets. Each
message has its own process, because apprise takes 40 MB and half a second to load, and because a
delivery that hangs can be killed. A command that exceeds its timeout is killed with all its
processes.
"""

import contextlib
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec import Struct, structs

from musterd.ipc.secrets.forms import Written, scrub
from musterd.ipc.secrets.lookup import MissingSecret, find_secret, read_secret
from musterd.supervisor.alerts.pictures import pictures_of
from musterd.supervisor.alerts.rules import Message
from musterd.supervisor.alerts.settings import Destination
from musterd.supervisor.alerts.wording import AGAIN, Room, Text, as_data, severity, texts
from musterd.supervisor.processes.handles import follow_output, how_it_ended
from musterd.supervisor.system.linux import (
    become_subreaper,
    descendants,
    die_with_parent,
    family,
    memory_file,
)

NO_APPRISE = "apprise is not installed: install musterd[alerts]"
ERROR_CHARS_MAX = 300
SAID_BYTES_MAX = 2000  # the end of a command's output
KILL_SECONDS = 5.0  # until processes that survive SIGKILL are ignored
# Shorter parts of a URL could be words of any message.
PART_CHARS_MIN = 6
_PARTS = re.compile(r"[/:@?&=,]+")


class Delivery(Struct, frozen=True):
    destination: Destination
    message: Message
    host: str
    pictures: str = ""  # folder; "": none are kept


class Undelivered(Exception):
    """Why delivery failed; may still hold a secret."""

    def __init__(self, why: str, arrived: int = 0) -> None:
        super().__init__(why)
        self.arrived = arrived


class Outcome(Struct, frozen=True):
    error: str = ""
    arrived: int = 0  # lines of the message that were delivered before the error


def url_of(destination: Destination) -> str:
    """Return the URL; Undelivered if it cannot be found."""
    try:
        if destination.url_file:
            value = read_secret(Path(destination.url_file).name, Path(destination.url_file))
            if not value:
                raise Undelivered(f"url_file {destination.url_file} is missing or empty")
        elif destination.url_secret:
            value = find_secret(destination.url_secret)
        else:
            value = destination.url
    except MissingSecret as error:
        raise Undelivered(str(error)) from None
    value = value.strip()
    if "\n" in value:
        raise Undelivered(f"{destination.shown} holds more than one line: give one URL")
    return value


def problem_of(destination: Destination) -> str:
    """Return why nothing can be delivered there, as far as that is seen from here; "" if nothing
    is."""
    if destination.command:
        return ""
    if importlib.util.find_spec("apprise") is None:
        return NO_APPRISE
    try:
        url_of(destination)
    except Undelivered as error:
        return str(error)
    return ""


def without_secrets(text: str, url: str) -> str:
    """Remove the URL and all its parts, except its scheme, from a text."""
    _, _, rest = url.partition("://")
    parts = [url, rest, *_PARTS.split(rest)]
    parts += [unquote(part) for part in parts]
    longest = sorted({part for part in parts if len(part) >= PART_CHARS_MIN}, key=len)[::-1]
    return scrub(text, [(Written(part), b"***") for part in longest])


# -- through apprise --------------------------------------------------------------------------


def notify(url: str, call: Delivery) -> None:
    """Send the message through apprise; Undelivered if the service refuses it."""
    try:
        import apprise
        from apprise.attachment.memory import AttachMemory
        from apprise.plugins.custom_json import NotifyJSON
    except ImportError:
        raise Undelivered(NO_APPRISE) from None
    capture = apprise.LogCapture(  # type: ignore[no-untyped-call,unused-ignore]
        level=logging.WARNING, fmt="%(message)s"
    )
    with capture as said:
        services = apprise.Apprise()
        if not services.add(url):
            scheme = url.partition("://")[0]
            raise Undelivered(f"apprise cannot use the URL of scheme {scheme[:20]!r}: check it")
        service: Any = services[0]
        if isinstance(service, NotifyJSON) and not call.message.test:
            data = as_data(call.message, call.host, call.destination)
            service.payload_extras["musterd"] = data
        room = Room(max(0, service.title_maxlen), service.body_maxlen)
        takes_files = getattr(service, "attachment_support", False)
        pictures = [
            AttachMemory(  # type: ignore[no-untyped-call,unused-ignore]
                content=each.data, name=each.name, mimetype="image/png"
            )
            for each in (pictures_of(call.pictures, call.message) if takes_files else ())
        ]

        def send(text: Text, files: list[Any]) -> bool:
            taken = services.notify(
                body=text.body,
                title=text.title,
                notify_type=apprise.NotifyType(severity(call.message)),
                body_format=apprise.NotifyFormat.TEXT,
                attach=apprise.AppriseAttachment(files) if files else None,
            )
            return bool(taken)

        arrived = 0
        for text in texts(call.message, call.host, call.destination, room):
            taken = send(text, pictures)
            if not taken and pictures:
                # It may be the pictures that are refused, and the text may have arrived.
                taken = send(structs.replace(text, title=text.title + AGAIN), [])
            pictures = []  # they go with the first part
            if not taken:
                lines = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
                raise Undelivered("; ".join(lines) or "the service refused it", arrived)
            arrived += text.lines


# -- through a command ------------------------------------------------------------------------


def run(call: Delivery) -> None:
    """Run the command; Undelivered unless it exits with 0 in time."""
    seconds = call.destination.timeout_ns / 1e9
    paths = {each.task: each.path for each in pictures_of(call.pictures, call.message)}
    data = as_data(call.message, call.host, call.destination, paths)
    given = memory_file(msgspec.json.encode(data) + b"\n")
    become_subreaper()  # all its processes stay below us
    try:
        process = subprocess.Popen(
            call.destination.command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise Undelivered(f"cannot start the command: {error.strerror}") from None
    finally:
        os.close(given)
    said = b""

    def keep(data: bytes) -> None:
        nonlocal said
        said = (said + data)[-SAID_BYTES_MAX:]

    ended = follow_output(process, seconds, keep)
    code = process.wait() if ended else None
    kill_all()
    if process.stdout is not None:
        process.stdout.close()
    words = said.decode(errors="replace").strip()[-ERROR_CHARS_MAX:]
    if not ended:
        raise Undelivered(f"the command was killed after its timeout of {seconds:g} s")
    if code:
        raise Undelivered(f"the command {how_it_ended(code)}" + (f": {words}" if words else ""))


def kill_all() -> None:
    """Kill all processes below this one."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        found = descendants(os.getpid(), family())
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


# -- the process ------------------------------------------------------------------------------


def deliver(call: Delivery) -> Outcome:
    url = ""
    try:
        if call.destination.command:
            run(call)
        else:
            url = url_of(call.destination)
            notify(url, call)
    except Undelivered as error:
        text = " ".join(str(error).split())
        hidden = without_secrets(text, url) if url else text
        return Outcome(hidden[:ERROR_CHARS_MAX], error.arrived)
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything: report it
        text = f"{type(error).__name__}: {error}"
        return Outcome(without_secrets(text, url)[:ERROR_CHARS_MAX])
    return Outcome()


def main(arguments: list[str]) -> int:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(arguments[0]):
        return 1
    answers = os.dup(1)
    os.dup2(2, 1)  # output of libraries is not our answer
    call = msgspec.json.decode(sys.stdin.buffer.read(), type=Delivery)
    os.write(answers, msgspec.json.encode(deliver(call)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
