"""Proxies take turns, and those that fail are left out for a growing time."""

import pytest

from musterd.ipc.errors import ProxyFailed
from musterd.ipc.secrets.lookup import MissingSecret
from musterd.workers.pages import proxies as module
from musterd.workers.pages.http import BadRequest
from musterd.workers.pages.proxies import FAILURES_MAX, NoProxyLeft, Proxies, Proxy

ONE, TWO, THREE = (f"http://proxy{number}.example:3128" for number in (1, 2, 3))
DEAD = ProxyFailed("no connection")
REFUSES = ProxyFailed("did not connect", everywhere=False)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def no_secret(name: str) -> str:
    raise MissingSecret(f"secret {name!r} is missing")


def entries_of(found: list[Proxy]) -> list[str]:
    return [each.entry for each in found]


def test_each_request_takes_the_next_proxy() -> None:
    proxies = Proxies(Clock())
    firsts = [proxies.usable([ONE, TWO, THREE], "a", no_secret)[0].entry for _ in range(6)]
    assert sorted(firsts[:3]) == [ONE, TWO, THREE]
    assert firsts[3:] == firsts[:3]


def test_a_dead_proxy_is_left_out_for_a_growing_time_until_it_works() -> None:
    clock = Clock()
    proxies = Proxies(clock)
    one = Proxy(ONE, ONE)
    pauses = []
    for _ in range(9):
        proxies.failed(one, "a", DEAD)
        assert entries_of(proxies.usable([ONE, TWO], "b", no_secret)) == [TWO]
        before = clock.now
        while len(proxies.usable([ONE, TWO], "b", no_secret)) == 1:
            clock.now += 1
        pauses.append(clock.now - before)
    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    proxies.worked(one, "a")
    proxies.failed(one, "a", DEAD)
    clock.now += 10
    assert len(proxies.usable([ONE, TWO], "a", no_secret)) == 2


def test_a_proxy_that_does_not_connect_to_a_site_is_left_out_for_that_site_alone() -> None:
    proxies = Proxies(Clock())
    proxies.failed(Proxy(ONE, ONE), "a", REFUSES)
    assert entries_of(proxies.usable([ONE, TWO], "a", no_secret)) == [TWO]
    assert len(proxies.usable([ONE, TWO], "b", no_secret)) == 2
    proxies.worked(Proxy(ONE, ONE), "b")  # which says nothing about the other site
    assert entries_of(proxies.usable([ONE, TWO], "a", no_secret)) == [TWO]
    proxies.worked(Proxy(ONE, ONE), "a")
    assert len(proxies.usable([ONE, TWO], "a", no_secret)) == 2


def test_without_any_proxy_left_the_error_says_when_to_come_back() -> None:
    clock = Clock()
    proxies = Proxies(clock)
    proxies.failed(Proxy(ONE, ONE), "a", DEAD)
    clock.now += 4
    proxies.failed(Proxy(TWO, TWO), "a", DEAD)
    with pytest.raises(NoProxyLeft, match=r"all 2 proxies for a .* in 6 s") as raised:
        proxies.usable([ONE, TWO], "a", no_secret)
    assert raised.value.retry_after == 6
    assert raised.value.unwell is False


def test_the_address_of_a_secret_is_in_no_error() -> None:
    value = "http://bob:hushhush@proxy.example:3128"
    (found,) = Proxies().usable(["secret:PROXY"], "a", lambda _: value)
    assert found == Proxy("secret:PROXY", value)
    with pytest.raises(BadRequest, match="secret 'PROXY' is missing"):
        Proxies().usable(["secret:PROXY"], "a", no_secret)
    for wrong in ("bob:hushhush@proxy", "ftp://bob:hushhush@proxy:1", value + "/path"):
        with pytest.raises(BadRequest, match="secret:PROXY") as raised:
            Proxies().usable(["secret:PROXY"], "a", lambda _, wrong=wrong: wrong)
        assert "hushhush" not in str(raised.value)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAILURES_MAX", 3)
    proxies = Proxies(Clock())
    for site in "abcd":
        proxies.failed(Proxy(ONE, ONE), site, REFUSES)
    assert entries_of(proxies.usable([ONE], "a", no_secret)) == [ONE]
    with pytest.raises(NoProxyLeft):
        proxies.usable([ONE], "d", no_secret)
    assert FAILURES_MAX >= 1000
