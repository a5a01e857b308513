"""Sessions: which of them the tasks of a pool may use, and the form in which they are kept.

A session is a named set of cookies and local storage. Workers encrypt it (AES-256-GCM) before they
hand it over to be kept; the supervisor and the store have the sealed form only. The key is told to
the workers of pools that may use a session, over the socket of their fork server: it is in no
environment, in no file of the store and in no message of a task.

The name of the session and what people are shown of it are authenticated: a sealed session that was
renamed or changed is not opened.
"""

import hashlib
import os
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from musterd.ipc.errors import SessionError

KEY_CHARS_MIN = 32  # of a key that people give: 32 random characters are more than enough
KEY_BYTES = 32
NONCE_BYTES = 12  # random: fit for 2**32 saves with one key
KEY_ID_BYTES = 8
FORMAT = 1
SITE_CHARS_MAX = 253
DAY_NS = 24 * 3600 * 1_000_000_000
KEEP_NS = 90 * DAY_NS
MISSING_LIBRARY = "sessions need the library cryptography: pip install 'musterd[sessions]'"


class SessionRule(Struct, array_like=True, frozen=True):
    """One session, as the configuration has it."""

    login: str = ""  # "module:function"
    args: bytes = b"\x80"  # msgpack of the function's arguments
    concurrent: int = 1
    logged_out: tuple[str, ...] = ()  # globs of addresses
    sites: tuple[str, ...] = ()  # hosts whose cookies and storage are kept; empty: all
    keep_ns: int = KEEP_NS
    login_task: str = ""  # "pool.method": a task logs in, which the supervisor runs


class SessionAccess(Struct, array_like=True, frozen=True):
    """What the workers of a pool are told."""

    rules: dict[str, SessionRule] = {}
    key: bytes = b""
    problem: str = ""  # why there is no key

    def __repr__(self) -> str:
        return f"SessionAccess({sorted(self.rules)})"  # never the key


class Sealed(Struct, array_like=True, frozen=True):
    """A session as it is kept. Everything but `data` can be read without the key."""

    format: int
    key_id: Annotated[bytes, Meta(max_length=KEY_ID_BYTES)]
    login_wall_ns: int  # when somebody has logged in last
    saved_wall_ns: int
    site: Annotated[str, Meta(max_length=SITE_CHARS_MAX)]  # of the task that saved it
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    data: bytes = b""


encode = msgspec.msgpack.Encoder().encode
decode_access = msgspec.msgpack.Decoder(SessionAccess).decode
_decode_sealed = msgspec.msgpack.Decoder(Sealed).decode


class Unreadable(SessionError):
    """A kept session cannot be opened: another key, or the data were changed."""


def key_of(text: str) -> bytes:
    """Return the key for what people give as one; ValueError if that is too short."""
    if len(text) < KEY_CHARS_MIN:
        raise ValueError(
            f"has {len(text)} characters: give at least {KEY_CHARS_MIN} random ones, such as the "
            "output of: openssl rand -base64 32"
        )
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, person=b"musterd-session").digest()


def seal(key: bytes, name: str, data: bytes, *, login_ns: int, saved_ns: int, site: str) -> bytes:
    """Return the data of a session, encrypted; SessionError without the library."""
    nonce = os.urandom(NONCE_BYTES)
    head = Sealed(FORMAT, _key_id(key), login_ns, saved_ns, site[:SITE_CHARS_MAX], nonce)
    sealed = _cipher(key).encrypt(nonce, data, _authenticated(name, head))
    return encode(msgspec.structs.replace(head, data=sealed))


def read_head(kept: bytes) -> Sealed:
    """Return a kept session; Unreadable if it is none."""
    try:
        sealed = _decode_sealed(kept)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unreadable("its data are damaged") from None
    if sealed.format != FORMAT:
        raise Unreadable(f"its format {sealed.format} is not of this version")
    return sealed


def unseal(key: bytes, name: str, sealed: Sealed) -> bytes:
    """Return the data of a session; Unreadable says why not."""
    from cryptography.exceptions import InvalidTag

    if sealed.key_id != _key_id(key):
        raise Unreadable("it was encrypted with another key")
    head = msgspec.structs.replace(sealed, data=b"")
    try:
        data: bytes = _cipher(key).decrypt(sealed.nonce, sealed.data, _authenticated(name, head))
    except InvalidTag:
        raise Unreadable("its data were changed, or belong to another session") from None
    return data


def check_library() -> None:
    """Raise SessionError without the library that encrypts."""
    _cipher(bytes(KEY_BYTES))


def _cipher(key: bytes) -> Any:
    try:  # an extra, imported where it is used
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise SessionError(MISSING_LIBRARY) from None
    return AESGCM(key)


def _key_id(key: bytes) -> bytes:
    digest = hashlib.blake2b(key, digest_size=KEY_ID_BYTES, person=b"musterd-key-id")
    return digest.digest()


def _authenticated(name: str, head: Sealed) -> bytes:
    return encode(("musterd session", name, head))
