"""Types of the fixtures, for annotations in tests."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeVar, Unpack, overload

from musterd.testing.daemon import LocalDaemon
from musterd.testing.settings import Given
from musterd.testing.worker import LocalWorker, WorkerOptions
from musterd.workers.authoring.base import Worker

W = TypeVar("W", bound=Worker)


class OpenWorker(Protocol):
    """Type of the fixture `musterd_worker`; see open_worker()."""

    @overload
    def __call__(self, worker: type[W], **given: Unpack[WorkerOptions]) -> LocalWorker[W]: ...
    @overload
    def __call__(
        self, worker: ModuleType | str, **given: Unpack[WorkerOptions]
    ) -> LocalWorker[Worker]: ...


class StartDaemon(Protocol):
    """Type of the fixture `musterd_daemon`; see start_daemon()."""

    def __call__(
        self,
        config: Given = ...,
        *,
        pools: Mapping[str, Mapping[str, Any]] | None = ...,
        secrets: Mapping[str, str] | None = ...,
        env: Mapping[str, str] | None = ...,
        keep: Sequence[str] = ...,
    ) -> LocalDaemon: ...
