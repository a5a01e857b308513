"""The configuration is read by one reload at a time, and only so many reloads wait."""

from types import SimpleNamespace
from typing import Any

from musterd.supervisor.config.load import Loaded
from musterd.supervisor.config.schema import Config
from musterd.supervisor.service.reload import WAITING_MAX, Refused, Reloading


class Calls:
    """Background calls that run when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def run(self, _name: str, work: Any, then: Any) -> None:
        self.begun.append(lambda: then(work()))


def test_more_requests_than_may_wait_are_refused_and_the_others_are_answered_in_turn() -> None:
    calls = Calls()
    loaded = Loaded(Config(), {})
    shell: Any = SimpleNamespace(
        fleet=SimpleNamespace(pools={}, added=SimpleNamespace(sections={}))
    )
    nothing: Any = SimpleNamespace()
    reloading = Reloading(
        shell,
        loaded,
        lambda: loaded,
        adopt=lambda _: None,
        calls=calls,  # type: ignore[arg-type]
        systemd_status=nothing,
        code_of=lambda *_: None,
    )
    answers: list[tuple[int, Any]] = []
    for number in range(WAITING_MAX + 2):  # one is under way, one is too many
        reloading.read(lambda answer, number=number: answers.append((number, answer)))
    assert len(calls.begun) == 1
    ((last, refused),) = answers
    assert last == WAITING_MAX + 1
    assert isinstance(refused, Refused)
    assert f"{WAITING_MAX} reloads wait" in refused.reason
    while calls.begun:
        calls.begun.pop()()
    assert [number for number, _ in answers[1:]] == list(range(WAITING_MAX + 1))
    assert not any(isinstance(answer, Refused) for _, answer in answers[1:])
