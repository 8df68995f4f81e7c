"""What the scheduler believes each instance holds: exact for its own requests, telemetry for those of others.

`ShadowInstance` is the belief about one instance between two reads of its telemetry, and learns its latency from the
progress of its requests. `Roster` keeps them by id and up to date; dispatcher and migrator have one each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from controller.core import events as ev
from controller.core.decisions import Figure
from controller.core.policy import Cost
from controller.core.snapshot import FleetState
from controller.core.types import DEFAULT_MAX_NUM_SEQS, InstanceSpec, LatencyCoefficients, Load, Request, Role
from controller.dispatch.learned import believe, relearn
from controller.dispatch.lifecycle import Sent, count_admitted
from controller.predict.latency import (
    ENOUGH,
    UNPROFILED,
    ErrorsByKind,
    LatencyModel,
    OnlineFit,
    PrefillsAlone,
    PrefillWork,
)
from controller.predict.lengths import CachedShares

OBSERVE_EVERY_S = 0.1  # shorter intervals teach nothing new
ODD_RATIO = 4.0  # an interval this much slower than predicted is a stall of the host, not of the engine
ODD_LIMIT = 10  # ... unless it keeps coming
TIGHT_SHARE = 0.05  # of the TPOT targets at an instance may be missed before the rest count as what it has to keep
STALL_AGAIN_S = 0.05
LOST_SHARE = 0.05  # of an answer's time at its TPOT: one that is later will miss it whatever is sent
DOUBT_OF_PROFILE = 4.0  # how far a profile may be off before anything was measured here
DOUBT_OF_GUESS = 100.0  # the same where nobody profiled: only what no engine could do is certain

InstanceEvent = ev.InstanceDraining | ev.SharesChanged | ev.FirstByteDelay | ev.DecodePace | ev.Telemetry
INSTANCE_EVENTS = (ev.InstanceDraining, ev.SharesChanged, ev.FirstByteDelay, ev.DecodePace, ev.Telemetry)


class ShadowInstance:
    """Shadow state of one instance. `waiting` requests were sent and have no first token yet; `running` ones decode."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.id = spec.id
        self.spec = spec
        self.state = "up"
        self.share = 1.0
        self.waiting: dict[str, Sent] = {}
        self.running: dict[str, Sent] = {}
        self.waiting_tokens = 0  # of whole prompts, which their KV will take
        self.waiting_new = 0  # of these, without what is expected in the prefix cache
        self.waiting_squares = 0
        self.context_tokens = 0
        self.expected_tokens = 0  # predicted output still to come, of all requests here
        self.mature_at = -math.inf
        self.last_sent = 0
        self.sent_total = 0
        self.load: Load | None = None
        self.first_byte = (0.0, 0.0)  # of a prefill instance: seconds after a prefill, of any and for each token
        self.decode_pace: ev.DecodePace | None = None  # likewise, once it is known
        self.latency = LatencyModel(spec.latency or UNPROFILED)
        self.fit = OnlineFit(self.latency.coefficients)
        self._tpots: Counter[float] = Counter()
        self._prefilled = (0, 0)  # tokens and squares that all prefills which ended here are expected to have computed
        self._prompts: Counter[tuple[str, str]] = Counter()  # tokens since the last telemetry, as the engine counts
        self.cached = CachedShares()
        self.first_tokens = ErrorsByKind()
        self._stall_until, self._stall_seen_at = math.inf, -math.inf  # see stall_s
        self._prefill_work = PrefillWork()
        self._alone: PrefillsAlone | None = None  # while the engine prefills and does nothing else
        self.changes = 0  # grows when its latency model, its settings or its state changes
        self._observed_at = -math.inf
        self._odd = 0
        self._others = (0, 0)  # running and waiting requests of others
        self._others_count = 0
        self._others_prefill_rate = 0.0  # prompt tokens a second of requests of others
        self._reported_seqs: int | None = None  # what the engine reports of itself

    # ---- what policies read ---------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        return len(self.waiting) + len(self.running) + self._others_count

    @property
    def waiting_count(self) -> int:
        return len(self.waiting) + self._others[1]

    @property
    def waiting_before(self) -> int:
        """Those of them that a prompt beyond any budget waits for: of several gateways, its own."""
        return len(self.waiting) if self.share < 1 else self.waiting_count

    @property
    def tests_suspect(self) -> bool:
        """Whether the only request that waits for its first token is a suspect (`Suspects`)."""
        return len(self.waiting) == 1 and bool(next(iter(self.waiting.values())).request.ended)

    @property
    def running_count(self) -> int:
        return len(self.running) + self._others[0]

    @property
    def max_num_seqs(self) -> int:
        """Sequences all gateways may have there: the smaller of what is configured and what the engine reports."""
        configured, reported = self.spec.max_num_seqs, self._reported_seqs
        if configured is None:
            return DEFAULT_MAX_NUM_SEQS if reported is None else reported
        return configured if reported is None else min(configured, reported)

    @property
    def slots(self) -> int:
        """Sequences this gateway may have at the engine at once."""
        return max(1, math.floor(self.max_num_seqs * self.share))

    @property
    def free_slots(self) -> int:
        """Within this gateway's share, and within what others leave of the whole."""
        ours, all_slots = len(self.waiting) + len(self.running), self.max_num_seqs
        return min(max(1, math.floor(all_slots * self.share)), all_slots - self._others_count) - ours

    @property
    def kv_capacity(self) -> float:
        """Tokens of KV, as configured or as the engine reports them; infinite where neither is known."""
        return self.spec.kv_capacity_tokens or (self.load.kv_capacity_tokens if self.load else None) or math.inf

    def free_tokens(self) -> float:
        """KV room for new requests (prompt and expected output), tokens; infinite where the capacity is not known."""
        load, capacity = self.load, self.kv_capacity
        if math.isinf(capacity):
            return math.inf
        ours = self.context_tokens + self.waiting_tokens + self.expected_tokens
        seen = (load.kv_usage * capacity + self.waiting_tokens) if load else 0.0
        return min(capacity * self.share - ours, capacity - seen)

    def occupancy(self) -> dict[str, Figure]:
        """What a decision notes of an instance that it did not choose."""
        return {"outstanding": self.outstanding, "waiting_tokens": self.waiting_tokens}

    def utilisation(self) -> float:
        """0..1: the larger of sequence slots and KV blocks in use."""
        slots = self.outstanding / max(1, self.max_num_seqs)
        kv = self.load.kv_usage if self.load else 0.0
        return min(1.0, max(slots, kv))

    def stall_s(self, now: float) -> float:
        """Seconds of prefill work that the decodes here can wait through and still keep their mean TPOT.

        Infinite without decodes. One that is too late for its TPOT by more than `LOST_SHARE` of the whole answer's time
        does not count. An answer that is longer than predicted counts as if it ended now. Looked at again after
        `STALL_AGAIN_S`: meanwhile progress only adds to it.
        """
        if now >= self._stall_seen_at + STALL_AGAIN_S:
            self._stall_seen_at, self._stall_until = now, math.inf
            step_s = self.decode_s()
            for sent in self.running.values():
                self._bounded_by(sent, step_s, now)
        return max(0.0, self._stall_until - now)

    def _bounded_by(self, sent: Sent, step_s: float, now: float) -> None:
        waits = sent.waits_until(step_s)
        if waits is not None and waits[0] < self._stall_until and waits[0] - now > -LOST_SHARE * waits[1]:
            self._stall_until = waits[0]

    def kept_for_prefills(self) -> float:
        """The share of its time that prefills may take while decodes keep the tightest TPOT (eq. 5)."""
        tpot = self.tightest_tpot(TIGHT_SHARE)
        return 1.0 if math.isinf(tpot) else max(0.0, 1.0 - self.decode_s() / tpot)

    def prefilling(self, now: float) -> float:
        """The share of its time that went to prefills of ours lately."""
        return self._prefill_work.ours(now)

    def prefilling_of_all(self, now: float) -> float:
        """The same with what the engine counts of others since its last telemetry, in prompts like ours."""
        k, mean_prompt = self.latency.coefficients, self._prefilled[1] / max(1, self._prefilled[0])
        return self.prefilling(now) + self._others_prefill_rate * (k.prefill_b + k.prefill_c * mean_prompt)

    def full_step_s(self) -> float:
        """Eq. 2 with all of this gateway's slots in use by sequences like those that are here."""
        mean = (self.context_tokens + self.waiting_tokens) // max(1, len(self.waiting) + len(self.running))
        return self.latency.decode(self.slots, mean * self.slots)

    def busy(self, now: float) -> float:
        """0..1: the largest of sequence slots, KV blocks and computing time in use."""
        return min(1.0, max(self.utilisation(), self._computing(now)))

    def _computing(self, now: float) -> float:
        """The share of its time that the engine needs: what it prefilled lately, and one decode step for each TPOT of
        the tightest that it has to keep (eq. 5 leaves prefills the rest)."""
        tpot = self.tightest_tpot(TIGHT_SHARE) if self.running_count and self.decodes else math.inf
        return self._prefill_work.of_all(now) + self.decode_s() / tpot

    def tightest_tpot(self, share: float = 0.0) -> float:
        """The `share` quantile (0: the smallest) of the TPOT here that a step alone can keep; infinite if none."""
        reachable = self.latency.decode(1, 0)
        tpots = sorted(tpot for tpot in self._tpots if tpot >= reachable)
        wanted = share * sum(self._tpots[tpot] for tpot in tpots)
        seen = 0
        for tpot in tpots:
            seen += self._tpots[tpot]
            if seen > wanted:
                return tpot
        return math.inf

    @property
    def decodes(self) -> bool:
        """False for prefill instances: sequences end with their first token, so no decode step, TPOT or growing KV."""
        return self.spec.role is not Role.PREFILL

    def kv_need(self, request: Request) -> int:
        """Tokens of KV the request will hold here at its end, at most as far as its bound holds. Where that exceeds
        all KV that this gateway may use here, the predicted answer counts, or such requests would go one by one."""
        tokens = request.prompt_tokens
        if not self.decodes:
            return tokens
        reserved = request.reserved_tokens
        return tokens + (reserved if self._could_hold(tokens + reserved) else request.output_tokens)

    def _could_hold(self, tokens: int) -> bool:
        return tokens < self.kv_capacity * self.share

    def context_need(self, request: Request) -> int:
        """Tokens of its prompt and of the longest answer it may get here; the same at all instances of one role."""
        return request.prompt_tokens + ((request.max_tokens or 1) if self.decodes else 1)

    def holds(self, request: Request) -> bool:
        """Whether it fits into the context."""
        return self.context_need(request) <= self.spec.max_model_len

    def long_enough(self, request: Request, longest: int) -> bool:
        """Whether it fits, or no instance has a longer context (`longest`, in tokens). What is too long for all of them
        is refused by the engine, which knows its exact length."""
        return self.spec.max_model_len >= longest or self.holds(request)

    def decode_s(self) -> float:
        """Eq. 2 for the batch after all waiting prompts are prefilled."""
        return self.decode_with(0, more=0) if self.decodes else 0.0

    def decode_with(self, more_tokens: int, more: int = 1) -> float:
        """Eq. 2 with `more` sequences of `more_tokens` tokens in all."""
        others, ours = self._others_count, len(self.waiting) + len(self.running)
        tokens = self.context_tokens + self.waiting_tokens
        if others and ours:
            tokens += others * tokens // ours  # unknown requests are taken to be like ours
        return self.latency.decode(others + ours + more, tokens + more_tokens)

    def waiting_prefill_s(self) -> float:
        """Eq. 1 for all prompts that wait at the engine."""
        return self.latency.prefill_sums(self.waiting_new, self.waiting_squares)

    @property
    def knows_prefixes(self) -> bool:
        """Has its prefix cache had any part of our prompts?"""
        return bool(self.cached)

    def uncached(self, request: Request) -> tuple[int, int]:
        """Prompt tokens that are expected to be computed here, and what stands for their squares in eq. 1."""
        tokens = request.prompt_tokens
        if not self.cached:
            return tokens, tokens * tokens
        cached = self.cached.cached((request.tenant, request.slo_class), tokens)
        new = tokens - cached
        return new, new * (new + 2 * cached)

    @property
    def takes(self) -> bool:
        return self._serves and self.spec.role is not Role.DECODE

    @property
    def takes_decodes(self) -> bool:
        """Whether it takes decode stages of requests that were prefilled elsewhere."""
        return self._serves and self.spec.role is Role.DECODE

    @property
    def may_take_decodes(self) -> bool:
        """Whether it takes them now or will once it wakes."""
        return self.state == "up" and self.spec.role is Role.DECODE

    @property
    def _serves(self) -> bool:
        return self.state == "up" and (self.load is None or self.load.awake)

    def cost(self, request: Request) -> Cost:
        """What serving the request is predicted to take on this instance."""
        tokens, prefill = request.prompt_tokens, self.prefill_s(request)
        context = tokens + request.output_tokens // 2
        service = prefill + request.output_tokens * self.latency.marginal_decode(context, float(self.outstanding))
        elsewhere_s = self.decode_pace.alone_s if self.decode_pace else 0.0  # not known is no reason to refuse
        step_s = self.latency.decode(1, context) if self.decodes else elsewhere_s
        return Cost(prefill, service, step_s, self.first_byte_s(tokens))

    def prefill_s(self, request: Request) -> float:
        return self.latency.prefill_sums(*self.uncached(request))

    def first_byte_s(self, tokens: int) -> float:
        """From the end of a prefill of so many tokens to the client's first byte; 0 if the answer comes from here."""
        fixed_s, s_a_token = self.first_byte
        return 0.0 if self.decodes else max(0.0, fixed_s + s_a_token * tokens)

    def doubt(self) -> tuple[float, float]:
        """How many times faster than predicted (prefills, decode steps) may be here, for all that was measured so far.

        A profile may come from another machine, and the coefficients of an instance without a profile are a guess.
        """
        unmeasured = DOUBT_OF_GUESS if self.spec.latency is None else DOUBT_OF_PROFILE
        prefills, steps = self.fit.prefill_samples >= ENOUGH, self.fit.decode_samples >= ENOUGH
        return 1.0 if prefills else unmeasured, 1.0 if steps else unmeasured

    @property
    def error(self) -> float:
        """Recent mean relative error of predictions; 0 before the first."""
        return self.fit.error or 0.0

    def first_token_error(self, request: Request) -> tuple[float, float]:
        """Seconds by which first tokens of its kind came later than predicted lately: mean, deviation. The prediction
        is the prefill work that waits here and the request's own."""
        return self.first_tokens.of((request.tenant, request.slo_class))

    # ---- what happens -----------------------------------------------------------------------------------------------

    def send(self, request: Request, now: float, rank: int, serial: int, *, binds: bool = True) -> None:
        """`binds`: its TPOT limits what else this instance may take."""
        tokens, new = request.prompt_tokens, self.uncached(request)
        sent = Sent(request, now, rank, self.latency.prefill_sums(*new), new)
        sent.expected_s = self.waiting_prefill_s() + sent.prefill_s
        if not self.outstanding:
            self._alone = PrefillsAlone(now)
        self.waiting[request.id] = sent
        self.waiting_tokens += tokens
        self.waiting_new += sent.new_tokens
        self.waiting_squares += sent.squares
        sent.to_come = self.kv_need(request) - tokens
        self.expected_tokens += sent.to_come
        sent.binds = binds and self.decodes and request.output_tokens > 1  # one token has no pace to keep
        if sent.binds:
            self._tpots[request.targets.tpot_s] += 1
        self.last_sent = serial
        self.sent_total += 1

    def first_token(self, request_id: str, now: float, *, assumed: bool = False, elsewhere: bool = False) -> None:
        """It decodes here from now on. `elsewhere`: another instance prefilled it, which says nothing of this one."""
        sent = self.waiting.pop(request_id, None)
        if sent is None:
            return
        self._leave_waiting(sent)
        if not elsewhere:
            self._prefill_ended(sent, now, seen=not assumed)
        sent.first_at = now
        sent.assumed = assumed
        self.running[request_id] = sent
        self._bounded_by(sent, self.decode_s(), now)
        self.context_tokens += sent.request.prompt_tokens
        self.progress(request_id, 1, now)

    def prefill_done(self, request_id: str, now: float) -> None:
        """Its first token is out and it decodes elsewhere: the request leaves this instance."""
        sent = self.waiting.get(request_id)
        if sent is not None:
            self._prefill_ended(sent, now, seen=True)
        self.remove(request_id)

    def _prefill_ended(self, sent: Sent, now: float, *, seen: bool) -> None:
        """Learn from prefills while the engine does nothing else. `seen` False: when it ended is not known."""
        request = sent.request
        if seen and not self.spec.selects:
            self.first_tokens.add((request.tenant, request.slo_class), now - sent.at - sent.expected_s)
        self._prompts[request.tenant, request.slo_class] += 0 if sent.counted else request.prompt_tokens
        self._prefilled = (self._prefilled[0] + sent.new_tokens, self._prefilled[1] + sent.squares)
        self._prefill_work.ended(self.latency.prefill_sums(sent.new_tokens, sent.squares), sent.new_tokens, now)
        if not seen or self._others_count:
            self._alone = None
        if (alone := self._alone) is None:
            return
        # A batch is whole once a prefill of a later one has ended, or nothing is left that could be of it.
        if alone.seconds >= OBSERVE_EVERY_S and not alone.same_batch(now):
            self._learn_prefills(alone)
            self._alone = alone = PrefillsAlone(alone.until)
        alone.add(sent.new_tokens, sent.squares, now)
        if self.decodes or len(self.waiting) <= 1:
            self._alone = None  # where the sequence decodes from here on, nothing is alone
            self._learn_prefills(alone)

    def _learn_prefills(self, alone: PrefillsAlone) -> None:
        if self._stalled(alone.seconds, self.latency.prefill_sums(alone.tokens, alone.squares)):
            return
        if self.fit.observe_prefills(alone.batches, alone.tokens, alone.squares, alone.seconds):
            self.refitted()

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        """`tokens` output tokens so far; learns from the steps since the last report of the same request."""
        sent = self.running.get(request_id)
        if sent is None or tokens <= sent.produced:
            return
        grown = tokens - sent.produced
        sent.produced = tokens
        self.context_tokens += grown
        foreseen = min(grown, sent.to_come)  # beyond its prediction an answer takes nothing from the others
        sent.to_come -= foreseen
        self.expected_tokens -= foreseen
        if sent.assumed:
            return
        if sent.mark is None or now - self._observed_at >= OBSERVE_EVERY_S:
            if sent.mark is not None:
                self._learn(sent.mark, tokens, now)
            sent.mark = (now, tokens, *self._prefilled, *self._decoding())

    def bounded(self, request_id: str, most_tokens: int) -> None:
        """Keep room for so many tokens of a running answer in all; its first bound ends. For too many see `kv_need`."""
        sent = self.running.get(request_id)
        if sent is not None and self._could_hold(sent.request.prompt_tokens + most_tokens):
            to_come = max(0, most_tokens - sent.produced)
            self.expected_tokens += to_come - sent.to_come
            sent.to_come = to_come

    def remove(self, request_id: str) -> Sent | None:
        """The request is over here, however it ended."""
        sent = self.waiting.pop(request_id, None)
        if sent is not None:
            self._leave_waiting(sent)
        else:
            sent = self.running.pop(request_id, None)
            if sent is None:
                return None
            self.context_tokens -= sent.request.prompt_tokens + sent.produced
        tpot = sent.request.targets.tpot_s
        if sent.binds:
            self._tpots[tpot] -= 1
            if self._tpots[tpot] <= 0:
                del self._tpots[tpot]
        self.expected_tokens -= sent.to_come
        return sent

    def observe_load(self, load: Load) -> None:
        """Telemetry. What exceeds our own counts in two reports in a row is the load of others. The first report of an
        instance that has none of ours counts at once, since a gateway may start into a running fleet."""
        previous, self.load = self.load, load
        self._reported_seqs = load.max_num_seqs or self._reported_seqs
        if previous is None or previous.awake != load.awake:
            self.changes += 1
        if previous is None:
            if not self.waiting and not self.running:
                self._others = self._not_ours(load)
                self._others_count = sum(self._others)
            return
        period = load.observed_at - previous.observed_at
        if period > 0:
            restarted = load.prompt_tokens_total < previous.prompt_tokens_total  # its counters begin with 0 again
            counted = load.prompt_tokens_total - (0 if restarted else previous.prompt_tokens_total)
            cached = max(0, load.cached_tokens_total - (0 if restarted else previous.cached_tokens_total))
            count_admitted(self._prompts, self.waiting.values(), counted)
            theirs = max(0, counted - self._prompts.total())  # below 0: of ours some were counted before the restart
            self.cached.observe(self._prompts, counted, cached)
            self._prompts.clear()
            computed = theirs * (1.0 - min(1.0, cached / max(1, counted)))
            self._others_prefill_rate = computed / period if self._others_count else 0.0
            if self._others_count or self.share < 1:  # theirs may begin and end between two reports
                self._prefill_work.counted(computed, self.latency.coefficients.prefill_b, load.observed_at)
        now, then = self._not_ours(load), self._not_ours(previous)
        self._others = (min(now[0], then[0]), min(now[1], then[1]))
        self._others_count = sum(self._others)

    def _not_ours(self, load: Load) -> tuple[int, int]:
        """Running and waiting beyond our own. An engine counts a prompt it prefills as running; here it still waits."""
        prefilling = max(0, len(self.waiting) - load.waiting)
        running = max(0, load.running - len(self.running) - prefilling)
        return running, max(0, load.waiting - len(self.waiting))

    def _leave_waiting(self, sent: Sent) -> None:
        self.waiting_tokens -= sent.request.prompt_tokens
        self.waiting_new -= sent.new_tokens
        self.waiting_squares -= sent.squares

    def _decoding(self) -> tuple[int, float]:
        """Sequences in a decode step and their tokens, those of others among them, which are taken to be like ours."""
        ours, others = len(self.running), self._others[0]
        return ours + others, self.context_tokens * (ours + others) / max(1, ours)

    def _learn(self, mark: tuple[float, int, int, int, int, float], tokens: int, now: float) -> None:
        at, before, prefilled, squares, batch, context = mark
        if (steps := tokens - before) <= 0 or (seconds := now - at) <= 0:
            return
        self._observed_at = now
        batch_now, context_now = self._decoding()
        mean_batch = (batch + batch_now) / 2
        mean_context = (context + context_now) / 2
        new, new_squares = self._prefilled[0] - prefilled, self._prefilled[1] - squares
        theirs = round(self._others_prefill_rate * seconds)
        if theirs:
            mean_prompt = self._prefilled[1] / max(1, self._prefilled[0])  # of ours, by token
            new, new_squares = new + theirs, new_squares + round(theirs * mean_prompt)
        k = self.latency.coefficients
        predicted = steps * (k.decode_a + k.decode_b * mean_context + k.decode_c * mean_batch)
        predicted += k.prefill_b * new + k.prefill_c * new_squares
        if self._stalled(seconds, predicted):
            return
        if self.fit.observe(steps, mean_batch, mean_context, new, new_squares, seconds):
            self.refitted()

    def _stalled(self, seconds: float, predicted: float) -> bool:
        """True for an interval that the host spoiled; one that is odd after many odd ones is the engine's own."""
        if seconds > ODD_RATIO * predicted and self._odd < ODD_LIMIT:
            self._odd += 1
            return True
        self._odd = 0
        return False

    def refitted(self) -> None:
        believe(self, self.fit.coefficients)

    def set_profile(self, coefficients: LatencyCoefficients) -> None:
        """A new profile from configuration: learning starts over from it."""
        self.fit = OnlineFit(coefficients)
        self.refitted()

    def view(self, now: float) -> FleetState:
        state = self.state if self.load is None or self.load.awake else "asleep"
        return FleetState(
            id=self.id,
            model=self.spec.model,
            role=self.spec.role.value,
            state=state,
            running=self.running_count,
            waiting=self.waiting_count,
            waiting_tokens=self.waiting_tokens,
            kv_usage=self.load.kv_usage if self.load else 0.0,
            slots=self.slots,
            utilisation=self.busy(now),
            telemetry_age_s=now - self.load.observed_at if self.load else None,
            sent_total=self.sent_total,
            extra=self.latency.coefficients._asdict(),
        )


