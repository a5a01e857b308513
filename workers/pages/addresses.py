"""Which addresses a worker may connect to: the operator's rules, without any I/O.

    rules = AddressRules(allow=["*.shop.example"], deny=["private"])
    rules.check("www.shop.example", "9.9.9.9")   -> None: connect
    rules.check("www.shop.example", "10.0.0.7")  -> "... 10.0.0.7, which is denied by 'private'"
    rules.check("other.example")                 -> "other.example is not among the allowed hosts"

`allow` lists everything that may be reached; an empty `allow` allows everything. `deny` lists what
may not be reached, and wins over `allow`. An entry of either is one of:

    shop.example  *.shop.example    a name, or a glob of names: `*` stands for any characters
    192.0.2.7  10.0.0.0/8  fd00::/8 an address or a network
    loopback                        127.0.0.0/8, ::1, and 0.0.0.0 and ::, which reach loopback too
    link-local                      169.254.0.0/16, fe80::/10
    metadata                        where clouds tell machines their credentials
    private                         every address that is not public; the three above included
    public                          every address of the Internet

The caller checks twice: a name before it is resolved, `check(host)`, and then the address to
connect to, `check(host, address)`. That must be the address of the connection itself, not of a
lookup made for the check: a name may resolve to something else a moment later.
"""

import difflib
import fnmatch
import ipaddress
import re
from collections.abc import Callable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

RULES_MAX = 1000  # entries of one list: each connection is compared with all of them

# Where AWS, Google, Azure and others (169.254.169.254), ECS and EKS (169.254.170.2 and .23), AWS by
# IPv6, Alibaba and Azure's wire server tell machines about themselves.
METADATA = frozenset(
    ipaddress.ip_address(each)
    for each in (
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "100.100.100.200",
        "168.63.129.16",
    )
)
# IPv6 addresses of these networks hold an IPv4 address that a gateway sends the packets to.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.IPv6Network("64:ff9b:1::/48")
# Two old kinds that hold an IPv4 address (IPv4-compatible, IPv4-translated): some systems still
# translate them.
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_TRANSLATED = ipaddress.IPv6Network("::ffff:0:0:0/96")
# Global unicast, which has all of the Internet; without the range for documentation (RFC 9637).
# Addresses outside, such as fec0::/10, belong to a private network or to nobody.
_INTERNET = ipaddress.IPv6Network("2000::/3")
_DOCUMENTS = ipaddress.IPv6Network("3fff::/20")
_NAME = re.compile(r"[a-z0-9_*?.-]+", re.ASCII)


def _loopback(address: Address) -> bool:
    return address.is_loopback or address.is_unspecified


def _private(address: Address) -> bool:
    return not _public(address)


def _public(address: Address) -> bool:
    forms = _forms(address)
    if address in _NAT64:
        forms = forms[1:]  # as public as the address inside
    return all(_of_internet(form) and form not in METADATA for form in forms)


def _of_internet(address: Address) -> bool:
    if address.version == 6 and (address not in _INTERNET or address in _DOCUMENTS):
        return False
    return address.is_global and not address.is_multicast


_WORDS: dict[str, Callable[[Address], bool]] = {
    "loopback": _loopback,
    "link-local": lambda address: address.is_link_local,
    "metadata": lambda address: address in METADATA,
    "private": _private,
    "public": _public,
}


class _Rules:
    """One list, split into rules for names and rules for addresses."""

    def __init__(self, entries: Sequence[str], where: str) -> None:
        if len(entries) > RULES_MAX:
            raise ValueError(
                f"{where} has {len(entries)} entries; at most {RULES_MAX} are possible"
            )
        self.names: list[tuple[str, re.Pattern[str]]] = []
        self.addresses: list[tuple[str, Callable[[Address], bool]]] = []
        for entry in entries:
            self._add(entry, where)

    def _add(self, entry: str, where: str) -> None:
        if entry in _WORDS:
            self.addresses.append((entry, _WORDS[entry]))
            return
        try:
            network = ipaddress.ip_network(entry)
        except ValueError as error:
            name = _plain(entry)
            meant = difflib.get_close_matches(entry, _WORDS, n=1, cutoff=0.8)
            if meant and "." not in entry:  # else a typing mistake would deny nothing
                raise ValueError(f"{where} has {entry!r}: write {meant[0]!r}") from None
            # An entry with a slash, a colon or only digits is no name: a network was meant.
            if not _NAME.fullmatch(name) or not name.strip("0123456789."):
                reason = f": {error}" if "/" in entry else ""
                raise ValueError(
                    f"{where} has {entry!r}, which is none of {', '.join(_WORDS)}, no address, no "
                    f"network such as 10.0.0.0/8 and no name such as *.shop.example{reason}"
                ) from None
            self.names.append((entry, re.compile(fnmatch.translate(name))))
        else:
            self.addresses.append((entry, network.__contains__))

    def by_name(self, host: str) -> str | None:
        return next((entry for entry, name in self.names if name.fullmatch(host)), None)

    def by_address(self, forms: Sequence[Address]) -> str | None:
        return next(
            (entry for entry, has in self.addresses if any(has(form) for form in forms)), None
        )


class AddressRules:
    """What may be connected to. ValueError names the entry that cannot be read."""

    def __init__(self, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        self._allow = _Rules(allow, "allow")
        self._deny = _Rules(deny, "deny")
        self._limited = bool(allow)

    def __bool__(self) -> bool:
        """Tell whether anything is refused at all."""
        return self._limited or bool(self._deny.names or self._deny.addresses)

    @property
    def need_address(self) -> bool:
        """Whether some entry needs the address, which a client of a proxy does not know."""
        return bool(self._allow.addresses or self._deny.addresses)

    def check(self, host: str, address: str | None = None) -> str | None:
        """Return why `host` may not be connected to, at this address; None if it may.

        Without an address, only a reason that holds at every address is given.
        """
        name = _plain(host)
        at = _address(name if address is None else address)
        entry = self._deny.by_name(name)
        if entry is not None:
            return f"{host} is denied by {entry!r}"
        if at is not None:
            entry = self._deny.by_address(_forms(at))
            if entry is not None:
                shown = host if address in (None, host) else f"{host} is at {address}, which"
                return f"{shown} is denied by {entry!r}"
        if not self._limited or self._allow.by_name(name):
            return None
        if at is None:  # an address may still be allowed
            return None if self._allow.addresses else f"{host} is not among the allowed hosts"
        if self._allow.by_address([at]):
            return None
        shown = host if address in (None, host) else f"{host} at {address}"
        return f"{shown} is not among the allowed hosts and addresses"


def _plain(host: str) -> str:
    """Return the name as names are compared: lower case, IDNA, no dot at the end."""
    name = host.strip("[]").rstrip(".").lower()
    if name.isascii():
        return name
    try:
        return name.encode("idna").decode("ascii")
    except UnicodeError:
        return name


def _address(text: str) -> Address | None:
    """Return the address, as IPv4 where the system would connect by IPv4."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])  # fe80::1%eth0
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def _forms(address: Address) -> list[Address]:
    """Return the address, and the IPv4 address that a gateway makes of it (NAT64, 6to4, Teredo)."""
    forms: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in each for each in (_NAT64, _NAT64_LOCAL, _TRANSLATED)) or (
            address in _COMPATIBLE and int(address) > 1  # 0 and 1 are :: and ::1
        ):
            forms.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address.sixtofour is not None:
            forms.append(address.sixtofour)
        if address.teredo is not None:
            forms.append(address.teredo[1])
    return forms
