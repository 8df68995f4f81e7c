"""Kairos' testbed on virtual time: one prefill and one decode engine, each a tensor-parallel group of four GPUs.

The engines are `EngineScheduler`s with the batching policies that serve. KV is transferred as in disaggregated serving
(blocks are reserved before, and kept until it has arrived). A decode step costs what its longest sequence costs (the
paper, sec. 2.2) or the sum over all, as `decode_by` of the simulator; there is no gateway here, as in the paper.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from controller.core.steps import (
    Added,
    EngineEvent,
    Finish,
    Landed,
    Reserve,
    Reserved,
    Seq,
    Start,
    Step,
    StepsDone,
)
from controller.core.types import LatencyCoefficients
from controller.engine import EngineConfig, EngineScheduler
from controller.policies.batching import BATCHINGS
from controller.predict.latency import LatencyModel

MAX_MODEL_LEN = 160_000
BLOCK = 16
PREFILL_BLOCKS = 1 << 18  # the prefill engine never runs out of KV


class StageCall(NamedTuple):
    """One request of the workload, arriving `at` seconds after the start."""

    at: float
    prompt_tokens: int
    output_tokens: int


class StageOutcome(NamedTuple):
    """Seconds. `tpot_s` is the mean over all tokens after the first, 0 for one token."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class StagePolicy:
    """A batching policy by name, with its settings."""

    batching: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        implementation: Any = BATCHINGS[self.batching]
        return implementation(implementation.Config(**self.settings))


@dataclass(frozen=True, slots=True)
class Testbed:
    """Sizes and costs.

    `decode_by`: "longest" (the paper) or "sum" (of all lengths). `kv_tokens`: capacity of the decode engine. `chunk`:
    the prefill chunk. `link_tokens_per_s`: tokens of the model's KV that NVLink moves.
    """

    latency: LatencyCoefficients
    chunk: int = 8_192
    kv_tokens: int = 1_000_000
    decode_slots: int = 64
    decode_by: str = "longest"
    link_tokens_per_s: float = 2e6
    ttft_s: float = 8.0
    tpot_s: float = 0.05


class _Engine:
    """An engine scheduler on virtual time, one step at a time. `due`: the end of a step that just began."""

    def __init__(self, config: EngineConfig, policy: StagePolicy, cost: Callable[[Step], float]) -> None:
        self.scheduler = EngineScheduler(config, policy.build())
        self.due: float | None = None
        self._cost = cost
        self._step: Step | None = None
        self._seconds = 0.0

    def tell(self, events: Sequence[EngineEvent], now: float) -> list[Seq]:
        """Sequences that ended; a step that starts sets `due`."""
        ended = []
        for action in self.scheduler.handle(events, now).actions:
            if isinstance(action, Start):
                self._step, self._seconds = action.step, self._cost(action.step)
                self.due = now + self._seconds
            elif isinstance(action, Finish):
                ended.append(action.seq)
        return ended

    def done(self, now: float) -> list[Seq]:
        step = self._step
        if step is None:
            raise RuntimeError("no step is running")
        self._step = None
        return self.tell([StepsDone(step.id, 1, self._seconds)], now)


