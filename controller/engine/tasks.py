"""FlowPrefill's units of work: batches of prompts, preempted and resumed as one, and decode turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controller.core.errors import ConfigError
from controller.core.steps import BOUNDARIES, Boundary, Seq, SeqState, Step


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    """`boundary`: where a running batch may be suspended ("none": nowhere). The executor must support it.

    `chunk_tokens`: most tokens of one step. A larger batch runs as several steps, each end being a boundary (None: a
    batch is one step). `decode_a`, `decode_b`, `decode_c`: predicted seconds of a decode step (HyperFlexis eq. 2);
    unused on a prefill instance, where nothing decodes. `decode_margin_s`: a decode step starts this much before the
    last moment at which it still attains every TPOT.
    """

    boundary: Boundary = "operator"
    chunk_tokens: int | None = None
    decode_a: float = 0.02
    decode_b: float = 0.0
    decode_c: float = 0.0
    decode_margin_s: float = 0.005

    def __post_init__(self) -> None:
        if self.boundary not in BOUNDARIES:
            raise ConfigError(f"unknown boundary {self.boundary!r}; valid: {', '.join(BOUNDARIES)}", field="boundary")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError("chunk_tokens must be at least 1", field="chunk_tokens")
        if self.boundary == "chunk" and self.chunk_tokens is None:
            raise ConfigError("boundary chunk needs chunk_tokens", field="chunk_tokens")
        for name in ("decode_a", "decode_b", "decode_c", "decode_margin_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative", field=name)


@dataclass(slots=True, eq=False)
class PrefillTask:
    """A batch of prompts. `members`: head first. `step`: its running or suspended step; None between chunks.

    `predicted_s`: device seconds of all its work. `used_s`: device seconds of the parts that have ended.
    """

    members: list[Seq]
    predicted_s: float
    step: Step | None = None
    used_s: float = 0.0
    step_s: float = 0.0  # of `used_s`, taken by the present step before it was suspended
    since: float = 0.0  # when it last began to run
    signalled_at: float | None = None  # asked to stop, not answered yet
    layers: int = 0  # of a coming prefix, without which its suspended step cannot go on

    @property
    def unfinished(self) -> list[Seq]:
        """Members whose prompt is not yet computed. The first of them represents the task in the ranking."""
        return [seq for seq in self.members if seq.state is SeqState.RUNNING and not seq.decoding]

    @property
    def waits(self) -> bool:
        """Whether its step needs a layer that has not come."""
        return any(seq.coming is not None and seq.coming.layers < self.layers for seq in self.members)

    @property
    def has_lost(self) -> bool:
        """Whether it needs layers that will not come."""
        return any(seq.coming is not None and seq.coming.lost for seq in self.unfinished)

    def needed_s(self, now: float, running: bool) -> float:
        """Predicted device seconds until it is done."""
        used = self.used_s + (now - self.since if running else 0.0)
        return max(0.0, self.predicted_s - used)


@dataclass(slots=True)
class RoundTotals:
    """Counts since the start. `blocking_*`: seconds from a signal to its acknowledgement (FlowPrefill sec. 6.4)."""

    rounds: int = 0
    submits: int = 0
    batched: int = 0  # prompts submitted under another's head
    preempts: int = 0
    resumes: int = 0
    signals: int = 0
    blocking_s: float = 0.0
    blocking_max_s: float = 0.0
    decode_turns: int = 0
    layer_waits: int = 0  # times that a step stopped for a layer that was not here

    def blocked(self, seconds: float) -> None:
        self.blocking_s += seconds
        self.blocking_max_s = max(self.blocking_max_s, seconds)


def holds(step: Step | None, seq: Seq) -> bool:
    """Whether the step reads or writes the sequence's blocks."""
    return step is not None and (seq in step.decodes or any(chunk.seq is seq for chunk in step.chunks))


class DecodeTurns:
    """Decides when the sequences that decode on a prefill engine get the device: as late as their TPOT allows.

    Token n after the first is due n times the TPOT target after it (Kairos eq. 2 defines slack the same way).
    """

    def __init__(self, config: PreemptionConfig) -> None:
        self._config = config

    def due(self, decoding: Sequence[Seq], now: float) -> float | None:
        """When the next step of all of them must begin, at the earliest now; None if none has a TPOT target."""
        if not decoding:
            return None
        config = self._config
        context = sum(seq.tokens for seq in decoding)
        step_s = config.decode_a + config.decode_b * context + config.decode_c * len(decoding)
        last = min((seq.first_token_at or now) + seq.output_tokens * seq.tpot_s for seq in decoding)
        return None if math.isinf(last) else max(now, last - step_s - config.decode_margin_s)

    def is_due(self, decoding: Sequence[Seq], now: float) -> bool:
        due = self.due(decoding, now)
        return due is not None and due <= now
