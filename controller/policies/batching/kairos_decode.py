"""Kairos' slack-guided decode: run the short sequences alone while the long ones can wait.

"Kairos: Taming Request Imbalance, SLO-Aware Scheduling for Disaggregated LLM Inference", Alg. 3 and eq. 2. A table of
step times by (batch, longest sequence) says how long a step would take. Each active sequence has the slack

    TPOT x (n + 1) - time since its first token - table[reserve, its length],      n = decode tokens so far

and, taken in ascending order of length, a sequence joins the step if its step time at the grown batch stays within the
smallest slack of all and the step's throughput rises; if nobody can join, all decode. Tokens come in bursts: attainment
is by the mean. The table starts from a profile and keeps the mean of what is observed in decode-only steps; the profile
counts as 100 samples (the paper profiles 100 runs an entry).

`reserve`: "active" (the default, read) reserves a step of the whole active set; "solo", as printed, reserves table[1]
and is late whenever the delayed sequence then runs in a full batch. `length_bucket`: table entries are that many tokens
wide. `profile`, seconds of a step: "equal" (the default) is decode_a + batch x (decode_b x longest + decode_c), a batch
of equal lengths, as an offline profile measures it; "longest" is decode_a + decode_b x longest + batch x decode_c: the
longest sequence alone sets the pace (sec. 2.2).

The TPOT is each sequence's own; one without a promise never limits the others and always joins last by length. On a
collocated engine prompts get what the decodes leave of the budget, in the engine's order (the paper's decode instances
have none). Not steady: the choice changes with time. Cost: O(n log n) in decoding sequences a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from controller.core.errors import ConfigError
from controller.core.steps import EngineEvent, Seq, StepRan
from controller.policies.batching.base import BATCHINGS, EngineView, Grant
from controller.policies.batching.filling import fill, prompts, queued

PROFILED_RUNS = 100


@dataclass(frozen=True, slots=True)
class KairosDecodeConfig:
    decode_a: float = 0.009
    decode_b: float = 2.4e-7
    decode_c: float = 1e-4
    reserve: str = "active"
    length_bucket: int = 256
    profile: str = "equal"

    def __post_init__(self) -> None:
        if self.profile not in ("equal", "longest"):
            raise ConfigError(f"unknown profile {self.profile!r}; valid: equal, longest", field="profile")
        if self.reserve not in ("active", "solo"):
            raise ConfigError(f"unknown reserve {self.reserve!r}; valid: active, solo", field="reserve")
        if self.length_bucket < 1:
            raise ConfigError("length_bucket must be at least 1 token", field="length_bucket")
        if min(self.decode_a, self.decode_b, self.decode_c) < 0 or self.decode_a + self.decode_c <= 0:
            raise ConfigError("the decode profile must be positive", field="decode_a")

    def step_s(self, batch: int, longest: int) -> float:
        """Profiled seconds of a decode step."""
        lengths = batch if self.profile == "equal" else 1
        return self.decode_a + lengths * self.decode_b * longest + batch * self.decode_c


class StepTable:
    """Mean step seconds by (batch, length). What was never observed is the profile's."""

    def __init__(self, profile: Callable[[int, int], float], bucket: int = 1) -> None:
        self.profile = profile
        self.bucket = bucket
        self._rows: dict[int, dict[int, tuple[float, int]]] = {}

    def row(self, batch: int) -> Mapping[int, tuple[float, int]]:
        """(mean, count) by bucket of what was observed of steps of `batch`."""
        return self._rows.get(batch, {})

    def seconds(self, batch: int, length: int) -> float:
        entry = self.row(batch).get(length // self.bucket)
        return entry[0] if entry is not None else self.profile(batch, length)

    def observe(self, batch: int, length: int, seconds: float) -> None:
        """One more sample of a step of `batch` sequences, the longest of `length` tokens."""
        row, key = self._rows.setdefault(batch, {}), length // self.bucket
        mean, count = row.get(key, (self.profile(batch, length), PROFILED_RUNS))
        row[key] = (mean + (seconds - mean) / (count + 1), count + 1)


class Active(NamedTuple):
    """A decoding sequence: `generated` decode tokens since the one that prefill gave. Order: by length, then id."""

    length: int
    id: str
    first_token_at: float
    generated: int
    tpot_s: float
    seq: Seq | None = None


Row = tuple[int, str, float, int, float, Seq | None]  # an Active, or what it is made of: there are millions of them


def slack(active: Active, reserved_s: float, now: float) -> float:
    """Eq. 2, seconds."""
    return active.tpot_s * (active.generated + 1) - (now - active.first_token_at) - reserved_s


def choose(actives: Sequence[Row], table: StepTable, now: float, reserve: str = "active") -> list[Row]:
    """Alg. 3: who decodes in this step, ascending by length. Never empty while anybody is active.

    It runs in every step: the table's look-ups (StepTable.seconds) and eq. 2 (slack) are written out.
    """
    if not actives:
        return []
    bucket, profile = table.bucket, table.profile
    ordered = sorted(actives)
    batch = len(ordered) if reserve == "active" else 1
    row, least = table.row(batch), math.inf
    for length, _, first_token_at, generated, tpot_s, _ in ordered:
        entry = row.get(length // bucket)
        reserved_s = entry[0] if entry is not None else profile(batch, length)
        left = tpot_s * (generated + 1) - (now - first_token_at) - reserved_s
        if left < least:  # noqa: PLR1730 (a call for each sequence and step costs more than the rest)
            least = left
    joined: list[Row] = []
    count, row, throughput = 1, table.row(1), 0.0
    for active in ordered:
        entry = row.get(active[0] // bucket)
        step = entry[0] if entry is not None else profile(count, active[0])
        if step <= least and count / step > throughput:
            joined.append(active)
            throughput = count / step
            count += 1
            row = table.row(count)
    return joined or ordered


@BATCHINGS.register("kairos_decode")
class KairosDecode:
    name: ClassVar[str] = "kairos_decode"
    Config = KairosDecodeConfig

    def __init__(self, config: KairosDecodeConfig | None = None) -> None:
        self.config = config or KairosDecodeConfig()
        self.table = StepTable(self.config.step_s, self.config.length_bucket)

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        running = engine.running
        actives: list[Row] = [
            (length, seq.id, seq.first_token_at or 0.0, seq.output_tokens - 1, seq.tpot_s, seq)
            for seq in running
            if seq.output_tokens and (length := seq.prompt_tokens + seq.output_tokens) - seq.computed == 1  # decoding
        ]
        chosen = choose(actives, self.table, now, self.config.reserve)
        grants = [Grant(active[5], 1) for active in chosen if active[5] is not None][: engine.token_budget]
        waiting = prompts(engine) if len(actives) < len(running) else queued(engine)
        return grants + fill(engine, waiting, engine.token_budget - len(grants))

    def observe(self, event: EngineEvent, now: float) -> None:
        if isinstance(event, StepRan) and event.step.decodes and not event.step.chunks and event.seconds > 0:
            longest = event.step.decodes[-1].tokens - event.repeats  # as `choose` ordered them
            self.table.observe(len(event.step.decodes), longest, event.seconds / event.repeats)
