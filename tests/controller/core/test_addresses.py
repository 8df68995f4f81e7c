"""Which URLs an instance may have."""

from __future__ import annotations

import pytest

from controller.core.addresses import USUAL_NETWORKS, address_rules, shown_url, url_problem
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
        ("http://169.254.169.254/latest", "no network"),
        ("http://[fe80::1]:80", "no network"),
        ("http://[::ffff:169.254.169.254]", "no network"),
        ("http://8.8.8.8", "no network"),
        ("http://0.0.0.0:8000", "no network"),
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
