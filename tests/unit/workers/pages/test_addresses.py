"""The operator's rules for connections."""

import pytest

from musterd.workers.pages.addresses import RULES_MAX, AddressRules

PUBLIC = ["9.9.9.9", "2606:4700::1111"]
LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"]
LINK_LOCAL = ["169.254.1.1", "fe80::1", "fe80::1%eth0"]
METADATA = ["169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16"]
INNER = [
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "fd00::1",
    "224.0.0.1",
    "198.18.0.1",
]
GATEWAYS = ["64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::"]  # to 127.0.0.1, 10.0.0.1
PRIVATE = LOOPBACK + LINK_LOCAL + METADATA + INNER + GATEWAYS


OWN_IPV6 = ["fec0::1", "::127.0.0.1", "::ffff:0:127.0.0.1", "5f00::1", "3fff::1", "64:ff9b:1::1"]


@pytest.mark.parametrize("address", [*PRIVATE, *OWN_IPV6])
def test_whatever_is_not_of_the_internet_is_private(address: str) -> None:
    assert "denied by 'private'" in (
        AddressRules(deny=["private"]).check("a.example", address) or ""
    )
    assert AddressRules(allow=["public"]).check("a.example", address)
    assert AddressRules(deny=["public"]).check("a.example", address) is None


@pytest.mark.parametrize("address", PUBLIC)
def test_the_internet_is_public(address: str) -> None:
    assert AddressRules(deny=["private"]).check("a.example", address) is None
    assert AddressRules(allow=["public"]).check("a.example", address) is None
    assert AddressRules(deny=["public"]).check("a.example", address)


@pytest.mark.parametrize(
    ("word", "inside"),
    [("loopback", LOOPBACK), ("link-local", LINK_LOCAL), ("metadata", METADATA)],
)
def test_a_word_stands_for_its_addresses_alone(word: str, inside: list[str]) -> None:
    rules = AddressRules(deny=[word])
    assert all(rules.check("a.example", address) for address in inside)
    assert all(rules.check("a.example", address) is None for address in [*PUBLIC, "10.0.0.1"])


def test_without_entries_everything_may_be_reached() -> None:
    rules = AddressRules()
    assert not rules
    assert all(rules.check("a.example", address) is None for address in PRIVATE + PUBLIC)


@pytest.mark.parametrize(
    ("entry", "same", "other"),
    [
        (
            "shop.example",
            ["shop.example", "SHOP.example."],
            ["www.shop.example", "shop.example.org"],
        ),
        (
            "*.shop.example",
            ["www.shop.example", "a.b.shop.example"],
            ["shop.example", "notshop.example"],
        ),
        ("bücher.example", ["bücher.example", "xn--bcher-kva.example"], ["bucher.example"]),
    ],
)
def test_names_are_compared_whole(entry: str, same: list[str], other: list[str]) -> None:
    allowed, denied = AddressRules(allow=[entry]), AddressRules(deny=[entry])
    for host in same:
        assert allowed.check(host) is None
        assert denied.check(host)
    for host in other:
        assert allowed.check(host)
        assert denied.check(host) is None


def test_deny_wins_over_allow_so_a_name_cannot_lead_inside() -> None:
    rules = AddressRules(allow=["*.shop.example"], deny=["private"])
    assert rules.check("www.shop.example") is None
    assert rules.check("www.shop.example", "9.9.9.9") is None
    refused = rules.check("www.shop.example", "10.0.0.7")
    assert refused == "www.shop.example is at 10.0.0.7, which is denied by 'private'"


def test_one_inner_address_may_be_allowed_beside_the_internet() -> None:
    rules = AddressRules(allow=["public", "10.1.2.0/24", "wiki.corp"])
    assert rules.check("any.example") is None  # its address may turn out to be public
    assert rules.check("any.example", "9.9.9.9") is None
    assert rules.check("any.example", "10.1.2.3") is None
    assert rules.check("wiki.corp", "10.9.9.9") is None
    assert rules.check("any.example", "10.9.9.9")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "::1"])
def test_an_address_instead_of_a_name_is_decided_at_once(host: str) -> None:
    assert AddressRules(deny=["loopback"]).check(host) == f"{host} is denied by 'loopback'"


def test_what_only_an_address_can_decide_is_known() -> None:
    assert AddressRules(deny=["private"]).need_address
    assert AddressRules(allow=["10.0.0.0/8"]).need_address
    assert not AddressRules(allow=["*.shop.example"], deny=["evil.example"]).need_address


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("10.0.0.1/8", "host bits"),
        ("10.0.0", "no network such as"),
        ("http://shop.example/", "no name such as"),
        ("", "no name such as"),
        ("privat", "write 'private'"),
        ("link_local", "write 'link-local'"),
    ],
)
def test_an_entry_that_cannot_be_read_is_told(entry: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AddressRules(deny=[entry])


def test_a_list_is_bounded() -> None:
    with pytest.raises(ValueError, match="at most"):
        AddressRules(allow=["a.example"] * (RULES_MAX + 1))


@pytest.mark.parametrize("written", ["::{}", "::ffff:{}", "::ffff:0:{}", "64:ff9b::{}"])
def test_an_ipv4_address_in_an_ipv6_address_is_found(written: str) -> None:
    for word, address in (("metadata", "169.254.169.254"), ("loopback", "127.0.0.1")):
        assert AddressRules(deny=[word]).check("a.example", written.format(address))
