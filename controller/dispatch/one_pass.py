"""One pass of HyperFlexis Alg. 1 over the queue for one worker: what goes to it now, and how much room there was."""

from __future__ import annotations

import math
from typing import NamedTuple

from controller.core.policy import Admission
from controller.dispatch.config import DispatchConfig
from controller.dispatch.lane import Lane
from controller.dispatch.pacing import Pacing, Room
from controller.dispatch.queue import Entry
from controller.dispatch.shadow import Worker


class Chosen(NamedTuple):
    """`probability`: of meeting its targets there, as the admission judged it."""

    entry: Entry
    probability: float


class Pass:
    """Chooses and sends nothing itself. `config`: how far down the queue it looks and whose targets bind."""

    def __init__(self, config: DispatchConfig, admission: Admission, pacing: Pacing) -> None:
        self._config = config
        self._admission = admission
        self._pacing = pacing

    def choose(self, lane: Lane, worker: Worker, now: float) -> tuple[list[Chosen], Room]:
        """In the queue's order, what fits into the room the worker has under its own and the queue's targets."""
        ttft = lane.traffic.tightest(now, default=math.inf)
        tpot = worker.tightest_tpot(self._config.tightest_share)
        room = self._pacing.room(worker, ttft, tpot, now)
        free_tokens = math.inf if math.isinf(room.slots) else worker.free_tokens()  # without bound: the engine queues
        idle = not worker.outstanding
        chosen: list[Chosen] = []
        if not idle and room.tokens <= 1:
            return chosen, room
        used = kv = skipped = 0
        lone = idle  # one prompt goes whatever eq. 7 says of it
        for _, entry in lane.queue.ready:
            if len(chosen) >= min(room.slots, self._pacing.per_pass or math.inf) or skipped >= self._config.scan_limit:
                break
            request = entry.request
            tighter = worker.decodes and request.targets.tpot_s < tpot and request.output_tokens > 1
            own = self._pacing.room(worker, ttft, request.targets.tpot_s, now) if tighter else room
            need = worker.kv_need(request)
            has_blocks = kv + need < free_tokens
            fits = used + request.prompt_tokens < own.tokens and has_blocks
            # A prompt beyond any budget goes where no prefill waits and decodes have slack, or it would go nowhere.
            alone = not chosen and (idle or (has_blocks and not worker.waiting_count and own.tokens > 1))
            if (fits or alone) and not lane.may_go(entry, worker, now):
                fits = alone = False
            if not (fits or alone):
                skipped += 1
                continue
            verdict = self._admission.judge(request, entry.cost, worker, own.backlog_s, now)
            if not (verdict.admit or entry.forced):
                skipped += 1
                continue
            if tighter:  # only what is sent binds the others
                tpot, room = request.targets.tpot_s, own
            lone = lone or not fits
            chosen.append(Chosen(entry, verdict.probability))
            used += request.prompt_tokens
            kv += need
        if self._pacing.exact and not worker.spec.selects:
            self._check_exact(worker, chosen, ttft, tpot, lone)
        return chosen, room

    @staticmethod
    def _check_exact(worker: Worker, chosen: list[Chosen], ttft: float, tpot: float, lone: bool) -> None:
        """H5: eq. 5 drops the quadratic term; check eq. 7 once more with the full eq. 1 and let the last ones wait."""
        decode_s = worker.decode_s()
        while len(chosen) > (1 if lone else 0):
            new = [entry.request.prompt_tokens for entry, _ in chosen]
            tokens = worker.waiting_tokens + sum(new)
            squares = worker.waiting_squares + sum(n * n for n in new)
            prefill = worker.latency.prefill_sums(tokens, squares)
            if worker.latency.maturity(prefill, decode_s, tpot) <= ttft:
                return
            chosen.pop()
