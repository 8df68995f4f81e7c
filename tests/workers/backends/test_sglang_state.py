"""SGLang's figures over ranks and priorities."""

from __future__ import annotations

import orjson
import pytest

from controller.core.types import Role
from workers.backends.base import EngineError
from workers.backends.sglang_state import busy_with, parse_info, parse_loads, parse_metrics


def loads(*ranks: dict) -> bytes:
    return orjson.dumps({"loads": list(ranks)})


RANK = {
    "num_running_reqs": 2,
    "num_waiting_reqs": 1,
    "token_usage": 0.5,
    "max_total_num_tokens": 100,
    "max_running_requests": 4,
    "disaggregation": {"prefill_bootstrap_queue_reqs": 3, "decode_transfer_queue_reqs": 5},
}


@pytest.mark.parametrize(("role", "waiting"), [(Role.COLLOCATED, 2), (Role.PREFILL, 8), (Role.DECODE, 12)])
def test_ranks_are_summed_and_the_fullest_counts(role: Role, waiting: int) -> None:
    load = parse_loads(loads(RANK, {**RANK, "token_usage": 0.75}), 3.0, role)
    assert (load.running, load.waiting, load.kv_usage) == (4, waiting, 0.75)
    assert (load.kv_capacity_tokens, load.max_num_seqs, load.observed_at) == (200, 8, 3.0)


def test_whatever_keeps_it_busy_is_named() -> None:
    said = busy_with(loads(RANK))
    assert said == (
        "num_running_reqs 2, num_waiting_reqs 1, prefill_bootstrap_queue_reqs 3, decode_transfer_queue_reqs 5"
    )
    assert busy_with(loads({"num_running_reqs": 0})) == ""


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"loads":[]}', b'{"loads":[1]}'])
def test_an_unreadable_answer_is_no_load(raw: bytes) -> None:
    with pytest.raises(EngineError):
        parse_loads(raw, 0.0, Role.COLLOCATED)


def test_the_schedulers_role_counts_not_the_argument() -> None:
    info = parse_info(
        orjson.dumps({"disaggregation_mode": "prefill", "internal_states": [{"disaggregation_mode": "decode"}]})
    )
    assert info.role is Role.DECODE
    assert parse_info(b"{}").role is Role.COLLOCATED
    with pytest.raises(EngineError, match="encode"):
        parse_info(b'{"disaggregation_mode":"encode"}')


def test_metrics_of_priorities_and_ranks_are_counted_once() -> None:
    page = """# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{dp_rank="0",pid="7",priority="",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",pid="7",priority="-5",tp_rank="0"} 2.0
sglang:num_running_reqs{dp_rank="0",pid="7",priority="-9",tp_rank="0"} 1.0
sglang:num_running_reqs{dp_rank="1",pid="8",priority="",tp_rank="0"} 4.0
sglang:num_running_reqs{dp_rank="1",pid="9",priority="",tp_rank="1"} 4.0
sglang:num_queue_reqs{dp_rank="0"} 1.0
sglang:num_decode_transfer_queue_reqs{dp_rank="0"} 2.0
sglang:token_usage{dp_rank="0"} 0.5
sglang:token_usage{dp_rank="1"} 0.75
sglang:max_total_num_tokens{dp_rank="0"} 100.0
sglang:max_total_num_tokens{dp_rank="1"} 100.0
sglang:generation_tokens_total{is_streaming="true"} 5.0
sglang:generation_tokens_total{is_streaming="false"} 6.0
sglang:generation_tokens_created{is_streaming="false"} 1.7e9
"""
    assert parse_metrics(page) == {
        "running": 7.0,
        "waiting": 3.0,
        "usage": 0.75,
        "capacity": 200.0,
        "generation_tokens_total": 11.0,
    }
