"""User code around a retry: it chooses the pause and hears of the retry.

Which pause counts: that of `Retry(after=...)`, else `@task(backoff=...)`, else the function that
the configuration names as `strategy`, else the supervisor's own. User code runs here, in the
worker, and its mistakes are logged and cost nothing but its own effect.
"""

import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

from msgspec import structs

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.messages import ERROR, NOT_GIVEN, TIMEOUT, Completion
from musterd.workers.authoring.base import Backoff, Context, OnRetry
from musterd.workers.authoring.outcome import WAIT_SECONDS_MAX, FailedAttempt, last_words

_log = logging.getLogger("musterd.retry")


class Retrying:
    def __init__(self, settle: Callable[[Any], Any]) -> None:
        self._settle = settle  # awaits a value if necessary
        # None: the function cannot be used, which was logged
        self._named: dict[str, Backoff | None] = {}

    def prepare(self, completion: Completion, attempt: FailedAttempt) -> Completion:
        """Return the completion with the pause that user code wants, and call on_retry if a retry
        follows."""
        completion, on_retry = self._paused(completion, attempt)
        if on_retry is not None:
            try:
                self._settle(on_retry(attempt.context, attempt.error))
            except BaseException as mistake:  # noqa: BLE001 - of a hook: the task goes on without it
                attempt.context.log.error("on_retry failed: %s", last_words(mistake))
        return completion

    async def prepare_async(self, completion: Completion, attempt: FailedAttempt) -> Completion:
        """Do the same as prepare() inside a running event loop."""
        completion, on_retry = self._paused(completion, attempt)
        if on_retry is not None:
            try:
                answer = on_retry(attempt.context, attempt.error)
                if answer is not None:
                    await answer
            except BaseException as mistake:  # noqa: BLE001 - as above
                attempt.context.log.error("on_retry failed: %s", last_words(mistake))
        return completion

    def _paused(
        self, completion: Completion, attempt: FailedAttempt
    ) -> tuple[Completion, OnRetry | None]:
        """Return the completion with its pause, and the on_retry to call."""
        lease, options, context, error = attempt
        failure = completion.failure
        if lease.last or failure is None or failure.kind not in (ERROR, TIMEOUT):
            return completion, None
        if completion.retry_delay_ns == NOT_GIVEN:
            backoff = options.backoff or (self._function(lease.backoff) if lease.backoff else None)
            pause_ns = self._pause_ns(backoff, context, error) if backoff is not None else NOT_GIVEN
            if pause_ns != NOT_GIVEN:
                pause_ns = max(pause_ns, failure.retry_after_ns)
                completion = structs.replace(completion, retry_delay_ns=pause_ns)
        return completion, options.on_retry

    def _pause_ns(self, backoff: Backoff, context: Context, error: BaseException) -> int:
        """Return the function's pause in nanoseconds; NOT_GIVEN if it is no valid number."""
        try:
            said = backoff(context.attempt, error)
            seconds = -1.0 if isinstance(said, bool) else float(said)
            if not 0 <= seconds < math.inf:  # also for nan
                raise ValueError(f"it returned {said!r}: give seconds, 0 or more")
        except BaseException as mistake:  # noqa: BLE001 - as above
            context.log.error(
                "backoff failed: %s; using the usual pause instead", last_words(mistake)
            )
            return NOT_GIVEN
        return int(min(seconds, WAIT_SECONDS_MAX) * 1e9)

    def _function(self, name: str) -> Backoff | None:
        if name not in self._named:
            try:
                self._named[name] = load_backoff(name)
            except BaseException as error:  # noqa: BLE001 - an import can raise anything
                _log.error("%s; using the usual pauses instead", last_words(error))
                self._named[name] = None
        return self._named[name]


def load_backoff(name: str) -> Backoff:
    """Return the function that `strategy = "module:function"` names."""
    module_name, _, function_name = name.partition(":")
    function: Backoff | None = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise ConfigurationError(
            f"strategy = {name!r}: module {module_name} has no function {function_name!r}"
        )
    return function
