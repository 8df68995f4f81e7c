"""A workload of programs in an experiment file: Concord's mix of latency, deadline and compound requests (ch. 6.1).

    {"kind": "programs", "programs": 2400, "rate": 2.5, "shares": [1, 1, 1], "slo_scale": 1.0, "cv": 1.09,
     "foresight": {"kind": "noisy", "length_error": 0.5, "graph_error": 0.3}}

- `rate`: programs/s. Arrivals are a renewal process, or the gaps between a trace's requests (`gaps`: its path), scaled
  to the rate, from an offset that depends on the seed and repeated as often as needed.
- `foresight`: what engines are told of lengths and graphs: the truth (`oracle`), the truth with an error (`noisy`) or a
  mean (`blind`). An entry of `policies` may have its own.
- The time of stages is learned as programs end, starting from a decode step of a full batch.
- `goodput_in` requests counts each program as 1 instead of its tokens. `stage_deadlines` names the rule by which stages
  share a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients
from controller.predict.latency import LatencyModel
from controller.simulator.fields import Fields
from controller.simulator.workloads.arrivals import renewal_times
from controller.simulator.workloads.concord_mix import LONGEST_ANSWER, LONGEST_PROMPT, ConcordMix
from controller.simulator.workloads.demand import Demand
from controller.simulator.workloads.foresight import Blind, Noisy, Oracle
from controller.simulator.workloads.programs import Foresight, Programs, Speeds
from controller.simulator.workloads.stage_pace import StagePace
from controller.slo.stage_deadlines import STAGE_DEADLINES

FORESIGHTS = ("noisy", "oracle", "blind")
MEAN_OUTPUT, MEAN_TOKENS = 320, 4_300.0  # means of a call and of a program of the even mix, used by `blind`
FULL_BATCH, FULL_CONTEXT = 96, 1000  # length of the sequences of a full batch, which gives the initial pace of stages
OFFSET = 3_863  # gaps of a trace between the offsets of two seeds; prime, so that they do not coincide


@dataclass(frozen=True, slots=True)
class ProgramMix:
    """`gaps`: seconds between a trace's requests; empty: a renewal process with `cv`."""

    mix: ConcordMix
    count: int
    rate: float | None
    cv: float
    gaps: tuple[float, ...]
    foresight: Foresight
    goodput_in: str = "tokens"
    stage_deadlines: str = "accumulated"

    def programs(
        self, rate: float | None, seed: int, latency: LatencyCoefficients, foresight: Foresight | None = None
    ) -> Programs:
        """The programs of one run.

        `latency`: assumed step times, which give the initial pace of stages. `foresight`: in place of the workload's
        own.
        """
        foresight = foresight or self.foresight
        if isinstance(foresight, Noisy):
            foresight = replace(foresight, seed=seed)
        step_s = LatencyModel(latency).decode(FULL_BATCH, FULL_BATCH * FULL_CONTEXT)
        return Programs(
            self.mix.programs(self._times(rate, seed), seed),
            foresight,
            Speeds(step_s, latency.prefill_b),
            self.goodput_in,
            StagePace(),
            self.stage_deadlines,
        )

    def demands(self, rate: float | None, seed: int) -> list[Demand]:
        """The calls of first stages, which wait for no others. The run itself releases the later ones."""
        return self.programs(rate, seed, LatencyCoefficients(0.0, 1e-4, 0.0, 0.03, 0.0, 0.0)).first()

    def _times(self, rate: float | None, seed: int) -> list[float]:
        wanted = rate or self.rate
        if wanted is None:
            raise ConfigError("this workload needs a rate", field="workload.rate")
        if not self.gaps:
            return renewal_times(np.random.default_rng([seed, 5]), wanted, count=self.count, cv=self.cv)
        offset = seed * OFFSET % len(self.gaps)
        chosen = np.take(np.asarray(self.gaps), range(offset, offset + self.count), mode="wrap")
        if not chosen.sum() > 0:
            raise ConfigError("this trace's requests all come at once", field="workload.gaps")
        times: list[float] = (np.cumsum(chosen) * (self.count / wanted / chosen.sum())).tolist()
        return times


def read_program_mix(fields: Fields, recorded: list[float], longest: int) -> ProgramMix:
    """`recorded`: arrival times of the trace that `gaps` names, if any.

    `longest`: most tokens that an engine accepts.
    """
    if longest < LONGEST_PROMPT + LONGEST_ANSWER:
        least = LONGEST_PROMPT + LONGEST_ANSWER
        raise ConfigError(
            f"calls of programs have up to {least} tokens; engines take {longest}", field="instances.max_model_len"
        )
    shares = [fields.check_number(share, "shares", -1e-12) for share in fields.list("shares", [1, 1, 1])]
    if len(shares) != 3:
        raise ConfigError("shares must be three numbers: latency, deadline, compound", field=fields.name("shares"))
    slo_scale = fields.number("slo_scale", 1.0, above=0)
    try:
        mix = ConcordMix((shares[0], shares[1], shares[2]), slo_scale)
    except ConfigError as error:
        raise ConfigError(str(error), field=fields.name(error.field or "")) from None
    cv = fields.number("cv", 1.0, above=-1e-9)
    return ProgramMix(
        mix=mix,
        count=fields.integer("programs"),
        rate=fields.optional_number("rate", above=0),
        cv=cv,
        gaps=_gaps(recorded),
        foresight=read_foresight(fields.object("foresight")),
        goodput_in=fields.text("goodput_in", "tokens", valid=("tokens", "requests")),
        stage_deadlines=fields.text("stage_deadlines", "accumulated", valid=STAGE_DEADLINES),
    )


def _gaps(recorded: list[float]) -> tuple[float, ...]:
    """Gaps between requests; the first request follows the last one after a mean gap."""
    if not recorded:
        return ()
    at = np.sort(np.asarray(recorded))
    mean = float(at[-1] - at[0]) / max(1, len(at) - 1)
    gaps: list[float] = np.diff(at, append=at[-1] + mean).tolist()
    return tuple(gaps)


def read_foresight(fields: Fields) -> Foresight:
    kind = fields.text("kind", "noisy", valid=FORESIGHTS)
    found: Foresight
    if kind == "noisy":
        usual = Noisy()
        length, graph = (
            fields.number(name, getattr(usual, name), above=-1e-12) for name in ("length_error", "graph_error")
        )
        found = Noisy(length, fields.number("quantile", usual.quantile, above=-1e-12), graph)
    elif kind == "blind":
        found = Blind(fields.integer("mean_output", MEAN_OUTPUT), fields.number("mean_tokens", MEAN_TOKENS, above=0))
    else:
        found = Oracle()
    fields.done()
    return found
