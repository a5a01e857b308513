"""A pool's `options`, read by the built-in workers."""

from typing import Any, TypeVar

import msgspec

from musterd.ipc.errors import ConfigurationError
from musterd.workers.pages.addresses import AddressRules

T = TypeVar("T")


def read_options(options: dict[str, Any], kind: type[T]) -> T:
    """The options as a struct of this kind; ConfigurationError names the one that is wrong."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"options: {error}") from None


def read_rules(allow: list[str], deny: list[str]) -> AddressRules:
    """The rules of `allow` and `deny`; ConfigurationError names the entry that is wrong."""
    try:
        return AddressRules(allow, deny)
    except ValueError as error:
        raise ConfigurationError(f"options: {error}") from None
