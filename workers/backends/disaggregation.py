"""The two legs of prefill/decode disaggregation in vLLM's dialect: what is asked for, and what the answer says."""

from __future__ import annotations

from typing import Any

import orjson

from controller.core.kv_links import KvMoved, moved_from_json
from workers.backends.base import EngineError, PrefillAnswer

# vLLM's pull connectors want every one of these named.
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
KV_MOVED = "x-slackline-kv"
KV_OFFER = "x-slackline-kv-offer"
NOT_FOR_PREFILL = ("stream_options", "stop", "max_completion_tokens")


def prefill_head(head: bytes, early: bool = False) -> bytes:
    """The body (without its closing brace) of the first leg: the same prompt, one token, nothing streamed. `early`:
    the offer is wanted before the answer.

    `stop_token_ids` stays, since that token may be one of them. So does `min_tokens`, as far as one token can keep it:
    without it that token could be the end of the sequence, which the client's request forbids, and nothing would seem
    to be left to decode. Nonsense is left to the engine to refuse.
    """
    body = orjson.loads(head + b"}")
    for name in NOT_FOR_PREFILL:
        body.pop(name, None)
    if _number(body.get("min_tokens")) > 1:
        body["min_tokens"] = 1
    params = {**REMOTE_DECODE, "early": True} if early else REMOTE_DECODE
    return orjson.dumps({**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params})[:-1]


def _number(value: object) -> float:
    """As vLLM reads one: it takes "50" and 50.0 for 50 too. 0 of what is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return 0.0


def kv_moved(header: str | bytes | None) -> KvMoved | None:
    """The header (of a stream: the comment) in which the reference engine says how the KV came; None where there is
    none that can be read."""
    try:
        return moved_from_json(orjson.loads(header)) if header else None
    except orjson.JSONDecodeError:
        return None


def parse_prefilled(raw: bytes) -> PrefillAnswer:
    """A prompt that ended by length has more to come; one that stopped with its first token has not."""
    try:
        answer = orjson.loads(raw)
        done = answer["choices"][0]["finish_reason"] != "length"
        params = answer.get("kv_transfer_params")
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(f"the engine answered a prefill with something else: {error!r}") from error
    return PrefillAnswer(orjson.dumps(params) if params else b"", done)
