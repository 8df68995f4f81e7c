"""Profiles a serving engine over HTTP and fits the latency model to it (HyperFlexis App. A, eq. 1 and 2).

It measures a grid of batch sizes and prompt lengths. For each point a batch of prompts of equal length is prefilled and
decoded together. A *blocker* request is sent first. While the engine computes it, the whole batch arrives and waits, so
the engine takes the batch in one step. The time from the blocker's token to the batch's first tokens is then the
prefill time of the batch, without the transport of its requests. It works with any engine that has OpenAI's completions
endpoint and accepts token ids as prompt.

    python -m workers.profiler --url http://127.0.0.1:8101 --model mid --output profile.json

Engines of several --url are profiled at the same time, so that engines that share a machine are measured under the
load of the others. Behind the --url of an engine with an API key stands --key-name NAME (its file in ENGINE_KEYS_DIR),
or --key-of INSTANCE (Slackline started it; FLEET_TOKEN must be set). The key is sent to that URL only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from controller.core.errors import ConfigError
from controller.core.types import KEY_MADE
from controller.predict.latency import LatencyModel
from controller.predict.latency_fit import (
    GRID_BATCHES,
    GRID_LENGTHS,
    DecodeSample,
    Fit,
    PrefillSample,
    fit,
)
from workers.http.engine_keys import NO_KEY, EngineKey, NoEngineKey

OUTPUT_TOKENS = 24
BLOCKER_TOKENS = 1536
BLOCKER_LEAD_S = 0.06  # after it the engine computes the blocker; a batch sent earlier could share its step
# The lead is at most this share of the blocker's own time; a fast engine would otherwise end it before the batch comes.
BLOCKER_LEAD_SHARE = 0.4
VOCABULARY = 1000
FIRST_PLAIN_TOKEN = 3
# A batch whose first tokens are further apart than this share of its time was not prefilled in one step.
MAX_SPREAD = 0.3
# An engine computes the tokens of a long prompt fastest. A batch much faster than that shared the blocker's step.
MIN_PACE = 0.4
MIN_DECODE_STEPS = 4
# Samples with a larger relative error against a first fit were disturbed by other programs on the machine.
OUTLIER = 0.5


@dataclass(frozen=True, slots=True)
class ProfilingLimits:
    """Bounds of the grid: concurrent sequences and context of the engine, tokens of a batch, and seconds to spend."""

    max_num_seqs: int = 32
    max_model_len: int = 4096
    batch_tokens: int = 8192
    budget_s: float = 120.0

    def points(self) -> list[tuple[int, int]]:
        """(batch, length) of App. A within the bounds, shuffled, so that a run cut short by its budget covers the whole
        grid evenly."""
        grid = [
            (batch, length)
            for batch in GRID_BATCHES
            for length in GRID_LENGTHS
            if batch <= self.max_num_seqs
            and length + OUTPUT_TOKENS <= self.max_model_len
            and (batch == 1 or batch * length <= self.batch_tokens)
        ]
        random.Random(0).shuffle(grid)
        return grid


@dataclass(slots=True)
class ProfileSamples:
    """Samples of one or more engines, and their fit."""

    prefill: list[PrefillSample] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    points: int = 0
    discarded: int = 0
    kv_capacity_tokens: int | None = None

    def fit(self) -> Fit:
        """Fit, then fit again without the samples whose error against the first fit exceeds OUTLIER."""
        model = LatencyModel(fit(self.prefill, self.decode).coefficients)
        prefill = [s for s in self.prefill if _close(model.prefill_sums(s.tokens, s.squares), s.seconds)]
        decode = [s for s in self.decode if _close(model.decode(s.batch, s.context_sum), s.seconds)]
        return fit(prefill, decode)

    def as_json(self, model: str, urls: Sequence[str]) -> dict[str, Any]:
        """A profile as `python -m workers.engine --profile` reads it, with coefficients by name (as in an instance's
        spec and in LatencyProfile), fit errors and raw samples."""
        fitted = self.fit()
        k = fitted.coefficients
        return {
            "id": f"{model}-profiled",
            "model": model,
            "engines": list(urls),
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "prefill": {"a": k.prefill_a, "b": k.prefill_b, "c": k.prefill_c},
            "decode": {"a": k.decode_a, "b": k.decode_b, "c": k.decode_c},
            "coefficients": k._asdict(),
            "fit": {key: value for key, value in asdict(fitted).items() if key != "coefficients"},
            "points": self.points,
            "discarded": self.discarded,
            "at": time.time(),
            "samples": {
                "prefill": [[s.tokens, s.squares, s.seconds] for s in self.prefill],
                "decode": [[s.batch, s.context_sum, s.seconds] for s in self.decode],
            },
        }


class ProfilingFailed(RuntimeError):
    """The engine returned an error or did not respond."""


class EngineProfiler:
    """Profiles one engine. Prompts are random, so that no prefix is reused. Methods that call it raise NoEngineKey if
    its key cannot be read or is for another address."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, seed: int, key: EngineKey = NO_KEY
    ) -> None:
        self.session = session
        self.url = url.rstrip("/")
        self.model = model
        self.key = key
        self.rng = random.Random(seed)
        self.lead_s = BLOCKER_LEAD_S

    async def run(self, limits: ProfilingLimits, profile: ProfileSamples) -> None:
        await self._stream(64, OUTPUT_TOKENS)  # the first request of an engine is slow
        await self.settle()
        profile.kv_capacity_tokens = await self.kv_capacity()
        deadline = time.monotonic() + limits.budget_s
        for batch, length in limits.points():
            if time.monotonic() > deadline:
                break
            await self.measure(batch, length, profile)

    async def settle(self) -> None:
        """Shorten the blocker's lead for a fast engine. Measured at the second blocker, since the first request of a
        size is slow."""
        for _ in range(2):
            sent = time.monotonic()
            blocker_s = (await self._stream(BLOCKER_TOKENS, 1))[0] - sent
        self.lead_s = min(BLOCKER_LEAD_S, BLOCKER_LEAD_SHARE * blocker_s)

    async def measure(self, batch: int, length: int, profile: ProfileSamples) -> None:
        """Measure one grid point. Adds its samples, or counts it as discarded if it was not computed as one batch."""
        sent = time.monotonic()
        blocker = asyncio.create_task(self._stream(BLOCKER_TOKENS, 1))
        await asyncio.sleep(self.lead_s)
        batch_sent = time.monotonic()
        streams = await asyncio.gather(*(self._stream(length, OUTPUT_TOKENS) for _ in range(batch)))
        start = (await blocker)[0]
        firsts = [times[0] for times in streams]
        prefill_s = max(firsts) - start
        fastest_s = MIN_PACE * (start - sent) * batch * length / BLOCKER_TOKENS
        profile.points += 1
        alone = start < batch_sent  # the engine was idle in between, which is not part of the batch's time
        if alone or prefill_s < fastest_s or max(firsts) - min(firsts) > MAX_SPREAD * prefill_s:
            profile.discarded += 1
        else:
            profile.prefill.append(PrefillSample(batch * length, batch * length * length, prefill_s))
        sample = decode_sample(streams, length)
        if sample is not None:
            profile.decode.append(sample)

    async def kv_capacity(self) -> int | None:
        """Tokens that the KV cache holds, from vLLM's metric `cache_config_info`; None if the engine has no such
        metric."""
        request = self.session.get(f"{self.url}/metrics", headers=self.key.headers(), allow_redirects=False)
        async with request as response:
            text = await response.text() if response.status == 200 else ""
        line = next((line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")), "")
        labels = dict(re.findall(r'(\w+)="(\d+)"', line))
        blocks, size = labels.get("num_gpu_blocks"), labels.get("block_size")
        return int(blocks) * int(size) if blocks and size else None

    async def _stream(self, length: int, output_tokens: int) -> list[float]:
        """Send one request. Returns the monotonic time of each token; raises ProfilingFailed."""
        body = {
            "model": self.model,
            "prompt": [self.rng.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(length)],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        times: list[float] = []
        target, headers = f"{self.url}/v1/completions", self.key.headers()
        async with self.session.post(target, json=body, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise ProfilingFailed(f"{self.url} returned {response.status}: {(await response.text())[:300]}")
            async for chunk in response.content.iter_any():
                times += [time.monotonic()] * chunk.count(b"data: {")
        if not times:
            raise ProfilingFailed(f"{self.url} sent no token")
        return times


def _close(predicted_s: float, measured_s: float) -> bool:
    return abs(predicted_s - measured_s) <= OUTLIER * measured_s


def decode_sample(streams: Sequence[Sequence[float]], length: int) -> DecodeSample | None:
    """Mean step time while the whole batch decodes: from the last first token to the first last token."""
    begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    inside = [sum(begin < at <= end for at in times) for times in streams]
    steps = sum(inside) / len(streams)
    if steps < MIN_DECODE_STEPS or end <= begin:
        return None
    before = sum(sum(at <= begin for at in times) for times in streams) / len(streams)
    context = round(len(streams) * (length + before + steps / 2))
    return DecodeSample(len(streams), context, (end - begin) / steps)


async def profile_engines(
    urls: Sequence[str], model: str, limits: ProfilingLimits, seed: int = 1, keys: Sequence[EngineKey] = ()
) -> ProfileSamples:
    """Profile all engines at the same time, into one ProfileSamples. `keys`: one for each URL, or none at all. Raises
    ProfilingFailed, NoEngineKey or aiohttp.ClientError."""
    profile, keys = ProfileSamples(), keys or [NO_KEY] * len(urls)
    # Engines close idle connections (vLLM after 5 s). Closing them earlier here keeps requests off a closing one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        profilers = [
            EngineProfiler(session, url, model, seed + index, key)
            for index, (url, key) in enumerate(zip(urls, keys, strict=True))
        ]
        await asyncio.gather(*(profiler.run(limits, profile) for profiler in profilers))
    return profile


class _Url(argparse.Action):
    """Another engine, which asks for no key unless an option behind its URL says so."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.url = [*(namespace.url or []), values]
        namespace.keys = [*namespace.keys, NO_KEY]


class _Key(argparse.Action):
    """The key of the engine whose URL stands before it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not namespace.url:
            raise argparse.ArgumentError(self, "must follow the --url that it is for")
        url = namespace.url[-1]
        key = EngineKey(values, url=url) if self.dest == "key_name" else EngineKey(KEY_MADE, values, url)
        namespace.keys = [*namespace.keys[:-1], key]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m workers.profiler", description="Profile a serving engine.")
    made.set_defaults(keys=[])
    made.add_argument("--url", action=_Url, required=True, help="base URL of an engine; may be repeated")
    made.add_argument(
        "--key-name",
        action=_Key,
        metavar="NAME",
        help="file in ENGINE_KEYS_DIR with the key of the --url before it",
    )
    made.add_argument(
        "--key-of", action=_Key, metavar="INSTANCE", help="instance at the --url before it, if Slackline started it"
    )
    made.add_argument("--model", required=True)
    made.add_argument("--output", type=Path, required=True, help="JSON file to write")
    made.add_argument("--max-num-seqs", type=int, default=32)
    made.add_argument("--max-model-len", type=int, default=4096)
    made.add_argument("--batch-tokens", type=int, default=8192, help="largest batch x length")
    made.add_argument("--budget", type=float, default=120.0, help="seconds to spend")
    made.add_argument("--seed", type=int, default=1)
    return made


def _check(keys: Sequence[EngineKey]) -> None:
    """Before anything is sent. Raises NoEngineKey, and ConfigError without the fleet's token."""
    for key in keys:
        if key.name and not key.value():
            raise ConfigError("FLEET_TOKEN or FLEET_TOKEN_FILE must be set for --key-of")


def main() -> int:
    arguments = parser().parse_args()
    limits = ProfilingLimits(arguments.max_num_seqs, arguments.max_model_len, arguments.batch_tokens, arguments.budget)
    try:
        _check(arguments.keys)
        profile = asyncio.run(profile_engines(arguments.url, arguments.model, limits, arguments.seed, arguments.keys))
        written = profile.as_json(arguments.model, arguments.url)
    except (ProfilingFailed, ConfigError, NoEngineKey, aiohttp.ClientError, TimeoutError) as error:
        print(f"profiling failed: {error or type(error).__name__}", file=sys.stderr)
        return 1
    arguments.output.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps({key: written[key] for key in ("coefficients", "fit", "points", "discarded")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
