"""Prometheus metrics with vLLM's names, labels and buckets, so that one dashboard and one backend read both."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from controller.core.steps import Seq
from controller.engine import EngineConfig, EngineScheduler

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
ITL = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),)
LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
LABELS = ("model_name", "engine")


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    series = (digit * 10**power for power in range(math.ceil(math.log10(max(limit, 2))) + 1) for digit in (1, 2, 5))
    return [value for value in series if value <= limit]


class Metrics:
    """The metrics of one engine. Histograms of requests are observed when a request ends; TTFT and inter-token latency
    when the token is emitted."""

    def __init__(self, model: str, config: EngineConfig, scheduler: EngineScheduler) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._values = (model, "0")
        self._scheduler = scheduler
        self._gauges()
        self._counters()
        self._histograms(config.max_model_len)
        self._cache_info(config)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def follow(self, scheduler: EngineScheduler) -> None:
        """The engine's scheduler from now on; gauges read it."""
        self._scheduler = scheduler

    # ---- definitions --------------------------------------------------------------------------------------------

    def _gauges(self) -> None:
        running = self._gauge("num_requests_running", "Requests in execution.")
        running.set_function(lambda: len(self._scheduler.running))
        waiting = self._gauge("num_requests_waiting", "Requests queued.")
        waiting.set_function(lambda: self._scheduler.waiting_count)
        usage = self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 is all.")
        usage.set_function(lambda: self._scheduler.blocks.usage)
        by_reason = self._gauges_by("num_requests_waiting_by_reason", "Requests queued, by reason.", "reason")
        by_reason.labels(*self._values, "capacity").set_function(lambda: self._scheduler.waiting_count)
        by_reason.labels(*self._values, "deferred").set(0)
        self._sleep = self._gauges_by("engine_sleep_state", "1 for the state the engine is in.", "sleep_state")
        self.sleep_state("awake")
        moves = "Sleeps and wake-ups under way."
        self.moves = Gauge("vllm:sleep_mode_operations_in_flight", moves, ["operation"], registry=self.registry)

    def sleep_state(self, state: str) -> None:
        for name in SLEEP_STATES:
            self._sleep.labels(*self._values, name).set(name == state)

    def _counters(self) -> None:
        self._preemptions = self._counter("num_preemptions", "Sequences put back into the queue for lack of KV blocks.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens prefilled.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        source = self._counters_by("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source")
        self._local = source.labels(*self._values, "local_compute")
        self._from_cache = source.labels(*self._values, "local_cache_hit")
        self._success = self._counters_by("request_success", "Requests ended, by reason.", "finished_reason")
        for reason in ("stop", "length", "abort", "error", "repetition"):
            self._success.labels(*self._values, reason)
        rejections = Counter(
            "vllm:admission_rejections", "Requests refused.", ("model_name", "reason"), registry=self.registry
        )
        self._rejections = rejections.labels(self._values[0], "max_num_queued_reqs")

    def _histograms(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        self._ttft = self._histogram("time_to_first_token_seconds", TTFT)
        self._itl = self._histogram("inter_token_latency_seconds", ITL)
        self._tpot = self._histogram("request_time_per_output_token_seconds", ITL)
        self._e2e = self._histogram("e2e_request_latency_seconds", LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", LATENCY)
        self._prefill = self._histogram("request_prefill_time_seconds", LATENCY)
        self._decode = self._histogram("request_decode_time_seconds", LATENCY)
        self._inference = self._histogram("request_inference_time_seconds", LATENCY)
        self._prompt_length = self._histogram("request_prompt_tokens", lengths)
        self._output_length = self._histogram("request_generation_tokens", lengths)
        self._max_tokens = self._histogram("request_params_max_tokens", lengths)
        self._kv_computed = self._histogram("request_prefill_kv_computed_tokens", lengths)
        self._preempted = self._histogram("request_num_preemptions", PREEMPTIONS)
        self._iteration = self._histogram("iteration_tokens_total", ITERATION)

    def _cache_info(self, config: EngineConfig) -> None:
        labels = {
            "engine": "0",
            "block_size": config.block_size,
            "num_gpu_blocks": config.kv_blocks,
            "enable_prefix_caching": config.prefix_caching,
        }
        info = Gauge("vllm:cache_config_info", "The KV cache's configuration.", labels, registry=self.registry)
        info.labels(**labels).set(1)

    def _gauges_by(self, name: str, text: str, *extra: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, (*LABELS, *extra), registry=self.registry)

    def _counters_by(self, name: str, text: str, *extra: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*LABELS, *extra), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._gauges_by(name, text).labels(*self._values)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters_by(name, text).labels(*self._values)

    def _histogram(self, name: str, buckets: tuple[float, ...] | list[int] | tuple[int, ...]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        family = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(*self._values)

    # ---- observations -------------------------------------------------------------------------------------------

    def token(self, seq: Seq, previous: float | None, now: float) -> None:
        """Count one token. `previous`: time of the token before it."""
        self._generated.inc()
        if previous is not None:
            self._itl.observe(now - previous)
            return
        self._ttft.observe(now - seq.arrival)
        self._prompt.inc(seq.prompt_tokens)

    def admitted(self, prompt: int, cached: int, caching: bool) -> None:
        self._local.inc(prompt - cached)
        self._from_cache.inc(cached)
        self._cached.inc(cached)
        if caching:
            self._queries.inc(prompt)
            self._hits.inc(cached)

    def step(self, tokens: int) -> None:
        self._iteration.observe(tokens)

    def preempted(self, times: int) -> None:
        self._preemptions.inc(times)

    def rejected(self) -> None:
        self._rejections.inc()

    def finished(self, seq: Seq, reason: str, now: float) -> None:
        self._success.labels(*self._values, reason).inc()
        self._e2e.observe(now - seq.arrival)
        self._prompt_length.observe(seq.prompt_tokens)
        self._output_length.observe(seq.output_tokens)
        self._max_tokens.observe(seq.max_tokens)
        self._preempted.observe(seq.preemptions)
        if seq.scheduled_at is None:
            return
        self._queue.observe(seq.scheduled_at - seq.arrival)
        if seq.first_token_at is None or seq.last_token_at is None:
            return
        self._kv_computed.observe(seq.prompt_tokens - min(seq.cached, seq.prompt_tokens))
        self._prefill.observe(seq.first_token_at - seq.scheduled_at)
        self._decode.observe(seq.last_token_at - seq.first_token_at)
        self._inference.observe(seq.last_token_at - seq.scheduled_at)
        if seq.output_tokens > 1:
            self._tpot.observe((seq.last_token_at - seq.first_token_at) / (seq.output_tokens - 1))
