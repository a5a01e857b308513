"""The lines of control.sock: requests, batches and answers, encoded and decoded (rpc.py)."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from musterd.supervisor.api.rpc import (
    ANSWER_BYTES_MAX,
    BATCH_MAX,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LIMIT_REACHED,
    METHOD_NOT_FOUND,
    METHOD_OF,
    METHODS,
    PARSE_ERROR,
    Params,
    RequestId,
    RpcError,
)


class Request(Struct, frozen=True):
    jsonrpc: Literal["2.0"]
    method: str
    params: Raw = Raw(b"{}")
    id: RequestId | UnsetType = UNSET  # unset: a notification, never answered


class ErrorBody(Struct, frozen=True):
    code: int
    message: str
    data: Any = None


class Answer(Struct, frozen=True):
    """An answer with `result` or `error`; a line without both is an event of a stream."""

    jsonrpc: str = ""
    id: RequestId = None
    result: Raw | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET


class _Result(Struct, frozen=True):
    id: RequestId
    result: Any
    jsonrpc: str = "2.0"


class _Error(Struct, frozen=True):
    id: RequestId
    error: ErrorBody
    jsonrpc: str = "2.0"


class _OnlyId(Struct, frozen=True):
    id: RequestId = None


_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(Request).decode
_decode_batch = msgspec.json.Decoder(list[Raw]).decode
_decode_answer = msgspec.json.Decoder(Answer).decode
_decode_id = msgspec.json.Decoder(_OnlyId).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_request(line: bytes) -> Request:
    """Return the request on this line; RpcError, with the id if readable, if there is none."""
    try:
        return _decode_request(line)
    except msgspec.ValidationError as error:
        raise RpcError(
            INVALID_REQUEST, f"not a JSON-RPC 2.0 request: {error}", request_id=_id_of(line)
        ) from error
    except _UNREADABLE as error:
        raise RpcError(PARSE_ERROR, f"not readable as JSON: {error}") from error


def decode_batch(line: bytes) -> list[bytes]:
    """Return the requests of a batch; RpcError if it is no list, empty or too long."""
    try:
        members = _decode_batch(line)
    except _UNREADABLE as error:
        raise RpcError(PARSE_ERROR, f"not readable as JSON: {error}") from error
    if not members:
        raise RpcError(INVALID_REQUEST, "a batch without a request: send at least one")
    if len(members) > BATCH_MAX:
        raise RpcError(
            LIMIT_REACHED, f"a batch of {len(members)} requests, over {BATCH_MAX}: send several"
        )
    return [bytes(member).strip() for member in members]


def _id_of(line: bytes) -> RequestId:
    try:
        return _decode_id(line).id
    except _UNREADABLE:
        return None


def decode_params(method: str, params: Raw) -> Params:
    """Return the typed parameters of a method; RpcError names what is wrong."""
    kind = METHODS.get(method)
    if kind is None:
        raise RpcError(METHOD_NOT_FOUND, f"no method {method[:100]!r}: one of {', '.join(METHODS)}")
    try:
        if bytes(params).startswith(b"["):
            params = _by_name(method, kind, _decode_batch(params))
        return msgspec.json.decode(params, type=kind)
    except _UNREADABLE as error:
        raise RpcError(INVALID_PARAMS, f"parameters of {method}: {error}") from error


def _by_name(method: str, kind: type[Params], values: list[Raw]) -> Raw:
    names = kind.__struct_encode_fields__
    if len(values) > len(names):
        raise RpcError(
            INVALID_PARAMS,
            f"parameters of {method}: {len(values)} are given, and it has "
            f"{', '.join(names) or 'none'}",
        )
    return Raw(_encode(dict(zip(names, values, strict=False))))


def encode_request(request_id: int, params: Params) -> bytes:
    """Return the line that calls the method of these parameters."""
    method = METHOD_OF[type(params)]
    line: bytes = _encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
    return line + b"\n"


def encode_result(request_id: RequestId, result: object) -> bytes:
    """Return the line that answers with `result`; RpcError if it would be too long."""
    line = _encode(_Result(request_id, result))
    if len(line) > ANSWER_BYTES_MAX:
        raise RpcError(
            LIMIT_REACHED,
            f"the answer has {len(line)} bytes, over the limit of {ANSWER_BYTES_MAX}: "
            "fetch it with musterd.Client, or ask for less",
        )
    return line + b"\n"


def join_answers(lines: list[bytes]) -> bytes:
    """Return the line that answers a batch."""
    return b"[" + b",".join(line.rstrip(b"\n") for line in lines) + b"]\n"


def encode_error(request_id: RequestId, error: RpcError) -> bytes:
    """Return the line that answers with `error`."""
    return _encode(_Error(request_id, ErrorBody(error.code, error.message, error.data))) + b"\n"


def decode_answer(line: bytes) -> Answer:
    """Return an answer, or an event without result and error; RpcError if it is not JSON."""
    try:
        return _decode_answer(line)
    except _UNREADABLE as error:
        raise RpcError(PARSE_ERROR, f"the daemon's answer is not readable: {error}") from error
