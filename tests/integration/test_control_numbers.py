"""Every parameter of every method gets numbers that are too large, too long or no numbers."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from musterd.supervisor.api import rpc
from support.daemon import Jobs

# The other parameters that a method needs.
PLAUSIBLE: dict[str, Any] = {
    "names": ["jobs"],
    "pool": "jobs",
    "name": "jobs.echo",
    "id": "some-id",
    "ids": ["some-id"],
    "size": 1,
    "signal": "CONT",
    "target": "site.example",
    "command": "reset",
    "token": "x",
    "line": "p 1",
    "status": {},
    "keys": {"task": "jobs.echo", "every": "1h"},
    "schedules": [{"name": "some", "keys": {"task": "jobs.echo", "every": "1h"}}],
}
ENDING = ("shutdown",)
DIGITS = "9" * 5000
NUMBERS = [
    *(b"9" * 19, b"9" * 20, b"-" + b"9" * 20, DIGITS.encode(), b"-" + DIGITS.encode()),
    *(b"1e308", b"1e309", b"-1e400", b"1e-400", b"0.0", b"-0", b"-1", b"1e10000000", b"NaN"),
    *(b"0." + b"1" * 5000, b"18446744073709551616", b"9223372036854775808", b"true", b"null"),
    *(b'"00091234567890123"', b'"' + DIGITS.encode() + b'"', b'"0009"', b'"1e309"', b'"-1"'),
    *(b'""', b'"\\u0000"', b'"\\ud800"', '"٩"'.encode(), b"[" + DIGITS.encode() + b"]"),
    *(b'{"a": ' + DIGITS.encode() + b"}", b'{"a": 18446744073709551616}', b'{"a": 1e308}'),
    *(b'["00091234567890123"]', b"[[]]", b"[null]", b"{}", b"[]"),
]


def cases() -> Iterator[tuple[str, str]]:
    for method, kind in rpc.METHODS.items():
        if method not in ENDING:
            for field in msgspec.structs.fields(kind):
                yield method, field.name


def test_no_number_in_any_parameter_is_an_internal_error(jobs: Jobs) -> None:
    daemon = jobs()
    for method, tried in cases():
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(daemon.control_socket)
            caller.settimeout(30)
            for number in NUMBERS:
                fields = msgspec.structs.fields(rpc.METHODS[method])
                given = {
                    field.name: json.dumps(PLAUSIBLE[field.name]).encode()
                    for field in fields
                    if field.required
                }
                if any(field.name == "no_block" for field in fields):
                    given["no_block"] = b"true"
                given[tried] = number
                inside = b", ".join(b'"%s": %s' % (k.encode(), v) for k, v in given.items())
                caller.sendall(
                    b'{"jsonrpc": "2.0", "id": 1, "method": "%s", "params": {%s}}\n'
                    % (method.encode(), inside)
                )
                answer = _answer(caller)
                what = f"{method} {tried}={number[:40]!r}: {answer}"
                code = answer.get("error", {}).get("code")
                assert code != rpc.INTERNAL_ERROR, what
                if "result" in answer and method in ("events", "tail"):
                    break  # the connection is a stream from now on
    assert "Traceback" not in daemon.log()
    assert daemon.status().state in ("running", "degraded", "draining")


def _answer(caller: socket.socket) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        received = caller.recv(1 << 20)
        assert received, "the daemon closed the connection"
        line += received
    answer: dict[str, Any] = json.loads(line.splitlines()[0])
    return answer


@pytest.mark.parametrize("given", ["00091234567890123", "9" * 5000])
def test_signal_with_a_number_that_is_none_is_told(jobs: Jobs, given: str) -> None:
    daemon = jobs()
    done = daemon.ctl("signal", given, "jobs")
    assert done.returncode == 2
    assert "no signal" in done.stderr
    assert "internal" not in done.stderr + daemon.log()
