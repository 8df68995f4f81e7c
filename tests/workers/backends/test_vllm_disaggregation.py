"""The first leg as vLLM's pull connectors want it, and what its answers mean."""

import orjson
import pytest

from controller.core.kv_links import BorrowedKv, KvMoved
from workers.backends.base import EngineError, PrefillAnswer
from workers.backends.vllm import parse_prefilled, prefill_head


def test_the_first_leg_asks_for_one_token_in_one_piece_and_nothing_that_contradicts_it():
    head = orjson.dumps(
        {
            "model": "m",
            "prompt": [1, 2],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 50,
            "max_completion_tokens": 50,
            "min_tokens": 4,
            "stop_token_ids": [7],
            "temperature": 0.5,
        }
    )[:-1]
    body = orjson.loads(prefill_head(head) + b"}")
    assert (body["stream"], body["max_tokens"], body["temperature"]) == (False, 1, 0.5)
    assert not {"stream_options", "max_completion_tokens"} & set(body)
    assert (body["min_tokens"], body["stop_token_ids"]) == (1, [7])
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    assert body["kv_transfer_params"]["do_remote_prefill"] is False


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({}, {}),
        ({"min_tokens": None}, {"min_tokens": None}),
        ({"min_tokens": 0}, {"min_tokens": 0}),
        ({"min_tokens": 1}, {"min_tokens": 1}),
        ({"min_tokens": 50}, {"min_tokens": 1}),
        ({"min_tokens": -1}, {"min_tokens": -1}),
        ({"min_tokens": "50"}, {"min_tokens": 1}),
        ({"min_tokens": 50.0}, {"min_tokens": 1}),
        ({"min_tokens": "many"}, {"min_tokens": "many"}),
        ({"min_tokens": [50]}, {"min_tokens": [50]}),
    ],
)
def test_the_first_leg_keeps_what_one_token_can_of_the_fewest_asked_for(asked: dict[str, object], sent: object):
    """One token at most: vLLM refuses more. Anything else the engine refuses, as without disaggregation."""
    body = orjson.loads(prefill_head(orjson.dumps({"prompt": [1], **asked})[:-1]) + b"}")
    assert {name: value for name, value in body.items() if name == "min_tokens"} == sent
    assert body["max_tokens"] == 1


def answer(finish: str, **extra: object) -> bytes:
    return orjson.dumps({"choices": [{"text": "a", "finish_reason": finish}], **extra})


def test_the_offer_is_passed_on_as_it_came():
    offer = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "x"}
    prefilled = parse_prefilled(answer("length", kv_transfer_params=offer))
    assert (orjson.loads(prefilled.offer), prefilled.done) == (offer, False)


def test_engines_that_find_the_kv_by_themselves_make_no_offer():
    assert parse_prefilled(answer("length", kv_transfer_params=None)) == PrefillAnswer(b"", False)


def test_a_prefix_that_was_borrowed_comes_with_the_answer_of_a_prefill():
    copied = BorrowedKv("p", KvMoved(bytes=8, tokens=2, seconds=0.5, held_s=0.25, flow="scheduled"))
    assert parse_prefilled(answer("length", kv_prefix=copied.as_json())).borrowed == copied
    assert parse_prefilled(answer("length", kv_prefix={"source": 7})).borrowed is None


def test_a_first_token_that_stops_leaves_nothing_to_decode():
    assert parse_prefilled(answer("stop")).done


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b'{"choices":[]}', b'{"choices":[{}]}'])
def test_anything_else_is_the_engines_error(raw):
    with pytest.raises(EngineError):
        parse_prefilled(raw)
