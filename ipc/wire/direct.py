"""What a program and its private gateway tell each other (ipc/client/direct.py).

    program ── Start, then one descriptor with each message ──► gateway
    program ◄── State, whenever it changes ──────────────────── gateway

Both hold one end of a SOCK_SEQPACKET pair: messages keep their borders. The URL crosses it and no
other border. A URL that people see is cut to host, port and name of the database.
"""

import re
from typing import Annotated, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct

from musterd.ipc.errors import ConfigurationError

SCHEMES = ("postgresql://", "postgres://")  # as libpq has them, in lower case
URL_CHARS_MAX = 8192
REASON_CHARS_MAX = 4000
MESSAGE_BYTES_MAX = 64 * 1024
HAND_OVER = b"c"  # comes with the descriptor of a new connection

ENCODE_HINT = (
    "write postgresql://USER:PASSWORD@HOST:PORT/NAME, with %2F for / and %40 for @ in a password"
)


class Start(Struct, array_like=True, frozen=True):
    """What a gateway is to do, and for whom."""

    url: Annotated[str, Meta(max_length=URL_CHARS_MAX)]
    waiter: Annotated[int, Meta(ge=1, le=2**62)]  # of this program, in all lives of its gateway
    program: Annotated[int, Meta(ge=1)]  # its process


class State(Struct, array_like=True, frozen=True):
    """How a gateway stands with the database."""

    state: Literal["away", "refused", "ready"]
    reason: Annotated[str, Meta(max_length=REASON_CHARS_MAX)] = ""
    pid: Annotated[int, Meta(ge=0)] = 0


encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_state = msgspec.msgpack.Decoder(State).decode


def is_url(text: object) -> bool:
    return isinstance(text, str) and text.startswith(SCHEMES)


def place(url: str) -> str:
    """Return where a database is, for people: host, port and name, never a user or password.

    ConfigurationError, which shows nothing of the URL, if it cannot be read without a doubt.
    """
    rest = url.partition("://")[2]
    match = re.fullmatch(r"([^/?#]*)(?:/([^?#]*))?(?:\?([^#]*))?", rest)
    given = re.fullmatch(r"([^@]*@)?([^@]*)", match[1]) if match else None
    unsure = match is not None and "@" in rest.removeprefix(match[1])  # part of a password?
    if match is None or given is None or unsure or len(url) > URL_CHARS_MAX:
        raise ConfigurationError(f"the URL of the cluster cannot be read: {ENCODE_HINT}")
    options = dict(parse_qsl(match[3] or ""))
    ports = re.findall(r":([^:,\]]*)(?=,|$)", given[2])
    if not all(re.fullmatch(r"[0-9]{0,5}", port) for port in ports):
        raise ConfigurationError(f"the port in the URL of the cluster is no number: {ENCODE_HINT}")
    hosts = given[2] or options.get("host", "") or "localhost"
    if not ports:
        hosts = f"{hosts}:{options.get('port', '5432')}"
    return f"{hosts}/{match[2] or options.get('dbname', '')}"
