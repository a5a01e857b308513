"""The site a task is about, read from its arguments where @task(target="url") says which one.

This is the only look the supervisor ever takes into arguments: one named text, nothing is built
from the rest, and nothing is changed.
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from musterd.ipc.messages import TaskDeclaration, TaskSpec

TARGET_LENGTH_MAX = 253  # of a host name; a longer text is cut


class Targets:
    def __init__(self) -> None:
        self._decoders: dict[str, msgspec.msgpack.Decoder[Struct]] = {}

    def declare(self, pool: str, declarations: Iterable[TaskDeclaration]) -> None:
        """These are the tasks of a pool; what was known of it before is forgotten."""
        others = {name: each for name, each in self._decoders.items() if _pool(name) != pool}
        self._decoders = others
        for declared in declarations:
            if declared.target:
                arguments = msgspec.defstruct(
                    "Arguments", [("text", str)], rename={"text": declared.target}
                )
                self._decoders[f"{pool}.{declared.method}"] = msgspec.msgpack.Decoder(arguments)

    def fill_in(self, specs: list[TaskSpec]) -> list[TaskSpec]:
        """The same tasks; those that came without a target and declare where it is, with it."""
        if not self._decoders:
            return specs
        return [
            spec if spec.target or spec.name not in self._decoders else self._with(spec)
            for spec in specs
        ]

    def _with(self, spec: TaskSpec) -> TaskSpec:
        try:
            arguments = self._decoders[spec.name].decode(spec.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return spec  # the worker will say what is wrong with them
        return structs.replace(spec, target=site_of(arguments.text))  # type: ignore[attr-defined]


def site_of(text: str) -> str:
    """The host (with its port) of a URL; any other text as it is."""
    if "://" not in text:
        return text[:TARGET_LENGTH_MAX]
    try:
        netloc = urlsplit(text).netloc
    except ValueError:
        return ""
    return netloc.rpartition("@")[2].lower()[:TARGET_LENGTH_MAX]


def _pool(name: str) -> str:
    return name.partition(".")[0]
