"""Adapter to vLLM's OpenAI server (V1 engine, 0.32 and newer), and to whatever speaks its HTTP dialect.

Rank goes into `priority` (low first, with `--scheduling-policy priority`), our id into `request_id`. The usage event
that every streamed body asks for is dropped unless the client asked for it too. Closing the connection aborts in vLLM.

Disaggregated, vLLM's pull connectors take two calls: the first computes the prompt and one token (`prefill_head`) and
answers where the KV waits (`parse_prefilled`); the second carries that as `kv_transfer_params`. Load comes from the
Prometheus page (`parse_load`), and so does whether the server's scheduler is Slackline's (`workers/vllm_plugin`): it
then also gets the request's targets, as the seconds that are left of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from controller.core.kv_links import borrowed_from_json
from controller.core.types import Load
from workers.backends.base import BACKENDS, CallTargets, Capabilities, EngineError, PrefillAnswer, UpstreamCall
from workers.backends.http import HttpBackend
from workers.vllm_plugin.hints import ANNOUNCED, PluginHints, hint_fields

# vLLM's pull connectors require every one of these.
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NOT_FOR_PREFILL = ("stream_options", "stop", "max_completion_tokens")
_ANNOUNCED = re.compile(rf"(?m)^{re.escape(ANNOUNCED)}(?:\{{[^}}]*\}})? 1\.0$")
NO_TARGETS = CallTargets(math.inf, math.inf)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SUMMED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
    "vllm:prefix_cache_hits_total": "cached_tokens_total",
}
_KV_USAGE = "vllm:kv_cache_usage_perc"
_SLEEP = "vllm:engine_sleep_state"
_CACHE = "vllm:cache_config_info"
_SLOTS = "vllm:max_num_seqs"  # only the reference engine reports it


@BACKENDS.register("vllm")
class VllmBackend(HttpBackend):
    """One vLLM server."""

    kind = "vLLM"
    capabilities = Capabilities(disaggregates=True)
    reads_hints = False  # its scheduler is Slackline's, as its metrics said when they were read last

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> PrefillAnswer:
        """The first call: one token, not streamed; its answer says where the KV waits."""
        early = self.capabilities.offers_early and ending is not None
        unary = replace(call, head=prefill_head(call.head, early), streamed=False, keep_usage=False)
        async for chunk in self.generate(unary):
            if chunk.offer and ending is not None:
                ending(chunk.offer)
            if chunk.kind == "body":
                return parse_prefilled(chunk.raw)
        raise EngineError("the engine ended the prefill without an answer")

    async def telemetry(self, now: float) -> Load:
        text = (await self._get("/metrics")).decode()
        self.reads_hints = _ANNOUNCED.search(text) is not None
        return parse_load(text, now)

    def body_of(self, call: UpstreamCall) -> bytes:
        head = with_hints(call) if self.reads_hints else call.head
        if call.salt:
            head += b'%s"cache_salt":"%s"' % (b"" if head.endswith(b"{") else b",", call.salt)
        return self._with_ours(head, call)

    def _with_ours(self, head: bytes, call: UpstreamCall) -> bytes:
        """Our fields go last; the client's own `request_id` and `priority` were stripped before."""
        tail = b'"priority":%d,"request_id":"%s"}' % (call.rank, call.request_id.encode())
        if call.offer:
            tail = b'"kv_transfer_params":%s,' % call.offer + tail
        return head + (b"" if head.endswith(b"{") else b",") + tail


# ---- disaggregation -------------------------------------------------------------------------------------------------


def prefill_head(head: bytes, early: bool = False) -> bytes:
    """The body (without its closing brace) of the first call: the same prompt, one token, not streamed. `early`: the
    offer is to come before the answer.

    `stop_token_ids` stays, since that token may be one of them. So does `min_tokens`, at most 1: without it that token
    could be the end of the sequence, which the client's request forbids, and nothing would seem to be left to decode.
    Invalid values are left for the engine to refuse.
    """
    body = orjson.loads(head + b"}")
    for name in NOT_FOR_PREFILL:
        body.pop(name, None)
    if _number(body.get("min_tokens")) > 1:
        body["min_tokens"] = 1
    params = {**REMOTE_DECODE, "early": True} if early else REMOTE_DECODE
    return orjson.dumps({**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params})[:-1]


def _number(value: object) -> float:
    """As vLLM reads one: "50" and 50.0 are 50 too. 0 for what is no number."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return 0.0


def parse_prefilled(raw: bytes) -> PrefillAnswer:
    """Raises EngineError for anything but an answer. One that ended by length has more to decode, any other has not."""
    try:
        answer = orjson.loads(raw)
        done = answer["choices"][0]["finish_reason"] != "length"
        params = answer.get("kv_transfer_params")
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(f"the engine answered a prefill with something else: {error!r}") from error
    return PrefillAnswer(orjson.dumps(params) if params else b"", done, borrowed_from_json(answer.get("kv_prefix")))


# ---- the plug-in ----------------------------------------------------------------------------------------------------


def with_hints(call: UpstreamCall) -> bytes:
    """The body (without its closing brace) with the request's targets and hints for the plug-in, beside the client's
    own `vllm_xargs`, which hold none of ours any more."""
    head, targets = call.head, call.targets or NO_TARGETS
    left_s = targets.ttft_s - max(0.0, targets.waited_s)
    hints = PluginHints(left_s, targets.ttft_s, targets.tpot_s, targets.value)
    fields = hint_fields(hints, call.hints.fields() if call.hints is not None else None)
    if not fields:
        return head
    if b'"vllm_xargs":' in head:
        body = orjson.loads(head + b"}")
        body["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), **fields}
        return orjson.dumps(body)[:-1]
    return head + (b"" if head.endswith(b"{") else b",") + b'"vllm_xargs":' + orjson.dumps(fields)


# ---- telemetry ------------------------------------------------------------------------------------------------------


def parse_load(text: str, observed_at: float) -> Load:
    """Load from the Prometheus page. Series that are missing stay at their defaults.

    Summed over data-parallel engines; KV usage is that of the fullest.
    """
    counts = dict.fromkeys(_SUMMED.values(), 0)
    usage, capacity, slots, asleep = 0.0, 0, 0, False
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name, _, _ = line.partition("{") if "{" in line else line.partition(" ")
        if name in _SUMMED:
            counts[_SUMMED[name]] += int(_value(line))
        elif name == _KV_USAGE:
            usage = max(usage, _value(line))
        elif name == _CACHE:
            capacity += _capacity(line)
        elif name == _SLOTS:
            slots += int(_value(line))
        elif name == _SLEEP and 'sleep_state="awake"' in line:
            asleep = asleep or _value(line) == 0.0
    return Load(
        observed_at=observed_at,
        running=counts["running"],
        waiting=counts["waiting"],
        kv_usage=usage,
        kv_capacity_tokens=capacity or None,
        max_num_seqs=slots or None,
        prompt_tokens_total=counts["prompt_tokens_total"],
        generation_tokens_total=counts["generation_tokens_total"],
        awake=not asleep,
        cached_tokens_total=counts["cached_tokens_total"],
    )


def _value(line: str) -> float:
    """Raises ValueError, IndexError."""
    value = float(line.rsplit(" ", 1)[1])
    if not math.isfinite(value):
        raise ValueError(f"a figure that is not finite: {line[:100]}")
    return value


def _capacity(line: str) -> int:
    labels = dict(_LABEL.findall(line))
    try:
        return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    except (KeyError, ValueError):  # a CPU or a test engine may say "None"
        return 0
