"""What the plug-in decides in a step, by the policies of `controller/policies`. Knows nothing of vLLM.

`order`: the waiting queue. `s_edf`, `d_edf`, `edf`, `fcfs`: FlowPrefill's orders on the time that a prompt still takes;
`kairos_urgency`: Kairos' urgency; `calm`: Concord's batch of all sequences, waiting and running. `decode`: who of the
running ones decodes. `all`, as vLLM does; `kairos_decode`: slack-guided. CALM chooses both, so it takes no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from controller.core.errors import ConfigError
from controller.core.steps import EngineEvent, Seq
from controller.policies import batching as _registered  # noqa: F401
from controller.policies.batching.base import Pausing
from controller.policies.batching.calm import Calm
from controller.policies.batching.kairos_decode import KairosDecode
from controller.policies.batching.kairos_slack import Urgency, as_prompt
from controller.policies.batching.options import build
from controller.policies.ordering.prefill_orders import PREFILL_ORDERS, prefill_order

URGENCY, CALM, ALL, SLACK = "kairos_urgency", "calm", "all", "kairos_decode"
ORDERS = (*sorted(PREFILL_ORDERS), URGENCY, CALM)
DECODES = (ALL, SLACK)


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """`slackline` in vLLM's `--additional-config`. `*_options`: of the policy of that name."""

    order: str = "s_edf"
    decode: str = ALL
    order_options: Mapping[str, Any] = field(default_factory=dict)
    decode_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ConfigError(f"unknown order {self.order!r}; valid: {', '.join(ORDERS)}", field="slackline.order")
        if self.decode not in DECODES:
            raise ConfigError(f"unknown decode {self.decode!r}; valid: {', '.join(DECODES)}", field="slackline.decode")
        if self.order == CALM and self.decode != ALL:
            raise ConfigError("order calm chooses who decodes by itself: leave decode out", field="slackline.decode")
        if self.order_options and self.order in PREFILL_ORDERS:
            raise ConfigError(f"order {self.order} has no options", field="slackline.order_options")
        if self.decode_options and self.decode == ALL:
            raise ConfigError("decode all has no options", field="slackline.decode_options")


def settings_from(additional: object) -> PluginSettings:
    """From vLLM's `additional_config`. Raises ConfigError."""
    given = additional.get("slackline", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError("slackline must be an object", field="slackline")
    known = PluginSettings.__dataclass_fields__
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"no setting {unknown[0]!r}; valid: {', '.join(known)}", field=f"slackline.{unknown[0]}")
    for name in ("order_options", "decode_options"):
        if not isinstance(given.get(name, {}), Mapping):
            raise ConfigError(f"{name} must be an object", field=f"slackline.{name}")
    return PluginSettings(**given)


@dataclass(slots=True)
class EngineNow:
    """The engine as policies read it (`EngineView`)."""

    token_budget: int
    max_num_seqs: int
    running: Sequence[Seq]
    queue: Sequence[Seq]

    def waiting(self) -> Iterator[Seq]:
        return iter(self.queue)

    def uncached(self, seq: Seq) -> int:
        """vLLM looks a prompt up in its prefix cache only when it admits it."""
        return seq.remaining


class StepPlan(NamedTuple):
    """`waiting`: in order of admission; `held`: not to be admitted in this step; `paused`: running ones that do not
    run; `evicted`: running ones whose seats waiting ones need."""

    waiting: Sequence[Seq]
    held: Sequence[Seq] = ()
    paused: Sequence[Seq] = ()
    evicted: Sequence[Seq] = ()


class StepPolicy(Protocol):
    def plan(self, engine: EngineNow, now: float) -> StepPlan | None:
        """None: as vLLM has it. Changes nothing."""
        ...

    def observe(self, event: EngineEvent, now: float) -> None: ...


