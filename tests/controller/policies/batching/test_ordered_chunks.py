"""Chunked prefill in deadline order: FlowPrefill's DistServe-CP2K and -CP8K."""

import pytest

from controller.core.errors import ConfigError, UnknownName
from controller.core.steps import Seq
from controller.policies.batching.ordered_chunks import OrderedChunks, OrderedChunksConfig
from tests.controller.policies.batching.view import FakeView, decoding


def prompt(name, tokens, due, **fields):
    return Seq(name, fields.pop("arrival", 0.0), tokens, 1, due=due, ttft_s=due, **fields)


def composed(view, now=0.0, **config):
    return [(seq.id, tokens) for seq, tokens in OrderedChunks(OrderedChunksConfig(**config)).compose(view, now)]


def test_a_more_urgent_prompt_preempts_one_that_has_begun():
    begun = prompt("begun", 6000, 9.0, computed=2048)
    view = FakeView([begun], [prompt("urgent", 300, 0.5), prompt("late", 100, 20.0)], token_budget=2048)
    assert composed(view) == [("urgent", 300), ("begun", 1748)]


def test_short_prompts_share_a_chunk_and_the_last_is_cut():
    queue = [prompt(f"q{i}", 900, 1.0 + i) for i in range(3)]
    assert composed(FakeView([], queue, token_budget=2048)) == [("q0", 900), ("q1", 900), ("q2", 248)]


def test_decodes_come_first():
    view = FakeView([decoding("d")], [prompt("a", 500, 1.0)], token_budget=64)
    assert composed(view) == [("d", 1), ("a", 63)]


def test_orders():
    queue = [prompt("long", 5000, 0.4, arrival=0.0), prompt("short", 100, 0.9, arrival=0.1)]
    assert composed(FakeView([], queue, token_budget=100))[0][0] == "long"
    assert composed(FakeView([], queue, token_budget=100), ordering="s_edf")[0][0] == "short"
    assert composed(FakeView([], queue, token_budget=100), now=0.5, ordering="d_edf")[0][0] == "short"
    assert composed(FakeView([], queue[::-1], token_budget=100), ordering="fcfs")[0][0] == "long"


def test_bad_settings_are_refused():
    with pytest.raises(UnknownName) as unknown:
        OrderedChunksConfig(ordering="sjf")
    assert unknown.value.field == "ordering"
    with pytest.raises(ConfigError) as wrong:
        OrderedChunksConfig(prefill_b=0.0)
    assert wrong.value.field == "prefill_b"
