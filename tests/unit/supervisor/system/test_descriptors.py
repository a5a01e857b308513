"""Descriptors: how many there are, and more of them where they are allowed."""

import resource

import pytest

from musterd.supervisor.system import descriptors


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((100, 1000), 200), ((600, 1000), 1000), ((100, resource.RLIM_INFINITY), 200)],
)
def test_a_limit_is_doubled_as_far_as_allowed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: int
) -> None:
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: said.append(given))
    descriptors.double()
    assert said == [(raised, limits[1])]


def test_what_is_not_limited_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.delattr(resource, "setrlimit")
    descriptors.double()
