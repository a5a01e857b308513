"""Complete submits by what @task declares: the site, and whether an earlier result will do.

The site is read from the argument that @task(target="url") names. Apart from redaction this is the
only place where the supervisor looks into arguments, and it changes none. For a site it decodes one
text. For a task that is cached and has no key it decodes all arguments and sorts them: equal
arguments make equal keys.
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from musterd.ipc.wire.keys import derived_key
from musterd.ipc.wire.messages import (
    AS_CONFIGURED,
    NEVER_NS,
    TaskDeclaration,
    TaskSpec,
)

TARGET_LENGTH_MAX = 253  # of a host name; a longer text is cut

# As the client does: both make one key of equal arguments (ipc/client/taskspec.py, key_of).
_encode_sorted = msgspec.msgpack.Encoder(order="deterministic").encode


class Declarations:
    def __init__(self) -> None:
        self._decoders: dict[str, msgspec.msgpack.Decoder[Struct]] = {}
        self._ages: dict[str, TaskDeclaration] = {}  # tasks that declare cache or debounce

    def declare(self, pool: str, declarations: Iterable[TaskDeclaration]) -> None:
        """Replace what is known of the tasks of a pool."""
        others = {name: each for name, each in self._decoders.items() if _pool(name) != pool}
        self._decoders = others
        self._ages = {name: each for name, each in self._ages.items() if _pool(name) != pool}
        for declared in declarations:
            if declared.cache_ns or declared.debounce_ns:
                self._ages[f"{pool}.{declared.method}"] = declared
            if declared.target:
                arguments = msgspec.defstruct(
                    "Arguments", [("text", str)], rename={"text": declared.target}
                )
                self._decoders[f"{pool}.{declared.method}"] = msgspec.msgpack.Decoder(arguments)

    def fill_in(self, specs: list[TaskSpec]) -> list[TaskSpec]:
        """Return the tasks, completed by what is declared about them."""
        if self._ages:
            ages = self._ages
            specs = [self._with_ages(spec) if spec.name in ages else spec for spec in specs]
        if not self._decoders:
            return specs
        return [
            spec if spec.target or spec.name not in self._decoders else self._with(spec)
            for spec in specs
        ]

    def _with_ages(self, spec: TaskSpec) -> TaskSpec:
        declared = self._ages[spec.name]
        cache_ns, debounce_ns = spec.cache_ns, spec.debounce_ns
        if declared.cache_ns and not cache_ns:
            cache_ns = AS_CONFIGURED
        if declared.debounce_ns and not debounce_ns:
            debounce_ns = AS_CONFIGURED
        asks = cache_ns not in (0, NEVER_NS) or debounce_ns not in (0, NEVER_NS)
        key = spec.key
        if asks and not key:
            try:
                arguments = msgspec.msgpack.decode(spec.args)
                key = derived_key(spec.name, _encode_sorted(arguments) + spec.session.encode())
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
                return spec  # the worker will say what is wrong with the arguments
        return structs.replace(spec, key=key, cache_ns=cache_ns, debounce_ns=debounce_ns)

    def _with(self, spec: TaskSpec) -> TaskSpec:
        try:
            arguments = self._decoders[spec.name].decode(spec.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return spec  # the worker will say what is wrong with the arguments
        return structs.replace(spec, target=site_of(arguments.text))  # type: ignore[attr-defined]


def site_of(text: str) -> str:
    """Return the host (with its port) of a URL; any other text unchanged."""
    if "://" not in text:
        return text[:TARGET_LENGTH_MAX]
    try:
        netloc = urlsplit(text).netloc
    except ValueError:
        return ""
    return netloc.rpartition("@")[2].lower()[:TARGET_LENGTH_MAX]


def _pool(name: str) -> str:
    return name.partition(".")[0]
