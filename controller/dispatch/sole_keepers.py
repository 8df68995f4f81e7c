"""Which instances alone can keep the targets of recent requests. A fleet must not give these up while others serve,
wakes one that sleeps, and starts one like it if it was stopped.

Load does not say it: where fast and slow instances serve one model, the fast one may be the idlest of all, and the
requests that need it are late or refused once it is gone. Kept are the hardest requests of the last `window_s` to twice
that, one for each way in which one can be hard; whether an instance keeps them alone is judged when somebody asks (once
a second), as is which of the requests since then are hard. Cost of a question: O(requests + instances).

Where prefill and decode are disaggregated each stage has its own keepers: those that prefill are judged by the first
token, those that decode by the pace, and either by the part of the deadline that it takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from controller.core.types import Request, Role
from controller.dispatch.shadow_state import ShadowInstance

WINDOW_S = 30.0  # for which a hard request is remembered at least
RETRIED_S = 60.0  # the same of one that no instance kept that was awake: refused clients are told to come back then
CLEARLY = 1.25  # another that takes less than this times what is allowed may keep it too, as far as predictions go
MOST_NOTED = 4096  # requests that are kept until somebody asks, once a second
MOST_LEFT = 64  # instances that left are remembered


class HardRequests:
    """The hardest of recent requests that somebody can keep: by first token, pace, deadline and context."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._since = -math.inf
        self._now: dict[str, tuple[float, Request]] = {}
        self._before: dict[str, tuple[float, Request]] = {}

    def add(self, request: Request, best: Iterable[ShadowInstance], now: float) -> None:
        """`best`: of which none is slower in everything than another."""
        able = [_shares(request, instance) for instance in best if instance.holds(request)]
        shares = min(able, key=_largest, default=None)
        if shares is None or _largest(shares) > 1.0:
            return  # no instance can keep it
        self._turn(now)
        for kind, share in {**shares, "context": float(request.prompt_tokens + (request.max_tokens or 1))}.items():
            if kind not in self._now or share > self._now[kind][0]:
                self._now[kind] = share, request

    def recent(self, now: float) -> list[Request]:
        self._turn(now)
        found = {request.id: request for part in (self._before, self._now) for _, request in part.values()}
        return list(found.values())

    def _turn(self, now: float) -> None:
        if now < self._since + self._window_s:
            return
        self._before = self._now if now < self._since + 2 * self._window_s else {}
        self._now, self._since = {}, now


class Keepers:
    """Which instances of one model's stage recent requests need, whether these were refused or not: instances that
    serve, and instances that drain, sleep or were stopped. `noted`: when requests arrived, and which, to be judged when
    somebody asks; each request adds itself, so that its way does not lead through here."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.noted: deque[tuple[float, Request]] = deque(maxlen=MOST_NOTED)
        self._kept, self._missed = HardRequests(window_s), HardRequests(RETRIED_S)
        self._left: dict[str, ShadowInstance] = {}

    def joined(self, instance_id: str) -> None:
        self._left.pop(instance_id, None)

    def left(self, instance: ShadowInstance) -> None:
        """What was learned of it stays known, since it may sleep, or another may be started like it."""
        self._left[instance.id] = instance
        if len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]

    def needed(self, serving: Sequence[ShadowInstance], best: Sequence[ShadowInstance], now: float) -> set[str]:
        """Ids of those of `serving` that are sole keepers. `best`: of `serving`, as for `HardRequests`."""
        self._judge(best)
        return sole_keepers([*self._kept.recent(now), *self._missed.recent(now)], serving)

    def wanted(self, serving: Sequence[ShadowInstance], best: Sequence[ShadowInstance], now: float) -> set[str]:
        """Ids of those that drain or left and keep what none of `serving` keeps."""
        self._judge(best)
        return left_keepers(self._missed.recent(now), serving, self._left.values())

    def _judge(self, best: Sequence[ShadowInstance]) -> None:
        while self.noted:
            at, request = self.noted.popleft()
            self._kept.add(request, best, at)
            if self._left:
                self._missed.add(request, self._left.values(), at)


def sole_keepers(requests: Iterable[Request], serving: Sequence[ShadowInstance]) -> set[str]:
    """Ids of those of the instances that serve a stage that keep one of the requests, idle and with an empty prefix
    cache, where all others clearly do not. One that is left alone is none: there is nobody to take its place. One whose
    speed is only guessed may keep anything, so while one serves, no other is the only one, and neither is it."""
    found: set[str] = set()
    for request in requests if len(serving) > 1 else ():
        able: list[tuple[float, str]] = []
        for instance in serving:
            share = _largest(_shares(request, instance)) if instance.holds(request) else math.inf
            if _guessed(instance):
                able.append((math.inf, instance.id))
            elif share < CLEARLY:
                able.append((share, instance.id))
            if len(able) > 1:
                break
        found.update(name for share, name in able if share <= 1.0 and len(able) == 1)
    return found


def left_keepers(
    requests: Iterable[Request], serving: Sequence[ShadowInstance], left: Iterable[ShadowInstance]
) -> set[str]:
    """Ids of those of `left` that keep one of the requests, where those that serve clearly do not."""
    known = [instance for instance in left if not _guessed(instance)]
    if not known or any(_guessed(instance) for instance in serving):
        return set()
    missed = [each for each in requests if not any(_keeps(each, instance, CLEARLY) for instance in serving)]
    return {instance.id for instance in known if any(_keeps(each, instance) for each in missed)}


def _keeps(request: Request, instance: ShadowInstance, within: float = 1.0) -> bool:
    return instance.holds(request) and _largest(_shares(request, instance)) <= within


def _guessed(instance: ShadowInstance) -> bool:
    """Whether nobody profiled it, and too little was measured yet of the stage that it serves."""
    prefills, steps = instance.doubt()
    prefills = 1.0 if instance.spec.role is Role.DECODE else prefills
    steps = steps if instance.decodes else 1.0
    return instance.spec.latency is None and (prefills, steps) != (1.0, 1.0)


def _shares(request: Request, instance: ShadowInstance) -> dict[str, float]:
    """What it takes there alone over what its targets allow, by target. What is cached there does not count: another
    instance would have it after the first such request. An instance that only prefills makes no pace, and one that only
    decodes no first token. That the KV has to get there is left out."""
    targets, prompt = request.targets, request.prompt_tokens
    shares, first_s = {}, 0.0
    if instance.spec.role is not Role.DECODE:
        first_s = instance.latency.prefill_sums(prompt, prompt * prompt) + instance.first_byte_s(prompt)
        allowed_s = targets.ttft_s if targets.thinking_s is None else targets.thinking_s  # the first is a guess then
        shares["first token"] = _share(first_s, allowed_s)
    steps = max(0, request.surest_tokens - 1) if instance.decodes else 0
    step_s = instance.latency.decode(1, prompt + request.output_tokens // 2)
    if steps:
        shares["pace"] = _share(step_s, targets.tpot_s)
    if targets.deadline_s is not None:
        shares["deadline"] = _share(first_s + steps * step_s, targets.deadline_s)
    return shares


def _share(seconds: float, allowed_s: float) -> float:
    return seconds / allowed_s if allowed_s > 0 else math.inf


def _largest(shares: dict[str, float]) -> float:
    return max(shares.values(), default=0.0)
