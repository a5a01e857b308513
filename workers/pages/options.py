"""`options` of a pool, as the built-in workers read them."""

from typing import Any, TypeVar

import msgspec

from musterd.ipc.errors import ConfigurationError
from musterd.workers.pages.addresses import AddressRules

T = TypeVar("T")


def read_options(options: dict[str, Any], kind: type[T]) -> T:
    """Return the options as a struct of this kind; ConfigurationError names a wrong one."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"options: {error}") from None


def read_rules(allow: list[str], deny: list[str]) -> AddressRules:
    """Return the rules of `allow` and `deny`; ConfigurationError names a wrong entry."""
    try:
        return AddressRules(allow, deny)
    except ValueError as error:
        raise ConfigurationError(f"options: {error}") from None
