"""Counts of failed sign-ins in a real Redis: limits, what a success forgives, and many processes at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from django.conf import settings

from workers import sign_in_counts
from workers.live import LiveUnavailable, _client
from workers.sign_in_counts import SignInRefused, forgive, take

pytestmark = pytest.mark.db
LIMITS = {"per_account": 3, "per_address": 5}


@pytest.fixture
def place():
    """An account and an address that no other test uses."""
    return f"account-{uuid4()}", f"address-{uuid4()}"


def test_an_account_has_a_few_attempts_from_anywhere(place):
    account, _ = place
    for _ in range(3):
        assert take(account, f"address-{uuid4()}", **LIMITS) is None
    refused = take(account, f"address-{uuid4()}", **LIMITS)
    assert isinstance(refused, SignInRefused)
    assert refused.by == "account"
    assert 0 < refused.retry_after_s <= sign_in_counts.WINDOW_S
    assert take(f"account-{uuid4()}", f"address-{uuid4()}", **LIMITS) is None


def test_the_case_of_a_name_is_no_way_around(place):
    account, _ = place
    for name in (account, account.upper(), account.title()):
        assert take(name, f"address-{uuid4()}", **LIMITS) is None
    assert take(account, f"address-{uuid4()}", **LIMITS).by == "account"


def test_an_address_has_a_few_attempts_for_all_accounts(place):
    _, address = place
    for _ in range(5):
        assert take(f"account-{uuid4()}", address, **LIMITS) is None
    assert take(f"account-{uuid4()}", address, **LIMITS).by == "address"


@pytest.mark.parametrize(
    ("address", "beside", "other"),
    [
        ("2001:db8:{0}:1::5", "2001:db8:{0}:1:ffff::9", "2001:db8:{0}:2::5"),
        ("::ffff:10.{1}.0.9", "10.{1}.0.9", "10.{1}.0.10"),
    ],
)
def test_all_addresses_of_an_ipv6_network_count_as_one(address, beside, other):
    places = f"{uuid4().int % 65536:x}", uuid4().int % 256
    address, beside, other = (each.format(*places) for each in (address, beside, other))
    for each in (address, beside, address, beside, address):
        assert take(f"account-{uuid4()}", each, **LIMITS) is None
    assert take(f"account-{uuid4()}", beside, **LIMITS).by == "address"
    assert take(f"account-{uuid4()}", other, **LIMITS) is None


def test_a_success_takes_its_own_count_back(place):
    account, address = place
    for _ in range(20):
        assert take(account, address, **LIMITS) is None
        forgive(account, address)


def test_guessing_elsewhere_locks_nobody_out_of_a_known_address(place):
    account, address = place
    assert take(account, address, **LIMITS) is None
    forgive(account, address)
    for _ in range(4):
        take(account, f"address-{uuid4()}", **LIMITS)
    assert take(account, f"address-{uuid4()}", **LIMITS).by == "account"
    for _ in range(3):
        assert take(account, address, **LIMITS) is None
    assert take(account, address, **LIMITS).by == "account"


def test_guessing_from_an_office_locks_only_those_out_who_never_signed_in_there(place):
    account, office = place
    assert take(account, office, **LIMITS) is None
    forgive(account, office)
    for _ in range(5):
        assert take(f"account-{uuid4()}", office, **LIMITS) is None
    assert take(f"account-{uuid4()}", office, **LIMITS).by == "address"
    for _ in range(3):  # its own limit holds there too
        assert take(account, office, **LIMITS) is None
    assert take(account, office, **LIMITS).by == "account"


def test_attempts_at_once_are_all_counted(place):
    account, address = place
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: take(account, address, **LIMITS), range(40)))
    assert made.count(None) == 3


def test_counts_end_by_the_time_of_redis(place, monkeypatch):
    account, address = place
    monkeypatch.setattr(sign_in_counts, "WINDOW_S", 1)
    for _ in range(3):
        take(account, address, **LIMITS)
    key = sign_in_counts._keys(account, address)[0]
    assert _client(settings.REDIS_URL).ttl(key) == 1
    monkeypatch.setattr("time.time", lambda: 4e9)  # this host's clock steps: nothing changes
    assert take(account, address, **LIMITS).by == "account"
    _client(settings.REDIS_URL).pexpire(key, 1)
    while _client(settings.REDIS_URL).exists(key):
        pass
    assert take(account, address, **LIMITS) is None


def test_without_redis_no_attempt_is_made(place, monkeypatch):
    monkeypatch.setattr(settings, "REDIS_URL", "redis://127.0.0.1:1/0")
    with pytest.raises(LiveUnavailable):
        take(*place, **LIMITS)


def test_no_name_and_no_address_is_in_the_keys():
    keys = sign_in_counts._keys("olga", "192.0.2.7")
    assert not any("olga" in key or "192.0.2.7" in key for key in keys)
