"""Messages by which a client finds the tasks of a function, for typed calls."""

from typing import Annotated

from msgspec import Meta, Struct

NAMES_SHOWN_MAX = 100  # in each list of an answer

# Where a function is defined, "module:qualified.name" (ipc/signatures.py).
Place = Annotated[str, Meta(max_length=500)]


class Resolve(Struct, array_like=True, tag="resolve", frozen=True):
    """Ask which tasks run a function; answered by Resolved with the same request number."""

    request: Annotated[int, Meta(ge=0, le=2**62)]
    place: Place


class Resolved(Struct, array_like=True, tag="resolved", frozen=True):
    """Tasks that run a function, as far as pools have loaded their workers."""

    request: int
    tasks: list[str] = []  # "pool.method"
    loading: list[str] = []  # pools that may turn out to have more
    failed: list[str] = []  # pools whose worker cannot be loaded
    pools: list[str] = []  # all of them
    error: str = ""  # why the cluster could not be asked
