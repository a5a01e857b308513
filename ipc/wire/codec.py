"""Encode and decode messages: one typed decoder per direction, one error for bad input."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.debugger_messages import DebuggerCommand, DebuggerMessage
from musterd.ipc.wire.messages import (
    MESSAGE_BYTES_MAX,
    NESTING_MAX,
    ClientMessage,
    CommandMessage,
    ServerMessage,
    WorkerMessage,
)
from musterd.ipc.wire.schedule_messages import ScheduleMessage, ScheduleReply

PATH_DEPTH_MAX = 16  # how far into a value its faulty part is looked for; a cycle has no end

encode = msgspec.msgpack.Encoder().encode

# The bytes that a map or an array of msgpack may begin with: short, of 16 and of 32 bits.
_BEGINNINGS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])

_client = msgspec.msgpack.Decoder(ClientMessage | ScheduleMessage)
_server = msgspec.msgpack.Decoder(ServerMessage | ScheduleReply)
_worker = msgspec.msgpack.Decoder(WorkerMessage | DebuggerMessage)
_command = msgspec.msgpack.Decoder(CommandMessage | DebuggerCommand)


def checked(decoder: msgspec.msgpack.Decoder[Any], frame: bytes | bytearray) -> Any:
    if len(frame) > MESSAGE_BYTES_MAX:
        raise ProtocolError(
            f"a message of {len(frame)} bytes is over the limit of {MESSAGE_BYTES_MAX}"
        )
    try:
        return decoder.decode(frame)
    except RecursionError as error:  # Python's own message differs between versions
        raise ProtocolError(
            f"malformed message of {len(frame)} bytes: nested too deeply"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message of {len(frame)} bytes: {error}") from error


def nests_too_deeply(data: bytes) -> bool:
    """Say whether a msgpack value is nested deeper than NESTING_MAX."""
    if len(data) - len(data.translate(None, _BEGINNINGS)) <= NESTING_MAX:
        return False  # so few maps and arrays, as nearly all that is sent has, cannot be deeper
    level: list[list[Any] | dict[Any, Any]]
    try:
        level = [[msgspec.msgpack.decode(data)]]
    except RecursionError:
        return True
    except msgspec.DecodeError:  # for other reasons, such as a map as the key of a map
        return False
    for _ in range(NESTING_MAX + 1):
        level = [
            part
            for each in level
            for part in (each.values() if type(each) is dict else each)
            if type(part) is list or type(part) is dict
        ]
        if not level:
            return False
    return True


def find_fault(
    encode: Callable[[Any], bytes],
    path: str,
    value: Any,
    parts: Callable[[str, Any], Iterable[tuple[str, Any]]],
) -> tuple[str, Any, str]:
    """Return where in a value that cannot be encoded the fault lies, the faulty part, and why.

    `parts` yields the path and the value of each part of a container.
    """
    reason = ""
    for _ in range(PATH_DEPTH_MAX):
        for place, part in parts(path, value):
            try:
                encode(part)
            except Exception as error:  # noqa: BLE001 - whatever a property of a user's class raises
                path, value, reason = place, part, str(error)
                break
        else:
            break
    return path, value, reason


def decode_client(frame: bytes | bytearray) -> ClientMessage | ScheduleMessage:
    """Decode a message that a client sent."""
    return checked(_client, frame)  # type: ignore[no-any-return]


def decode_server(frame: bytes | bytearray) -> ServerMessage | ScheduleReply:
    """Decode a message that the supervisor sent to a client."""
    return checked(_server, frame)  # type: ignore[no-any-return]


def decode_worker(frame: bytes | bytearray) -> WorkerMessage | DebuggerMessage:
    """Decode a message that a worker sent."""
    return checked(_worker, frame)  # type: ignore[no-any-return]


def decode_command(frame: bytes | bytearray) -> CommandMessage | DebuggerCommand:
    """Decode a message that the supervisor sent to a worker."""
    return checked(_command, frame)  # type: ignore[no-any-return]
