"""Kinds of parameters that methods of control.sock share."""

from typing import Annotated, Literal

from msgspec import Meta

from musterd.ipc.wire.messages import Id, Name

NAMES_MAX = 1000  # names or ids in one request
SECONDS_MAX = 10 * 365 * 86400.0  # ten years; a longer timeout is a mistake in the unit

Names = Annotated[list[Name], Meta(max_length=NAMES_MAX)]
SomeNames = Annotated[list[Name], Meta(min_length=1, max_length=NAMES_MAX)]
SomeIds = Annotated[list[Id], Meta(max_length=NAMES_MAX)]
Cursor = Annotated[str, Meta(max_length=40, pattern="^([a-z]+:[0-9]{1,19})?$")]
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
TaskState = Literal["queued", "waiting", "running", "succeeded", "failed", "cancelled", "expired"]
