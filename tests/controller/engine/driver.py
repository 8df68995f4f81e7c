"""A driver for tests: runs an engine scheduler to its end on virtual time and keeps the books on what came out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from controller.core.steps import (
    Added,
    Emit,
    EngineEvent,
    Finish,
    FinishReason,
    Reject,
    Sampled,
    Seq,
    Start,
    Step,
    StepDone,
)
from controller.engine import EngineConfig, EngineScheduler
from controller.policies.batching import BATCHINGS, Batching


def make_seq(name: str, prompt: int | list[int] = 8, max_tokens: int = 4, **fields: object) -> Seq:
    """A list prompt gives token ids (prefixes can be shared), an int only a length."""
    ids = list(prompt) if isinstance(prompt, list) else None
    length = len(prompt) if isinstance(prompt, list) else prompt
    arrival = float(fields.pop("arrival", 0.0))
    return Seq(name, arrival, length, max_tokens, token_ids=ids, **fields)  # type: ignore[arg-type]


def next_token(seq: Seq) -> int:
    """What the model says depends on what it has seen so far: lost or doubled context would change it."""
    return (seq.prompt_tokens * 31 + seq.output_tokens * 7 + sum(map(ord, seq.id))) % 1000


class Driver:
    def __init__(self, batching: str | Batching = "chunked_prefill", **config: object) -> None:
        config.setdefault("kv_blocks", 64)
        config.setdefault("block_size", 4)
        config.setdefault("max_model_len", 64)
        config.setdefault("max_num_batched_tokens", 64)
        config.setdefault("max_num_seqs", 8)
        policy = BATCHINGS[batching]() if isinstance(batching, str) else batching
        self.scheduler = EngineScheduler(EngineConfig(**config), policy)  # type: ignore[arg-type]
        self.now = 0.0
        self.step: Step | None = None
        self.steps: list[Step] = []
        self.outputs: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, FinishReason] = {}
        self.rejected: dict[str, str] = {}
        self.eos_at: Callable[[Seq], int | None] = lambda seq: None

    def send(self, *events: EngineEvent) -> None:
        for action in self.scheduler.handle(events, self.now).actions:
            self._take(action)
        self.scheduler.check()

    def add(self, *seqs: Seq) -> None:
        self.send(*(Added(seq) for seq in seqs))

    def _take(self, action: object) -> None:
        match action:
            case Start(step):
                assert self.step is None, "two steps at a time"
                self._check_step(step)
                self.step = step
                self.steps.append(step)
            case Emit(seq, token, finish):
                assert seq.id not in self.ended, "a token after the end"
                self.outputs[seq.id].append(token)
                if finish is not None:
                    self._end(seq, finish)
            case Finish(seq, reason):
                self._end(seq, reason)
            case Reject(seq, code):
                self.rejected[seq.id] = code

    def _end(self, seq: Seq, reason: FinishReason) -> None:
        assert seq.id not in self.ended, "ended twice"
        self.ended[seq.id] = reason

    def _check_step(self, step: Step) -> None:
        members = [chunk.seq for chunk in step.chunks] + list(step.decodes)
        assert len({seq.id for seq in members}) == len(members), "a sequence twice in a step"
        assert len(members) <= self.scheduler.config.max_num_seqs
        for chunk in step.chunks:
            assert chunk.length > 0
            assert chunk.start == chunk.seq.computed
            assert chunk.last == (chunk.start + chunk.length == chunk.seq.tokens)

    def finish_step(self) -> None:
        step, self.step = self.step, None
        assert step is not None, "no step runs"
        self.now += 1.0
        seqs = [chunk.seq for chunk in step.chunks if chunk.last] + list(step.decodes)
        sampled = [Sampled(seq, next_token(seq), eos=self.eos_at(seq) == seq.output_tokens) for seq in seqs]
        self.send(StepDone(step.id, sampled, 1.0))

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if self.step is None:
                return
            self.finish_step()
        raise AssertionError("the engine does not come to an end")


def expected_output(seq: Seq) -> list[int]:
    """What `next_token` says for a whole generation, whatever the batching."""
    probe = make_seq(seq.id, seq.prompt_tokens)
    found = []
    for index in range(seq.max_tokens):
        probe.output_tokens = index
        found.append(next_token(probe))
    return found


def order_of_first_tokens(driver: Driver) -> list[str]:
    """Ids in the order in which their prefill completed."""
    return [chunk.seq.id for step in driver.steps for chunk in step.chunks if chunk.last]


def names(seqs: Sequence[Seq]) -> list[str]:
    return [seq.id for seq in seqs]
