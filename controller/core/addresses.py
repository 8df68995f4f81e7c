"""Which addresses an instance may have. Operators type them and the control plane calls them, so without a rule whoever
may register an instance could make it call anything that it can reach: a cloud's metadata, other services, itself."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from controller.core.errors import ConfigError

# Loopback and private networks.
USUAL_NETWORKS = "127.0.0.0/8, ::1, 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, fc00::/7"
# Where clouds serve credentials to whatever runs on a machine: link-local networks, and addresses of AWS, Google,
# Scaleway, Alibaba, Oracle and Azure, some of which lie within private networks.
METADATA = tuple(
    ipaddress.ip_network(each)
    for each in (
        "169.254.0.0/16", "fe80::/10", "fd00:ec2::/32", "fd20:ce::/32", "fd00:42::42/128", "100.100.100.200/32",
        "192.0.0.192/32", "168.63.129.16/32",
    )
)  # fmt: skip
OWN_URLS = ("DATABASE_URL", "REDIS_URL", "GATEWAY_URL", "GATEWAY_PUBLIC_URL", "CONSOLE_URL")  # no engines are there
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_PORTS = {"postgresql": 5432, "postgres": 5432, "redis": 6379, "rediss": 6379, "http": 80, "https": 443}
SHAPE = "Must be an http:// or https:// URL with a host and an optional port."
_HOST = re.compile(r"\.?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*")
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class AddressRules:
    """`hosts`: names that may be used whatever they resolve to; `.example.org` stands for all names below it. `own`:
    hosts and ports of Slackline's own stores and servers, which are no engines (`own_services`)."""

    networks: tuple[_Network, ...]
    hosts: tuple[str, ...] = ()
    own: frozenset[tuple[str, int]] = frozenset()

    def allows_address(self, address: str) -> bool:
        """Whether an IP address may be connected to; False for what is none."""
        known = _known(address)
        if known is None or self.serves_credentials(address):
            return False
        mapped = known.ipv4_mapped if isinstance(known, ipaddress.IPv6Address) else None
        return any(known in network or (mapped is not None and mapped in network) for network in self.networks)

    def serves_credentials(self, address: str) -> bool:
        """Whether it is one of METADATA, in any of its forms, and no network within that is listed."""
        known = _known(address)
        for each in _forms(known) if known is not None else ():
            for denied in METADATA:
                if each in denied and not any(
                    each in network and _within(network, denied) for network in self.networks
                ):
                    return True
        return False

    def is_own(self, host: str, port: int) -> bool:
        """Whether this host, or address, and port is one of Slackline's own. All loopback addresses are one."""
        return bool(self.own) and (_plain(host), port) in self.own

    def allows(self, host: str, address: str, port: int) -> bool:
        """Whether the address that a host turned out to have may be connected to."""
        if self.is_own(host, port) or self.is_own(address, port):
            return False
        return self.names_host(host) or self.allows_address(address)

    def names_host(self, host: str) -> bool:
        """Whether a host is listed by name, so that its addresses are not checked."""
        lower = host.lower().rstrip(".")
        return any(lower == each or (each.startswith(".") and lower.endswith(each)) for each in self.hosts)


def address_rules(entries: Iterable[str], own: frozenset[tuple[str, int]] = frozenset()) -> AddressRules:
    """From networks (`10.0.0.0/8`), addresses and host names. Raises ConfigError naming the entry."""
    networks: list[_Network] = []
    hosts: list[str] = []
    for entry in entries:
        try:
            networks.append(ipaddress.ip_network(entry))
        except ValueError as error:
            digits = entry.replace(".", "").replace("/", "").isdigit()
            if (
                digits
                or ":" in entry
                or "/" in entry
                or not entry.strip(".").replace("-", "").replace(".", "").isalnum()
            ):
                raise ConfigError(f"{entry!r}: expected a network, an address or a host name ({error})") from None
            hosts.append(entry.lower())
    return AddressRules(tuple(networks), tuple(hosts), own)


def own_services(urls: Iterable[str]) -> frozenset[tuple[str, int]]:
    """Hosts and ports of the URLs of stores and servers. What has no host is left out."""
    found = set()
    for url in urls:
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme)
        except ValueError:
            continue
        if parts.hostname and port:
            found.add((_plain(parts.hostname), port))
    return frozenset(found)


def _plain(host: str) -> str:
    """How a host is compared."""
    lower = host.lower().rstrip(".")
    known = _known(lower)
    return "localhost" if known is not None and any(each.is_loopback for each in _forms(known)) else lower


def _known(address: str) -> _Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None


def _forms(address: _Address) -> list[_Address]:
    """The address, and the IPv4 address within it: a gateway may translate one into the other."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    within = address.ipv4_mapped or address.sixtofour
    if within is None and address in _NAT64:
        within = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return [address] if within is None else [address, within]


def _within(network: _Network, other: _Network) -> bool:
    return network.version == other.version and network.subnet_of(other)  # type: ignore[arg-type]


def url_problem(url: str, rules: AddressRules) -> str:
    """Why this cannot be the URL of an instance; "" if it can. The addresses of a name are checked at each connect."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return SHAPE
    if not usable or any(ord(letter) <= 32 or ord(letter) == 127 or letter == "\\" for letter in url):
        return SHAPE
    if "@" in parts.netloc:
        return "Must not have a user or password, which would be shown."
    if "?" in url or "#" in url:
        return "Must not have a query or a fragment."
    return _misplaced(parts.hostname or "", parts.port or _PORTS[parts.scheme], rules)


def _misplaced(host: str, port: int, rules: AddressRules) -> str:
    if rules.is_own(host, port):
        return f"{host} is one of Slackline's own services at this port."
    if rules.serves_credentials(host) and not rules.names_host(host):
        return (
            f"{host} is an address at which clouds serve credentials. List it in ENGINE_NETWORKS if it is an engine's."
        )
    if _is_address(host) and not rules.names_host(host) and not rules.allows_address(host):
        return f"{host} is in no network of ENGINE_NETWORKS."
    return ""


def shown_url(url: str) -> str:
    """A URL without its user and password, as they may stand in rows of older versions."""
    head, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{head}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        # 127.1, 0x7f.1 and 2130706433 are addresses for the resolver, and none for anybody who reads them.
        return host.replace(".", "").isdigit() or host.lower().startswith("0x")
    return True