def policy_of(settings: PluginSettings, max_num_seqs: int) -> StepPolicy:
    """Raises ConfigError."""
    if settings.order == CALM:
        options = {"slots": max_num_seqs, **settings.order_options}
        return WholeBatch(build(CALM, options, "slackline.order_options"))  # type: ignore[arg-type]
    options = dict(settings.order_options) if settings.order == URGENCY else {}
    urgency = build(URGENCY, options, "slackline.order_options")
    slack = build(SLACK, settings.decode_options, "slackline.decode_options") if settings.decode == SLACK else None
    return OrderedQueue(settings.order, urgency, slack)  # type: ignore[arg-type]


def due_of(seq: Seq) -> float:
    """When its next token is due (after an eviction the first one may long have been delivered), or its whole answer if
    that is earlier."""
    token = seq.due + seq.output_tokens * seq.tpot_s if seq.output_tokens else seq.due
    return token if seq.estimate is None else min(token, seq.estimate.due)


class OrderedQueue:
    """Orders the waiting queue; all decode, or those that Kairos' decode policy chooses."""

    def __init__(self, order: str, urgency: Urgency, slack: KairosDecode | None = None) -> None:
        """`urgency` also measures the prompt tokens a second, from which the other orders know how long one takes."""
        self._order, self._urgency, self._slack = order, urgency, slack

    def plan(self, engine: EngineNow, now: float) -> StepPlan | None:
        """Who waits cannot be admitted while all seats are taken, so their order does not matter then."""
        admits = engine.queue and len(engine.running) < engine.max_num_seqs
        paused = self._paused(engine, now)
        if not admits and not paused:
            return None
        return StepPlan(self.ordered(engine.queue, now) if admits else engine.queue, paused=paused)

    def ordered(self, queue: Iterable[Seq], now: float) -> list[Seq]:
        if self._order == URGENCY:
            seqs = {seq.id: seq for seq in queue}
            prompts = [as_prompt(seq, seq.remaining) for seq in seqs.values()]
            return [seqs[prompt.id] for prompt in self._urgency.order(prompts, now)]
        key, each_s = prefill_order(self._order).key, 1.0 / self._urgency.tokens_per_s
        # What is equal stays as vLLM has it: names of requests are random there.
        return sorted(queue, key=lambda seq: (key(due_of(seq), seq.remaining * each_s, seq.arrival, now), seq.arrival))

    def _paused(self, engine: EngineNow, now: float) -> list[Seq]:
        if self._slack is None:
            return []
        chosen = {grant.seq for grant in self._slack.compose(engine, now)}
        return [seq for seq in engine.running if seq.decoding and seq not in chosen]

    def observe(self, event: EngineEvent, now: float) -> None:
        self._urgency.observe(event, now)
        if self._slack is not None:
            self._slack.observe(event, now)


class WholeBatch:
    """A policy that chooses the batch among all sequences (CALM): who is not chosen waits, with or without a seat."""

    def __init__(self, policy: Calm) -> None:
        self._policy = policy

    def plan(self, engine: EngineNow, now: float) -> StepPlan | None:
        grants = self._policy.compose(engine, now)
        if not grants:  # an engine that does nothing while it has requests would stand still
            return None
        chosen = {grant.seq: None for grant in grants}
        queued = set(engine.queue)
        first = [seq for seq in chosen if seq in queued]
        held = [seq for seq in engine.queue if seq not in chosen]
        paused = [seq for seq in engine.running if seq not in chosen]
        return StepPlan(first, held, paused, self._evicted(engine, chosen, len(first)))

    def _evicted(self, engine: EngineNow, chosen: Mapping[Seq, None], wanted: int) -> list[Seq]:
        """As many as the queued ones need seats beyond the free ones."""
        policy, running = self._policy, list(engine.running)
        found: list[Seq] = []
        assert isinstance(policy, Pausing)
        while len(running) + wanted > engine.max_num_seqs and len(found) < wanted:
            seq = policy.spare(running, chosen)
            if seq is None:
                break
            running.remove(seq)
            found.append(seq)
        return found

    def observe(self, event: EngineEvent, now: float) -> None:
        self._policy.observe(event, now)


def first_due(arrived: float, left_s: float) -> float:
    """When the first token is due on the clock of `arrived`. Seconds."""
    return arrived + left_s if math.isfinite(left_s) else math.inf