class Roster:
    """Instances by id. An event about an instance that is gone changes nothing."""

    def __init__(self) -> None:
        self.instances: dict[str, ShadowInstance] = {}
        self._by_model: dict[str, dict[str, ShadowInstance]] = {}

    def of_model(self, model: str) -> Collection[ShadowInstance]:
        """The instances of one model; fleets may serve many."""
        return self._by_model.get(model, {}).values()

    def handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.InstanceUp):
            self.up(event)
        elif isinstance(event, ev.InstanceDown):
            self.down(event.instance_id)
        elif isinstance(event, INSTANCE_EVENTS):
            instance = self.instances.get(event.instance_id)
            if instance is not None:
                _change(instance, event)

    def up(self, event: ev.InstanceUp) -> ShadowInstance:
        """A new instance, or new settings of a known one; what is known of its requests and latency stays."""
        spec = event.spec
        known = self.instances.get(spec.id)
        if known is not None and known.spec.model == spec.model:
            if spec.latency is not None and spec.latency != known.spec.latency:
                known.set_profile(spec.latency)
            known.spec = spec
            known.state = "up"
            known.changes += 1
            return known
        if known is not None:
            self.down(spec.id)
        self.instances[spec.id] = instance = ShadowInstance(spec)
        if event.learned:
            relearn(instance, event.learned)
        self._by_model.setdefault(spec.model, {})[spec.id] = instance
        return instance

    def down(self, instance_id: str) -> ShadowInstance | None:
        instance = self.instances.pop(instance_id, None)
        if instance is not None:
            instance.state = "down"
            self._by_model[instance.spec.model].pop(instance_id, None)
        return instance


def _change(instance: ShadowInstance, event: InstanceEvent) -> None:
    if isinstance(event, ev.InstanceDraining):
        instance.state = "draining"
        instance.changes += 1
    elif isinstance(event, ev.SharesChanged):
        instance.share = min(1.0, max(0.0, event.share))
    elif isinstance(event, ev.FirstByteDelay):
        instance.first_byte = (event.fixed_s, event.s_a_token)
        instance.changes += 1
    elif isinstance(event, ev.DecodePace):
        instance.decode_pace = event
    else:
        instance.observe_load(event.load)
