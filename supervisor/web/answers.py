"""JSON for whoever asks."""

import msgspec
from starlette.responses import Response

_encode = msgspec.json.Encoder().encode


def answer(status: int, value: object) -> Response:
    return Response(_encode(value) + b"\n", status, media_type="application/json")
