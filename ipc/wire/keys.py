"""The key of a task that was given none: made of what it does, so that the same is the same."""

from hashlib import blake2b

KEY_LENGTH_MAX = 200  # of messages.Key
_DIGEST_BYTES = 16  # two different sets of arguments meet by chance less often than disks fail


def derived_key(name: str, args: bytes) -> str:
    """`POOL.METHOD:HASH`: the prefix `POOL.METHOD:` means all of one task."""
    digest = blake2b(args, digest_size=_DIGEST_BYTES).hexdigest()
    return f"{name[: KEY_LENGTH_MAX - len(digest) - 1]}:{digest}"
