"""`options` of a pool, as the built-in workers read them."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.secrets.proxy import PROXIES_MAX, entry_problem
from musterd.workers.pages.addresses import AddressRules

T = TypeVar("T")


def read_options(options: dict[str, Any], kind: type[T]) -> T:
    """Return the options as a struct of this kind; ConfigurationError names a wrong one."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"options: {error}") from None


def check_proxies(proxies: Sequence[str], proxy: str | None) -> None:
    """Raise ValueError for an entry that cannot be read; it says nothing of a login."""
    if proxies and proxy:
        raise ValueError("`proxy` and `proxies` are both given: leave one of them out")
    if len(proxies) > PROXIES_MAX:
        raise ValueError(f"`proxies` has more than {PROXIES_MAX} entries: shorten it")
    for number, entry in enumerate(proxies, 1):
        if problem := entry_problem(entry):
            raise ValueError(f"entry {number} of `proxies` {problem}")


def read_rules(allow: list[str], deny: list[str]) -> AddressRules:
    """Return the rules of `allow` and `deny`; ConfigurationError names a wrong entry."""
    try:
        return AddressRules(allow, deny)
    except ValueError as error:
        raise ConfigurationError(f"options: {error}") from None
