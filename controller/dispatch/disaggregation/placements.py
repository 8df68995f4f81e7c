"""Placements: policies that choose where the decode stage of a prefilled request runs. Registered by name.

`tpot_budget` is HyperFlexis' Migrator (sec. 5.1: Alg. 1 on the decode stage, requests by TPOT, decisions at every
decode step); `tpot_grouped` (the default) and `tpot_linked` are ours. `least_outstanding` and `round_robin` are what
disaggregated routers do today; `one_shot` chooses when the prefill is sent, which HyperFlexis argues against.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

from controller.core.errors import ConfigError
from controller.core.registry import Registry
from controller.core.types import Request
from controller.dispatch.shadow_state import ShadowInstance

Order = tuple[float, float, str]
IDLE_DISTANCE = 1e-9  # of an idle instance from any TPOT (seconds a token): worse than equal, better than unlike
LEAST_LEFT = 0.5  # of a TTFT target, for the wait after a prefill, however much of it the prefill took
URGENT = 4.0  # times the expected wait for a slot: a request with more time than that waits at the gateway
BARELY = 0.85  # of a pace: where a step alone takes longer, one more sequence or a wrong prediction misses it
NOT_MEASURED: Mapping[str, float] = MappingProxyType({})


class Prefilled(NamedTuple):
    """A request whose prefill ended, or is expected to end, at `first_at`, and what it needs of a decode instance.

    The client's first byte comes from the decode instance, so until then waiting costs TTFT, and only after it TPOT.
    `move_s`: seconds its KV is expected to take to each instance, for placements with `measures_links`. `in_turn`: no
    request that is looked at before it waits for room.
    """

    request: Request
    first_at: float
    move_s: Mapping[str, float] = NOT_MEASURED
    in_turn: bool = True

    @property
    def pace_s(self) -> float:
        """Seconds a token after the first byte; infinite for an answer of one token."""
        return self.request.targets.tpot_s if self.request.output_tokens > 1 else math.inf

    def deadline_pace_s(self, instance_id: str, now: float) -> float:
        """Seconds a token that its deadline leaves once its first byte has come from there, if the answer is as long as
        its upper bound; infinite without a deadline or a second token, below 0 if it is late by then."""
        deadline_s, tokens = self.request.targets.deadline_s, self.request.reserved_tokens - 1
        if deadline_s is None or tokens < 1:
            return math.inf
        left_s = self.request.arrival + deadline_s - now - self.first_byte_s(instance_id, 0.0, now)
        return left_s / tokens

    def slack_s(self, now: float) -> float:
        """Seconds left to its TTFT target; below 0 once it is missed."""
        return self.request.ttft_due - now

    def wait_over_slo(self, now: float) -> float:
        """The wait since the prefill over what the prefill left of the TTFT target: 1 and more is late."""
        return self.over_slo(now - self.first_at)

    def over_slo(self, wait_s: float) -> float:
        """A wait over what the prefill leaves of the TTFT target. At least half of the target counts, since more decode
        instances do not mend a prefill that ended late."""
        ttft_s = self.request.targets.ttft_s
        left = max(self.request.ttft_due - self.first_at, LEAST_LEFT * ttft_s)
        return max(0.0, wait_s) / left if left > 0 else 0.0

    def first_byte_s(self, instance_id: str, step_s: float, now: float) -> float:
        """Seconds until the client's first byte, if the request is placed there now: the prefill ends, its KV moves,
        and one decode step of `step_s` runs."""
        return max(self.first_at - now, self.move_s.get(instance_id, 0.0)) + step_s

    def spare_s(self, step_s: float) -> float:
        """Seconds that the answer can wait after its first token and keep its mean TPOT with steps of `step_s`."""
        left = self.request.output_tokens - 1
        return left * (self.request.targets.tpot_s - step_s) if left > 0 else math.inf

    def slot_due(self, instance: ShadowInstance, now: float) -> float:
        """When it has to have its slot there, so that it keeps its targets with steps of a full batch.

        Where the first token comes with the KV, waiting for the slot costs TPOT, and elsewhere TTFT."""
        step_s = instance.full_step_s()
        if not instance.spec.first_token_with_kv:
            return self.request.ttft_due - step_s
        spare_s = self.spare_s(step_s)
        return now + self.first_byte_s(instance.id, 0.0, now) + (spare_s if math.isfinite(spare_s) else 0.0)


class Choice(NamedTuple):
    """`binds`: its TPOT limits what else the instance may take; that of a hopeless request does not."""

    instance: ShadowInstance
    reason: str
    binds: bool = True


class Placement(Protocol):
    name: ClassVar[str]
    one_shot: ClassVar[bool]  # chosen when the prefill is sent, kept whatever comes
    measures_links: ClassVar[bool]  # reads `move_s`

    def order(self, stage: Prefilled) -> Order:
        """In which order requests are looked at: smaller first."""
        ...

    def choose(self, stage: Prefilled, instances: Sequence[ShadowInstance], now: float) -> Choice | None:
        """One of `instances` (each has KV room for the prompt), or None: wait for an event or the next step."""
        ...

    def hopeless(self, stage: Prefilled, instances: Sequence[ShadowInstance], now: float) -> bool:
        """Whether it is placed from now on only when no other waits."""
        ...


MIGRATIONS: Registry[type[Placement]] = Registry("migration")


@MIGRATIONS.register("tpot_budget")
class TpotBudget:
    """HyperFlexis' Migrator: tightest TPOT first, to the earliest-maturing instance whose step stays under the TPOT.

    A request fits an instance if eq. 2 with it in the batch is at most `share` of the tightest TPOT there and of its
    own, if its first byte comes within its TTFT, if a slot is free and if the KV of its prompt and expected answer
    fits. The maturity of a decode instance is the end of its next step, now + E_d (H6): the smallest E_d first.
    Eq. 2 is taken with the context that the batch has after `growth` of the answers still to come, 0.5 being the mean
    over their time here (0 is the paper's: what fits now no longer does when contexts have grown).
    A branch that Alg. 1 lacks: a request that could not keep its TTFT or its TPOT even alone is hopeless. Once no other
    waits that can still make it, it goes where eq. 2 with it harms none of the requests there, and does not bind later
    ones. Where all slots are taken but the engine sends the first token with the KV, a request may wait for its slot
    there if the wait expected is at most `patience` of the time that its answer has to spare (decision 156); 0 is the
    paper's. Cost: linear in decode instances.
    """

    name: ClassVar[str] = "tpot_budget"
    one_shot: ClassVar[bool] = False
    measures_links: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Config:
        share: float = 1.0
        growth: float = 0.5
        patience: float = 1.0

        def __post_init__(self) -> None:
            if not 0 <= self.growth <= 1:
                raise ConfigError("growth must lie in [0, 1]", field="growth")
            if not 0 < self.share <= 1:
                raise ConfigError("share must lie in (0, 1]", field="share")
            if not self.patience >= 0:
                raise ConfigError("patience must not be negative", field="patience")

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def order(self, stage: Prefilled) -> Order:
        return (stage.request.targets.tpot_s, stage.request.arrival, stage.request.id)

    def choose(self, stage: Prefilled, instances: Sequence[ShadowInstance], now: float) -> Choice | None:
        request = stage.request
        roomy = [each for each in instances if each.kv_need(request) < each.free_tokens() or not each.outstanding]
        if not roomy:
            return None
        hopeless = self.hopeless(stage, instances, now)
        for instance in self.rank(stage, [each for each in roomy if each.free_slots > 0]):
            grown = self.config.growth * (instance.expected_tokens + request.output_tokens)
            step = instance.decode_with(request.prompt_tokens + 1 + round(grown))
            allowed = self.config.share * instance.tightest_tpot()
            if step <= allowed and self._keeps(stage, instance, step, now):
                return Choice(instance, "fits_tpot")
            if hopeless and step <= allowed:
                return Choice(instance, "hopeless_harmless", binds=False)
        return None if hopeless else self._ahead_of_a_slot(stage, roomy, now)

    def _ahead_of_a_slot(self, stage: Prefilled, roomy: Sequence[ShadowInstance], now: float) -> Choice | None:
        """The instance where a slot is expected first, if the answer can wait for it there and keep its pace.

        Its first token comes with its KV, so waiting there costs TPOT, and waiting here would cost TTFT.
        """
        best: tuple[float, int, str, ShadowInstance] | None = None
        for instance in roomy:
            if not instance.spec.first_token_with_kv or instance.free_slots > 0:
                continue
            left_s = stage.slack_s(now) - stage.first_byte_s(instance.id, 0.0, now)
            step_s = self.waiting_step_s(instance)
            if left_s < 0 or step_s > self.config.share * instance.tightest_tpot():
                continue
            spare_s = stage.spare_s(step_s)
            wait_s = self.slot_wait_s(instance, spare_s, step_s, now)
            if wait_s <= self.config.patience * spare_s and self.goes_ahead(stage, left_s, wait_s):
                key = (wait_s, instance.last_sent, instance.id, instance)
                best = key if best is None or key[:3] < best[:3] else best
        return None if best is None else Choice(best[3], "waits_for_slot")

    def waiting_step_s(self, instance: ShadowInstance) -> float:
        """Seconds of a step there while it waits for its slot."""
        return instance.decode_s()

    def slot_wait_s(self, instance: ShadowInstance, spare_s: float, step_s: float, now: float) -> float:
        """Seconds until a request that can wait for `spare_s` is expected to have a slot, with steps of `step_s`: here
        in order of arrival, as answers end."""
        outstanding = len(instance.waiting) + len(instance.running)
        return max(0, outstanding + 1 - instance.slots) * _between_slots_s(instance, step_s)

    def goes_ahead(self, stage: Prefilled, left_s: float, wait_s: float) -> bool:
        """Whether it is sent to wait there now, with `left_s` of its TTFT left."""
        return left_s < URGENT * wait_s

    def hopeless(self, stage: Prefilled, instances: Sequence[ShadowInstance], now: float) -> bool:
        """Whether it could not keep its targets even alone on an idle instance."""
        prompt = stage.request.prompt_tokens
        return not any(self._keeps(stage, instance, instance.latency.decode(1, prompt), now) for instance in instances)

    def _keeps(self, stage: Prefilled, instance: ShadowInstance, step_s: float, now: float) -> bool:
        """Whether it would keep its TTFT, its TPOT and its deadline there with steps of `step_s`."""
        in_time = stage.first_byte_s(instance.id, step_s, now) <= stage.slack_s(now)
        return in_time and step_s <= self.config.share * self._pace_s(stage, instance, now)

    def _pace_s(self, stage: Prefilled, instance: ShadowInstance, now: float) -> float:
        """Seconds a token that it needs there. A deadline that it could not keep there even alone does not count: the
        upper bound gives nobody up (decision 41), and no room would ever be good enough."""
        by_deadline = stage.deadline_pace_s(instance.id, now)
        if by_deadline >= stage.pace_s:
            return stage.pace_s
        longest = stage.request.prompt_tokens + stage.request.reserved_tokens
        alone_s = instance.latency.decode(1, longest)
        return by_deadline if alone_s <= self.config.share * by_deadline else stage.pace_s

    def rank(self, stage: Prefilled, instances: Sequence[ShadowInstance]) -> list[ShadowInstance]:
        """In which order instances are tried: by the end of their next step."""
        return sorted(instances, key=lambda each: (each.decode_s(), each.last_sent, each.id))


def _between_slots_s(instance: ShadowInstance, step_s: float) -> float:
    """Mean seconds from one answer's end to the next, with all slots taken: answers end as their tokens come."""
    left = instance.expected_tokens / max(1, len(instance.waiting) + len(instance.running))
    return left * step_s / instance.slots


@MIGRATIONS.register("tpot_grouped")
class TpotGrouped(TpotBudget):
    """`tpot_budget` that looks first at the request whose first byte is due first, with `charge` of the time that the
    rest of its answer may take (TPOT x tokens after the first) counted on top: a slot is held for that time, and in
    overload more requests are in time if those that hold it for long wait (decision 181). By TPOT alone, as in the
    paper, a short answer waits behind long ones of a tighter pace although it has less time. What cannot be in time any
    more is hopeless. And it groups requests of like TPOT: it tries first the instances whose tightest TPOT is the
    request's own, then idle ones, then the others by the difference, so that one tight request does not hold every
    instance to its pace. Those where a step of the request alone takes almost all of its pace come last (decision 328).
    Ours; the same cost.

    At an engine whose slots are all taken it counts on the order of `slot_due`, by which the migrator ranks there
    (`engine_rank: slot`): only those that have to have their slot sooner are ahead. So whoever is in turn goes there at
    once: others with less time still go first. `patience` leaves a quarter for answers that are longer than predicted.
    """

    name: ClassVar[str] = "tpot_grouped"

    @dataclass(frozen=True, slots=True)
    class Config(TpotBudget.Config):
        patience: float = 0.75
        charge: float = 0.1

        def __post_init__(self) -> None:
            TpotBudget.Config.__post_init__(self)
            if not self.charge >= 0:
                raise ConfigError("charge must not be negative", field="charge")

    config: Config

    def order(self, stage: Prefilled) -> Order:
        request = stage.request
        answer_s = request.targets.tpot_s * max(1, request.output_tokens - 1)
        return (request.ttft_due + self.config.charge * answer_s, answer_s, request.id)

    def rank(self, stage: Prefilled, instances: Sequence[ShadowInstance]) -> list[ShadowInstance]:
        own, prompt = stage.request.targets.tpot_s, stage.request.prompt_tokens

        def cost(instance: ShadowInstance) -> tuple[bool, float, float, int, str]:
            kept = instance.tightest_tpot()
            distance = abs(kept - own) if math.isfinite(kept) else IDLE_DISTANCE
            barely = instance.latency.decode(1, prompt) > BARELY * own
            return (barely, distance, self.joins_s(stage, instance), instance.last_sent, instance.id)

        return sorted(instances, key=cost)

    def joins_s(self, stage: Prefilled, instance: ShadowInstance) -> float:
        """Seconds until the request could take part in a step there."""
        return instance.decode_s()

    def waiting_step_s(self, instance: ShadowInstance) -> float:
        return instance.full_step_s()

    def slot_wait_s(self, instance: ShadowInstance, spare_s: float, step_s: float, now: float) -> float:
        waiting = -instance.free_slots
        ahead = bisect_right(_spares(instance, waiting, step_s, now), spare_s) if waiting > 0 else 0
        return (ahead + 1) * _between_slots_s(instance, step_s)

    def goes_ahead(self, stage: Prefilled, left_s: float, wait_s: float) -> bool:
        return stage.in_turn or super().goes_ahead(stage, left_s, wait_s)


def _spares(instance: ShadowInstance, waiting: int, step_s: float, now: float) -> list[float]:
    """Seconds that the answers which wait there for a slot can wait on, sorted. They are the latest of those that have
    no second token yet."""
    found = []
    for sent in (*instance.running.values(), *instance.waiting.values()):
        if sent.produced <= 1:
            spare_s = Prefilled(sent.request, now).spare_s(step_s)
            found.append(spare_s - (now - sent.first_at) if sent.first_at is not None else spare_s)
    return sorted(found[-waiting:])


@MIGRATIONS.register("tpot_linked")
class TpotLinked(TpotGrouped):
    """`tpot_grouped` for fleets whose links differ: among instances of like pace it tries first the one where the
    request joins a step the soonest, once the running step has ended and its KV has come over the link as measured. A
    link without a measurement counts as the mean of those with one. Ours; the same cost."""

    name: ClassVar[str] = "tpot_linked"

    def joins_s(self, stage: Prefilled, instance: ShadowInstance) -> float:
        return max(instance.decode_s(), stage.move_s.get(instance.id, 0.0))


class AtOnce:
    """What placements without a budget share: order of arrival, no waiting, no hopeless requests, nothing to set."""

    one_shot: ClassVar[bool] = False
    measures_links: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Config:
        """Nothing to set."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def order(self, stage: Prefilled) -> Order:
        return (0.0, stage.request.arrival, stage.request.id)

    def hopeless(self, stage: Prefilled, instances: Sequence[ShadowInstance], now: float) -> bool:
        return False


@MIGRATIONS.register("least_outstanding")
class LeastOutstandingPlacement(AtOnce):
    """The decode instance with the fewest unfinished requests for its slots."""

    name: ClassVar[str] = "least_outstanding"

    def choose(self, stage: Prefilled, instances: Sequence[ShadowInstance], now: float) -> Choice | None:
        def load(instance: ShadowInstance) -> tuple[float, int, str]:
            return (instance.outstanding / max(1, instance.max_num_seqs), instance.last_sent, instance.id)

        instance = min(instances, key=load, default=None)
        return None if instance is None else Choice(instance, "least_outstanding")


@MIGRATIONS.register("round_robin")
class RoundRobinPlacement(AtOnce):
    """The decode instance whose last placement is longest ago."""

    name: ClassVar[str] = "round_robin"

    def choose(self, stage: Prefilled, instances: Sequence[ShadowInstance], now: float) -> Choice | None:
        instance = min(instances, key=lambda each: (each.last_sent, each.id), default=None)
        return None if instance is None else Choice(instance, "round_robin")


@MIGRATIONS.register("one_shot")
class OneShot(LeastOutstandingPlacement):
    """Prefill and decode instance chosen together when the prefill is sent: the decode instance with the fewest
    unfinished requests then, those still in prefill counted. The request waits for that instance if it has no room."""

    name: ClassVar[str] = "one_shot"
    one_shot: ClassVar[bool] = True
