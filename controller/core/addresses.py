"""Which addresses an instance may have. Operators type them and the control plane calls them, so without a rule whoever
may register an instance could make it call anything that it can reach: a cloud's metadata, other services, itself."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from controller.core.errors import ConfigError

# Loopback and private networks. Without 169.254.0.0/16 and fe80::/10, where clouds serve credentials.
USUAL_NETWORKS = "127.0.0.0/8, ::1, 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, fc00::/7"
SHAPE = "Must be an http:// or https:// URL with a host and an optional port."
_HOST = re.compile(r"\.?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*")
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class AddressRules:
    """`hosts`: names that may be used whatever they resolve to; `.example.org` stands for all names below it."""

    networks: tuple[_Network, ...]
    hosts: tuple[str, ...] = ()

    def allows_address(self, address: str) -> bool:
        """Whether an IP address may be connected to; False for what is none."""
        try:
            known = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = known.ipv4_mapped if known.version == 6 else None
        return any(known in network or (mapped is not None and mapped in network) for network in self.networks)

    def names_host(self, host: str) -> bool:
        """Whether a host is listed by name, so that its addresses are not checked."""
        lower = host.lower().rstrip(".")
        return any(lower == each or (each.startswith(".") and lower.endswith(each)) for each in self.hosts)


def address_rules(entries: Iterable[str]) -> AddressRules:
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
    return AddressRules(tuple(networks), tuple(hosts))


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
    host = parts.hostname or ""
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
