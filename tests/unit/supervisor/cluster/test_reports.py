"""What people see of a sidecar."""

from musterd.supervisor.cluster.reports import REFUSED_GAP_NS, REFUSED_MAX, Repeats
from musterd.supervisor.core.model.actions import Report


def refused(reason: str) -> Report:
    return Report("cluster.refused", "error", reason=reason)


def test_a_refusal_is_reported_once_in_a_while() -> None:
    repeats = Repeats()
    told = [repeats.is_news(at, refused("no rights")) for at in (0, 1, REFUSED_GAP_NS - 1)]
    assert told == [True, False, False]
    assert repeats.is_news(2, refused("read-only"))
    assert repeats.is_news(REFUSED_GAP_NS, refused("no rights"))
    assert not repeats.is_news(REFUSED_GAP_NS + 1, refused("no rights"))


def test_everything_else_is_reported_each_time() -> None:
    repeats, away = Repeats(), Report("cluster.away", "warning", reason="no answer")
    assert repeats.is_news(0, away)
    assert repeats.is_news(0, away)


def test_refusals_that_are_remembered_are_bounded() -> None:
    repeats = Repeats()
    for number in range(10 * REFUSED_MAX):
        assert repeats.is_news(0, refused(str(number)))
        assert len(repeats._reported_ns) <= REFUSED_MAX
