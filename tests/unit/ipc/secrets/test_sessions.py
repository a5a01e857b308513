"""Sealed sessions: nobody reads or changes them without the key, and nobody mistakes one."""

import sys

import msgspec
import pytest

from musterd.ipc.errors import SessionError
from musterd.ipc.secrets import sessions
from musterd.ipc.secrets.sessions import SessionAccess, Unreadable, key_of, read_head, seal, unseal

KEY = key_of("k" * 32)
PLAIN = b"sid=0123456789"


def sealed(name: str = "acme") -> bytes:
    return seal(KEY, name, PLAIN, login_ns=1, saved_ns=2, site="acme.example")


def test_what_is_sealed_is_opened_with_its_key_and_name() -> None:
    head = read_head(sealed())
    assert unseal(KEY, "acme", head) == PLAIN
    assert (head.login_wall_ns, head.saved_wall_ns, head.site) == (1, 2, "acme.example")
    assert PLAIN not in sealed()


def test_each_seal_differs() -> None:
    assert sealed() != sealed()


def test_another_key_is_told() -> None:
    with pytest.raises(Unreadable, match="another key"):
        unseal(key_of("other" * 8), "acme", read_head(sealed()))


def test_a_renamed_session_is_not_opened() -> None:
    with pytest.raises(Unreadable, match="belong to another session"):
        unseal(KEY, "shop", read_head(sealed()))


@pytest.mark.parametrize("field", ["login_wall_ns", "saved_wall_ns", "site", "nonce", "data"])
def test_whatever_is_changed_it_is_not_opened(field: str) -> None:
    head = read_head(sealed())
    value = getattr(head, field)
    other = value + 1 if isinstance(value, int) else value[:-1] + ("x" if field == "site" else b"x")
    changed = msgspec.structs.replace(head, **{field: other})
    with pytest.raises(Unreadable, match="changed"):
        unseal(KEY, "acme", changed)


@pytest.mark.parametrize("kept", [b"", b"\x00", b"\x97", b"\xc1", b"\x93\x01\x02\x03"])
def test_what_is_no_sealed_session_is_damaged(kept: bytes) -> None:
    with pytest.raises(Unreadable, match="damaged"):
        read_head(kept)


def test_another_format_is_told() -> None:
    later = msgspec.structs.replace(read_head(sealed()), format=2)
    with pytest.raises(Unreadable, match="not of this version"):
        read_head(sessions.encode(later))


def test_a_short_key_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="openssl rand"):
        key_of("short")


def test_the_key_is_in_no_repr() -> None:
    assert repr(KEY)[2:-1] not in repr(SessionAccess(key=KEY))


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(SessionError, match=r"pip install 'musterd\[sessions\]'"):
        sessions.check_library()
