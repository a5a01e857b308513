"""User code around a retry: its pause, its hook, and what its mistakes cost."""

import asyncio
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.wire.messages import NOT_GIVEN, Completion, Failure, Lease
from musterd.workers.authoring.base import Context, TaskOptions, task, task_options
from musterd.workers.authoring.outcome import FailedAttempt
from musterd.workers.runtime.retrying import Retrying, load_backoff

SECOND_NS = 10**9
ERROR = ConnectionError("refused")


def lease(**fields: Any) -> Lease:
    return Lease(1, "t", "x", b"", **{"attempt": 2, "timeout_ns": 0, **fields})


def prepared(options: TaskOptions, of: Lease | None = None, **completion: Any) -> Completion:
    of = of or lease()
    failure = completion.pop("failure", Failure("error"))
    return Retrying(asyncio_settle).prepare(
        Completion(1, 5, b"", failure, **completion),
        FailedAttempt(of, options, Context("t", of.attempt), ERROR),
    )


def asyncio_settle(value: Any) -> Any:
    return asyncio.run(value) if asyncio.iscoroutine(value) else value


# -- backoff ----------------------------------------------------------------------------------


def test_the_task_s_own_backoff_is_asked_with_attempt_and_error() -> None:
    asked = []

    def backoff(attempt: int, error: BaseException) -> float:
        asked.append((attempt, error))
        return 2.5

    found = prepared(TaskOptions(backoff=backoff))
    assert found.retry_delay_ns == 2.5 * SECOND_NS
    assert asked == [(2, ERROR)]


def test_without_one_the_supervisor_decides() -> None:
    assert prepared(TaskOptions()).retry_delay_ns == NOT_GIVEN


def test_what_the_handler_said_by_retry_counts_more() -> None:
    found = prepared(TaskOptions(backoff=lambda attempt, error: 9.0), retry_delay_ns=7)
    assert found.retry_delay_ns == 7


def test_the_site_s_own_word_is_the_least() -> None:
    failure = Failure("error", retry_after_ns=30 * SECOND_NS)
    assert prepared(TaskOptions(backoff=lambda *_: 1.0), failure=failure).retry_delay_ns == (
        30 * SECOND_NS
    )
    assert prepared(TaskOptions(backoff=lambda *_: 60), failure=failure).retry_delay_ns == (
        60 * SECOND_NS
    )


def test_zero_means_at_once() -> None:
    assert prepared(TaskOptions(backoff=lambda *_: 0)).retry_delay_ns == 0


@pytest.mark.parametrize("answer", [-1, math.nan, math.inf, None, "soon", True])
def test_an_answer_that_is_no_time_is_logged_and_the_usual_pause_made(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert prepared(TaskOptions(backoff=lambda *_: answer)).retry_delay_ns == NOT_GIVEN
    assert "using the usual pause instead" in caplog.text


def test_a_backoff_that_raises_is_logged_and_the_usual_pause_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def backoff(attempt: int, error: BaseException) -> float:
        raise SystemExit("no")

    assert prepared(TaskOptions(backoff=backoff)).retry_delay_ns == NOT_GIVEN
    assert "backoff failed: SystemExit: no" in caplog.text


def test_a_pause_is_never_beyond_a_month() -> None:
    found = prepared(TaskOptions(backoff=lambda *_: 1e300))
    assert found.retry_delay_ns == 30 * 24 * 3600 * SECOND_NS


# -- by name ----------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_pauses.py").write_text(
        "def by_attempt(attempt, error):\n    return attempt * 10\nNOT_ONE = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_pauses"
    sys.modules.pop("own_pauses", None)


def test_the_function_that_the_configuration_names_is_asked(module: str) -> None:
    found = prepared(TaskOptions(), lease(attempt=3, backoff=f"{module}:by_attempt"))
    assert found.retry_delay_ns == 30 * SECOND_NS


def test_the_task_s_own_counts_more_than_that_of_the_configuration(module: str) -> None:
    options = TaskOptions(backoff=lambda *_: 1.0)
    found = prepared(options, lease(backoff=f"{module}:by_attempt"))
    assert found.retry_delay_ns == SECOND_NS


@pytest.mark.parametrize("name", ["own_pauses:absent", "own_pauses:NOT_ONE", "no_such_module:f"])
def test_a_name_that_means_nothing_is_logged_once(
    module: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    retrying = Retrying(asyncio_settle)
    failed = Completion(1, 5, b"", Failure("error"))
    for _ in range(3):
        attempt = FailedAttempt(lease(backoff=name), TaskOptions(), Context("t"), ERROR)
        found = retrying.prepare(failed, attempt)
        assert found.retry_delay_ns == NOT_GIVEN
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 1


def test_it_is_loaded_by_its_dotted_name() -> None:
    assert load_backoff("math:fsum") is math.fsum  # type: ignore[comparison-overlap]


# -- on_retry ---------------------------------------------------------------------------------


def test_the_hook_is_told_of_the_attempt_and_the_error() -> None:
    told: list[tuple[str, int, BaseException]] = []
    prepared(
        TaskOptions(on_retry=lambda ctx, error: told.append((ctx.task_id, ctx.attempt, error)))
    )
    assert told == [("t", 2, ERROR)]


def test_an_async_hook_is_awaited() -> None:
    told = []

    async def hook(ctx: Context, error: BaseException) -> None:
        await asyncio.sleep(0)
        told.append(ctx.attempt)

    prepared(TaskOptions(on_retry=hook))
    assert told == [2]


@pytest.mark.parametrize("kind", ["permanent", "cancel", "invalid"])
def test_nobody_is_asked_or_told_where_no_retry_follows(kind: str) -> None:
    told = []
    options = TaskOptions(
        on_retry=lambda ctx, error: told.append(ctx), backoff=lambda *_: told.append(1) or 1.0
    )
    prepared(options, failure=Failure(kind))
    prepared(options, lease(last=True))
    assert told == []


def test_a_hook_that_fails_is_logged_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def hook(ctx: Context, error: BaseException) -> None:
        raise KeyboardInterrupt

    found = prepared(TaskOptions(on_retry=hook, backoff=lambda *_: 1.0))
    assert found.retry_delay_ns == SECOND_NS
    assert "on_retry failed: KeyboardInterrupt" in caplog.text


# -- the declaration --------------------------------------------------------------------------


def test_task_takes_both() -> None:
    def backoff(attempt: int, error: BaseException) -> float:
        return 1.0

    def hook(ctx: Context, error: BaseException) -> None:
        pass

    @task(backoff=backoff, on_retry=hook)
    def handler(ctx: Context) -> None: ...

    options = task_options(handler)
    assert options is not None
    assert (options.backoff, options.on_retry) == (backoff, hook)


@pytest.mark.parametrize("option", ["backoff", "on_retry"])
def test_what_cannot_be_called_is_refused(option: str) -> None:
    with pytest.raises(TypeError, match=rf"@task\({option}=5\): give a function"):
        task(**{option: 5})  # type: ignore[call-overload]