class Stages:
    """One run: `prefill` and `decode` policies on the calls of a workload, until all are answered."""

    def __init__(self, bed: Testbed, prefill: StagePolicy, decode: StagePolicy) -> None:
        self.bed = bed
        self.model = LatencyModel(bed.latency)
        slots = bed.decode_slots
        prefill_config = EngineConfig(PREFILL_BLOCKS, BLOCK, 512, bed.chunk, MAX_MODEL_LEN, "fcfs", None, False)
        decode_config = EngineConfig(
            bed.kv_tokens // BLOCK, BLOCK, slots, max(slots, 2048), MAX_MODEL_LEN, "fcfs", None, False
        )
        self.prefill = _Engine(prefill_config, prefill, self._cost_of_prefill)
        self.decode = _Engine(decode_config, decode, self._cost_of_decode)
        self.unplaced: deque[Seq] = deque()  # prefilled, waiting for blocks on the decode engine
        self.wanted: dict[str, StageCall] = {}
        self.outcomes: list[StageOutcome] = []
        self._heap: list[tuple[float, int, str, Any]] = []
        self._serial = 0

    def run(self, calls: Sequence[StageCall]) -> list[StageOutcome]:
        self.wanted = {str(index): call for index, call in enumerate(calls)}
        for name, call in self.wanted.items():
            self._push(call.at, "arrival", name)
        while self._heap:
            now, _, kind, subject = heapq.heappop(self._heap)
            if kind == "arrival":
                self._prefilled(self.prefill.tell([Added(self._prompt(subject))], now), now)
            elif kind == "prefill":
                self._prefilled(self.prefill.done(now), now)
            elif kind == "landed":
                self._decoded(self.decode.tell([Landed(subject)], now), now)
            else:
                self._decoded(self.decode.done(now), now)
                self._place(now)
        return self.outcomes

    def _push(self, at: float, kind: str, subject: Any = None) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, kind, subject))

    def _prompt(self, name: str) -> Seq:
        """The prefill of the request, which ends with the first token."""
        call = self.wanted[name]
        due = call.at + self.bed.ttft_s
        return Seq(name, call.at, call.prompt_tokens, 1, ignore_eos=True, due=due, ttft_s=self.bed.ttft_s)

    def _prefilled(self, ended: Sequence[Seq], now: float) -> None:
        if self.prefill.due is not None:
            self._push(self.prefill.due, "prefill")
            self.prefill.due = None
        for prompt in ended:
            call = self.wanted[prompt.id]
            if call.output_tokens == 1:
                self._answered(prompt.id, now, now)
                continue
            self.unplaced.append(
                Seq(
                    prompt.id, now, call.prompt_tokens, call.output_tokens, ignore_eos=True, output_tokens=1,
                    first_token_at=now, last_token_at=now, tpot_s=self.bed.tpot_s,
                )
            )  # fmt: skip
        if ended:
            self._place(now)

    def _place(self, now: float) -> None:
        """In order of prefill, while the decode engine has blocks."""
        while self.unplaced:
            seq = self.unplaced[0]
            if not isinstance(self.decode.scheduler.handle([Reserve(seq)], now).actions[0], Reserved):
                return
            self.unplaced.popleft()
            self._push(now + seq.tokens / self.bed.link_tokens_per_s, "landed", seq)

    def _decoded(self, ended: Sequence[Seq], now: float) -> None:
        if self.decode.due is not None:
            self._push(self.decode.due, "decode")
            self.decode.due = None
        for seq in ended:
            self._answered(seq.id, seq.first_token_at or now, now)

    def _answered(self, name: str, first_at: float, now: float) -> None:
        call = self.wanted[name]
        tpot = (now - first_at) / (call.output_tokens - 1) if call.output_tokens > 1 else 0.0
        self.outcomes.append(StageOutcome(call.prompt_tokens, call.output_tokens, first_at - call.at, tpot))

    def _cost_of_prefill(self, step: Step) -> float:
        tokens = sum(chunk.length for chunk in step.chunks)
        squares = sum(chunk.length * (chunk.length + 2 * chunk.start) for chunk in step.chunks)
        return self.model.step(tokens, squares, len(step.decodes), step.context_sum)

    def _cost_of_decode(self, step: Step) -> float:
        """Includes chunks only if an evicted sequence is computed again."""
        if self.bed.decode_by == "sum" or not step.decodes:
            return self._cost_of_prefill(step)
        tokens = sum(chunk.length for chunk in step.chunks)
        squares = sum(chunk.length * (chunk.length + 2 * chunk.start) for chunk in step.chunks)
        return self.model.step(tokens, squares, len(step.decodes), max(seq.tokens for seq in step.decodes))
