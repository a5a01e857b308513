"""Keys of tasks whose submit gives none. musterctl has no time for hashlib, which loads OpenSSL."""

from hashlib import blake2b

from musterd.ipc.wire.messages import KEY_LENGTH_MAX

KEY_DIGEST_BYTES = 16  # two sets of arguments collide less often than disks fail


def derived_key(name: str, args: bytes) -> str:
    """Return the key of a task without one, `POOL.METHOD:HASH`; equal arguments, equal key.

    The prefix `POOL.METHOD:` means all results of one task.
    """
    digest = blake2b(args, digest_size=KEY_DIGEST_BYTES).hexdigest()
    return f"{name[: KEY_LENGTH_MAX - len(digest) - 1]}:{digest}"
