"""Sign-in attempts that failed, counted in Redis, so that the limits hold over all console processes.

An attempt is counted before the password is checked: a hundred attempts sent at once are a hundred counted attempts.
A success takes its own count back. Redis keeps the time, so a clock that steps on one host changes no limit.
"""

from __future__ import annotations

from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from controller.core.messages import SIGN_IN_KEY
from workers.live import evaluate

WINDOW_S = 900  # counts start with the first failure and end this long after it
KNOWN_S = 30 * 24 * 3600  # how long an address stays known after a success
IPV6_PREFIX = 64  # bits: one customer of a provider has all addresses of such a network

# KEYS: failures of the account, of the address, of the account from this address, and whether this address is known.
# From an address where the account signed in lately only the failures of this account from there count: whoever guesses
# elsewhere, or for other accounts from the same office, locks nobody out of a browser that they use.
_TAKE = """
local keys, checked = {KEYS[1], KEYS[2]}, {KEYS[1], KEYS[2]}
if redis.call('EXISTS', KEYS[4]) == 1 then
  keys[1] = KEYS[3]
  checked = {KEYS[3]}
end
for i, key in ipairs(checked) do
  if tonumber(redis.call('GET', key) or '0') >= tonumber(ARGV[i]) then
    return {i, math.max(1, redis.call('TTL', key))}
  end
end
for _, key in ipairs(keys) do
  if redis.call('INCR', key) == 1 then redis.call('EXPIRE', key, ARGV[3]) end
end
return {0, 0}
"""
_FORGIVE = """
redis.call('DEL', KEYS[1], KEYS[3])
if tonumber(redis.call('GET', KEYS[2]) or '0') > 0 then redis.call('DECR', KEYS[2]) end
redis.call('SET', KEYS[4], '1', 'EX', ARGV[1])
"""


class SignInRefused(NamedTuple):
    """Why an attempt is not made. `by`: "account" or "address". Another one is possible in `retry_after_s` seconds."""

    by: str
    retry_after_s: int


def take(account: str, address: str, *, per_account: int, per_address: int) -> SignInRefused | None:
    """Count an attempt as failed; None: it may be made. Raises LiveUnavailable, and then it must not be made."""
    by, wait_s = evaluate(_TAKE, _keys(account, address), per_account, per_address, WINDOW_S)
    return SignInRefused("account" if by == 1 else "address", int(wait_s)) if by else None


def forgive(account: str, address: str) -> None:
    """The attempt succeeded. Raises LiveUnavailable."""
    evaluate(_FORGIVE, _keys(account, address), KNOWN_S)


def _keys(account: str, address: str) -> list[str]:
    """Hashed: what people type as a name may be a password, and Redis needs neither."""
    who, where = _digest(account.casefold()), _digest(_network(address))
    subjects = {"account": who, "address": where, "both": f"{who}:{where}", "known": f"{who}:{where}"}
    return [SIGN_IN_KEY.format(what=what, who=subject) for what, subject in subjects.items()]


def _network(address: str) -> str:
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return f"{IPv6Address(int(parsed) >> (128 - IPV6_PREFIX) << (128 - IPV6_PREFIX))}/{IPV6_PREFIX}"


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
