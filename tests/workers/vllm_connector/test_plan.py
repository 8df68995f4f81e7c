"""Which KV is offered and loaded, and which settings are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controller.core.errors import ConfigError
from workers.vllm_connector.blocks import CacheBlocks
from workers.vllm_connector.plan import Kept, KvLoad, KvPrompt, PromptOffer, TransferPlan
from workers.vllm_connector.settings import ConnectorSettings, settings_from

ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
PREFILL, DECODE = ("10.0.0.1", 14579), ("10.0.0.2", 14580)


def plan(mine: tuple[str, int], other: tuple[str, int], **roles: Any) -> TransferPlan:
    settings = ConnectorSettings(*mine, peers=frozenset({f"{other[0]}:{other[1]}"}), token="t")
    return TransferPlan(settings, 16, **roles)


def prompt(params: dict[str, Any] | None, tokens: int = 40, name: str = "r", *about: str) -> KvPrompt:
    return KvPrompt(name, range(tokens), params, about, due=7.5)


def offered(tokens: int = 40, **changed: Any) -> dict[str, Any]:
    """What the prefill server answers, with wrong values."""
    offer = plan(PREFILL, DECODE).finished(prompt(ASKED, tokens), range(100, 110), by_length=True)
    assert offer is not None
    return {**offer.as_params(), **changed}


def test_an_offer_names_the_blocks_by_a_secret_of_its_own() -> None:
    prefill = plan(PREFILL, DECODE)
    found = [prefill.finished(prompt(ASKED, 40, name), range(100, 110), by_length=True) for name in ("a", "b")]
    secrets = [offer.secret for offer in found if offer is not None]
    assert len({*secrets}) == 2
    assert prefill.orders(0.5).kept == [
        Kept(each, name, (100, 101, 102)) for each, name in zip(secrets, "ab", strict=True)
    ]
    assert prefill.orders(0.5).kept == [], "each order is given once"


@pytest.mark.parametrize(
    ("params", "blocks", "by_length"),
    [(None, 3, True), ({}, 3, True), (ASKED, 3, False), (ASKED, 2, True), (ASKED, 0, True)],
)
def test_nothing_is_kept_for_whom_none_wants_or_that_is_not_whole(
    params: dict[str, Any] | None, blocks: int, by_length: bool
) -> None:
    prefill = plan(PREFILL, DECODE)
    assert prefill.finished(prompt(params), range(blocks), by_length=by_length) is None
    assert not prefill.orders(0.0).kept


def test_a_server_of_one_role_does_not_do_the_others() -> None:
    assert plan(PREFILL, DECODE, produces=False).finished(prompt(ASKED), range(9), by_length=True) is None
    prefill_only = plan(DECODE, PREFILL, consumes=False)
    assert prefill_only.to_load(prompt(offered()), 0) == 0
    assert [each.why for each in prefill_only.orders(0.0).refused] == ["this server loads no KV"]


def test_what_is_not_cached_yet_is_loaded_into_the_last_blocks() -> None:
    decode, asked = plan(DECODE, PREFILL), prompt(offered())
    assert [decode.to_load(asked, 16), decode.to_load(asked, 16)] == [24, 24]
    decode.allocated(asked, (5, 6, 7, 8), 24)
    [load] = decode.orders(0.0).loads
    assert isinstance(load, KvLoad)
    assert (load.start, load.blocks, load.due, load.offer.tokens) == (1, (6, 7), 7.5, 40)
    assert decode.to_load(asked, 0) == 0, "a lost load is computed, and not tried again"
    decode.allocated(asked, (5, 6, 7, 8), 0)
    assert not decode.orders(0.0).unwanted


@pytest.mark.parametrize("cached", [39, 40])
def test_kv_of_a_prompt_that_is_cached_here_is_freed_there(cached: int) -> None:
    """vLLM computes the last token in any case."""
    decode, asked = plan(DECODE, PREFILL), prompt(offered())
    assert decode.to_load(asked, cached) == 0
    decode.allocated(asked, (5, 6, 7), 0)
    [unwanted] = decode.orders(0.0).unwanted
    assert isinstance(unwanted, PromptOffer)
    assert unwanted.secret == (asked.params or {})["slackline_kv"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"remote_host": "10.0.0.9"}, "none of the peers"),
        ({"remote_port": 22}, "none of the peers"),
        ({"remote_port": "14579"}, "no address"),
        ({"remote_host": None}, "no address"),
        ({"slackline_kv": "short"}, "not one of this connector"),
        ({"slackline_kv": 7}, "not one of this connector"),
        ({"slackline_tokens": -1}, "no number of tokens"),
        ({"slackline_tokens": 41}, "another prompt"),
        ({"slackline_prompt": "x"}, "another prompt"),
    ],
)
def test_an_offer_that_is_wrong_is_computed(
    changed: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode, asked = plan(DECODE, PREFILL), prompt(offered(**changed))
    assert [decode.to_load(asked, 0), decode.to_load(asked, 0)] == [0, 0]
    decode.allocated(asked, (1, 2, 3), 0)
    orders = decode.orders(0.0)
    assert not orders.loads
    assert not orders.unwanted
    secret = (asked.params or {})["slackline_kv"]
    assert [each.secret for each in orders.refused] == ([] if "slackline_kv" in changed else [secret])
    assert all(says in each.why for each in orders.refused)
    assert not decode.orders(0.0).refused
    assert [says in record.getMessage() for record in caplog.records] == [True], "and logged once"


def test_kv_depends_on_images_and_the_adapter_too() -> None:
    with_image = prompt(offered(), 40, "r", "image-1")
    assert plan(DECODE, PREFILL).to_load(with_image, 0) == 0


def test_what_ended_is_forgotten() -> None:
    decode = plan(DECODE, PREFILL)
    for _ in range(2):
        asked = prompt(offered())
        assert decode.to_load(asked, 0) == 40
        decode.allocated(asked, (5, 6, 7), 40)
        decode.finished(asked, (5, 6, 7), by_length=False)
    assert not decode._offers
    assert not decode._asked


# ---- settings --------------------------------------------------------------------------------------------------------

RIGHT: dict[str, Any] = {"host": "10.0.0.1", "peers": ["10.0.0.2:14579", "[fd00::2]:7"]}
ENVIRON = {"FLEET_TOKEN": "secret", "FLOW_SOCKET": "/run/flowd.sock"}


@pytest.mark.parametrize("peer", ["GPU-1:14579", "gpu-1:014579", "[gpu-1]:14579"])
def test_a_peer_may_be_written_in_several_ways(peer: str) -> None:
    assert settings_from({**RIGHT, "peers": [peer]}, 14579, ENVIRON).peers == {"gpu-1:14579"}


def test_settings_are_read() -> None:
    found = settings_from({**RIGHT, "lease_s": 5}, 14579, ENVIRON)
    assert (found.host, found.port, found.lease_s, found.flow_socket) == ("10.0.0.1", 14579, 5.0, "/run/flowd.sock")
    assert found.peer_hosts == {"10.0.0.2", "fd00::2"}


@pytest.mark.parametrize(
    ("changed", "port", "field"),
    [
        ({"host": ""}, 1, "host"),
        ({"host": None}, 1, "host"),
        ({"peers": []}, 1, "peers"),
        ({"peers": "10.0.0.2:1"}, 1, "peers"),
        ({"peers": ["10.0.0.2"]}, 1, "peers"),
        ({"peers": ["fd00::2:7"]}, 1, "peers"),
        ({"peers": ["[]:7"]}, 1, "peers"),
        ({"peers": ["10.0.0.2:70000"]}, 1, "peers"),
        ({"peers": [7]}, 1, "peers"),
        ({"lease_s": 0}, 1, "lease_s"),
        ({"lease_s": float("nan")}, 1, "lease_s"),
        ({"lease_s": True}, 1, "lease_s"),
        ({"shared_storage_path": "/tmp"}, 1, "shared_storage_path"),
        ({}, 0, "kv_port"),
    ],
)
def test_settings_that_are_wrong_are_named(changed: dict[str, Any], port: int, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_from({**RIGHT, **changed}, port, ENVIRON)
    assert refused.value.field == field


def test_no_server_starts_without_the_fleets_token() -> None:
    with pytest.raises(ConfigError, match="FLEET_TOKEN is not set"):
        settings_from(RIGHT, 1, {})


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_blocks_may_be_several_entries_of_a_cache() -> None:
    """Kernels may have smaller blocks than vLLM's scheduler."""
    array = np.arange(24, dtype=np.uint8).reshape(6, 4)
    blocks = CacheBlocks({"a": array}, 3, 32, "m")
    assert blocks.read(0, (2, 0)) == bytes([*range(16, 24), *range(8)])
    blocks.write(0, (1,), bytes(8))
    assert array[2:4].sum() == 0
    assert array[4, 0] == 16
    assert [blocks.holds((0, 2)), blocks.holds((3,)), blocks.holds((-1,))] == [True, False, False]


@pytest.mark.parametrize("shape", [(5, 4), (0, 4), (6,)])
def test_a_cache_of_another_form_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="form"):
        CacheBlocks({"a": np.zeros(shape, np.uint8)}, 3, 16, "m")


def test_layouts_differ_with_model_sizes_and_block_size() -> None:
    def of(width: int, tokens: int, about: str) -> dict[str, Any]:
        return CacheBlocks({"a": np.zeros((3, width), np.uint8)}, 3, tokens, about).layout

    found = [of(4, 16, "m"), of(8, 16, "m"), of(4, 32, "m"), of(4, 16, "n")]
    assert all(one != other for at, one in enumerate(found) for other in found[:at])
    assert of(4, 16, "m") == found[0]
