"""What FlowPrefill's scheduler keeps of an execution: a batch of prompts, submitted, preempted and resumed as one."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.errors import ConfigError
from controller.core.steps import BOUNDARIES, Boundary, Seq, SeqState, Step


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    """`boundary`: where a running batch may be suspended; the executor must stop there too. "none": nowhere.

    `chunk_tokens`: most tokens of one step; a batch of more runs as several, and each end is a boundary (None: a batch
    is one step). `decode_a`, `decode_b`, `decode_c`: predicted seconds of a decode step (HyperFlexis eq. 2), for
    sequences that decode here: on a prefill instance there are none. `decode_margin_s`: how much earlier than its last
    moment a decode step is wanted.
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
class Task:
    """`members`: head first. `step`: what runs or lies suspended of it; None between its chunks.

    `predicted_s`: of all its work; `used_s`: device seconds of the parts that have ended, while it does not run all of
    them.
    """

    members: list[Seq]
    predicted_s: float
    step: Step | None = None
    used_s: float = 0.0
    step_s: float = 0.0  # of `used_s`, taken by the present step before it was suspended
    since: float = 0.0  # when it last began to run
    signalled_at: float | None = None  # asked to stop, not answered yet

    @property
    def unfinished(self) -> list[Seq]:
        """Those whose prompt is still to be computed; the first of them stands for the task."""
        return [seq for seq in self.members if seq.state is SeqState.RUNNING and not seq.decoding]

    def needed_s(self, now: float, running: bool) -> float:
        """Predicted device seconds it still takes."""
        used = self.used_s + (now - self.since if running else 0.0)
        return max(0.0, self.predicted_s - used)


@dataclass(slots=True)
class RoundTotals:
    """Counts since the start. `blocking_*`: from a signal to its acknowledgement (FlowPrefill sec. 6.4), seconds."""

    rounds: int = 0
    submits: int = 0
    batched: int = 0  # prompts submitted under another's head
    preempts: int = 0
    resumes: int = 0
    signals: int = 0
    blocking_s: float = 0.0
    blocking_max_s: float = 0.0
    decode_turns: int = 0

    def blocked(self, seconds: float) -> None:
        self.blocking_s += seconds
        self.blocking_max_s = max(self.blocking_max_s, seconds)


def holds(step: Step | None, seq: Seq) -> bool:
    """Whether the step reads or writes the sequence's blocks."""
    return step is not None and (seq in step.decodes or any(chunk.seq is seq for chunk in step.chunks))
