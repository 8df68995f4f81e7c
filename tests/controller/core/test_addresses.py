"""Which URLs an instance may have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.addresses import USUAL_NETWORKS, address_rules, own_services, shown_url, url_problem
from controller.core.errors import ConfigError

USUAL = address_rules(each.strip() for each in USUAL_NETWORKS.split(","))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000", "http://10.1.2.3", "https://192.168.0.4:8443/engine", "http://[::1]:8000",
        "http://[fd00::1]:8000", "http://gpu-1:8000", "https://engines.example.org/one",
    ],
)  # fmt: skip
def test_usual_urls_pass(url):
    assert url_problem(url, USUAL) == ""


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://169.254.169.254/latest", "serve credentials"),
        ("http://[fe80::1]:80", "serve credentials"),
        ("http://[::ffff:169.254.169.254]", "serve credentials"),
        ("http://8.8.8.8", "no network"),
        ("http://0.0.0.0:8000", "no network"),
        ("http://100.100.100.200/latest/meta-data", "serve credentials"),
        ("http://[fd00:ec2::254]/latest", "serve credentials"),
        ("http://[fd20:ce::254]", "serve credentials"),
        ("http://[fd00:42::42]", "serve credentials"),
        ("http://[::ffff:100.100.100.200]", "serve credentials"),
        ("http://[64:ff9b::a9fe:a9fe]", "serve credentials"),
        ("http://[2002:a9fe:a9fe::1]", "serve credentials"),
        ("http://2130706433", "no network"),
        ("http://0x7f000001", "no network"),
        ("http://127.1", "no network"),
        ("http://user:hunter2@gpu-1:8000", "user or password"),
        ("http://gpu-1:8000@169.254.169.254", "user or password"),
        ("http://gpu-1:8000/?a=b", "query"),
        ("http://gpu-1:8000/#a", "query"),
        ("http://gpu-1:99999", "http://"),
        ("http://gpu-1:0", "http://"),
        ("http://", "http://"),
        ("ftp://gpu-1", "http://"),
        ("http://gpu-1\\@evil", "http://"),
        ("http://gpu-1/\r\nx: y", "http://"),
    ],
)
def test_others_are_refused(url, why):
    assert why in url_problem(url, USUAL)


@pytest.mark.parametrize("address", ["169.254.169.254", "100.100.100.200", "192.0.0.192", "168.63.129.16"])
def test_a_network_around_a_metadata_service_does_not_open_it(address):
    wide = address_rules(["0.0.0.0/0", "::/0"])
    assert not wide.allows_address(address)
    assert not wide.allows_address(f"::ffff:{address}")
    assert wide.allows_address("8.8.8.8")
    assert not USUAL.allows_address("64:ff9b::a00:1"), (
        "an IPv4 network opens no address that a gateway translates into it"
    )


def test_what_is_named_exactly_is_allowed():
    """Engines on link-local addresses: whoever lists that network means it."""
    rules = address_rules(["169.254.7.0/24", "fe80::/10"])
    assert rules.allows_address("169.254.7.3")
    assert rules.allows_address("fe80::1")
    assert not rules.allows_address("169.254.169.254")


OWN = own_services(
    [
        "postgresql://gateway:hunter2@127.0.0.1:5439/slackline", "redis://db.example.org/0", "http://10.0.0.5:8080",
        "https://console.example.org", "", "postgresql:///slackline",
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:5439", "http://localhost:5439", "http://127.8.8.8:5439/x", "http://[::1]:5439",
        "http://db.example.org:6379", "http://DB.example.org.:6379", "http://10.0.0.5:8080", "https://console.example.org",
    ],
)  # fmt: skip
def test_our_own_stores_and_servers_are_no_engines(url):
    rules = replace(address_rules([*USUAL_NETWORKS.split(", "), "db.example.org", "localhost"]), own=OWN)
    assert "Slackline's own" in url_problem(url, rules)


@pytest.mark.parametrize("url", ["http://127.0.0.1:5440", "http://10.0.0.6:8080", "http://console.example.org"])
def test_their_neighbours_may_be(url):
    assert url_problem(url, replace(USUAL, own=OWN)) == ""


def test_lists_of_networks_and_hosts():
    rules = address_rules(["10.0.0.0/8", "gpu.example.org", ".pool.example.org"])
    assert rules.allows_address("10.9.9.9")
    assert rules.allows_address("::ffff:10.9.9.9")
    assert not rules.allows_address("127.0.0.1")
    assert rules.names_host("GPU.example.org.")
    assert rules.names_host("a.pool.example.org")
    assert not rules.names_host("pool.example.org")
    assert not rules.names_host("xpool.example.org")


@pytest.mark.parametrize("entry", ["10.0.0.0/99", "10.0.0.1/8", "999.1.1.1", "a b", "http://x", "::g"])
def test_nonsense_is_refused(entry):
    with pytest.raises(ConfigError, match="expected a network"):
        address_rules([entry])


def test_passwords_are_not_shown():
    assert shown_url("http://user:hunter2@gpu-1:8000/x@y") == "http://gpu-1:8000/x@y"
    assert shown_url("http://gpu-1:8000") == "http://gpu-1:8000"
    assert shown_url("") == ""
