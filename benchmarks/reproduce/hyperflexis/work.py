"""What the engines of a run did and where its requests' time went: the measured values that name a cause."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.simulator import RunResult


class RoleUse(NamedTuple):
    """All instances of one role. Instance-seconds with a running step and provisioned, steps, generated tokens."""

    busy_s: float
    provisioned_s: float
    steps: float
    tokens: float

    @property
    def share(self) -> float:
        """Of their time in which they compute."""
        return self.busy_s / self.provisioned_s if self.provisioned_s else 0.0


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Means over the runs of a point; without runs all values are 0.

    `ended_s`, `arrived_s`: when the last answer ended and the last request came. `first_s`, `after_s`: mean seconds of
    answered requests until their first token and from there to the end. `late`: share of the requests that miss their
    TTFT; `slow`: that keep it and miss their TPOT.
    """

    roles: Mapping[str, RoleUse] = field(default_factory=dict)
    ended_s: float = 0.0
    arrived_s: float = 0.0
    first_s: float = 0.0
    after_s: float = 0.0
    late: float = 0.0
    slow: float = 0.0

    @property
    def busy_s(self) -> float:
        return sum(use.busy_s for use in self.roles.values())

    @property
    def provisioned_s(self) -> float:
        return sum(use.provisioned_s for use in self.roles.values())

    @property
    def busy(self) -> float:
        """Share of the instances' time in which a step ran."""
        return self.busy_s / self.provisioned_s if self.provisioned_s else 0.0

    @property
    def tokens(self) -> float:
        return sum(use.tokens for use in self.roles.values())

    @property
    def load(self) -> float:
        """What the busiest role computes in all, over what its instances (their mean number) could until the last
        request came.
        """
        if not self.arrived_s:
            return 0.0
        return max((use.share * self.ended_s / self.arrived_s for use in self.roles.values()), default=0.0)

    @property
    def decoding(self) -> RoleUse:
        """The instances that generate the answers."""
        return RoleUse(*map(sum, zip(*(use for role, use in self.roles.items() if role != "prefill"), strict=True)))

    def instances(self, role: str) -> float:
        """Their mean number."""
        return self.roles[role].provisioned_s / self.ended_s if self.ended_s else 0.0


def work_of(results: Sequence[RunResult]) -> EngineWork:
    """Of runs with at least one request each."""
    runs = len(results)
    summed: dict[str, list[float]] = {}
    for result in results:
        for use in result.instances:
            own = summed.setdefault(use.role, [0.0] * len(RoleUse._fields))
            for index, value in enumerate((use.busy_s, use.provisioned_s, use.steps, use.generated_tokens)):
                own[index] += value / runs
    records = [record for result in results for record in result.records]
    times = [(r.ttft_s, r.e2e_s - r.ttft_s) for r in records if r.ttft_s is not None and r.e2e_s is not None]
    return EngineWork(
        {role: RoleUse(*values) for role, values in sorted(summed.items(), reverse=True)},
        statistics.fmean(result.ended_at for result in results),
        statistics.fmean(max(record.at for record in result.records) for result in results),
        statistics.fmean(first for first, _ in times) if times else 0.0,
        statistics.fmean(after for _, after in times) if times else 0.0,
        statistics.fmean(not record.ttft_met for record in records),
        statistics.fmean(record.ttft_met and not record.tpot_met for record in records),
    )
