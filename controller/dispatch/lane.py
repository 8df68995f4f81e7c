"""Queue, traffic and instances of one served model, and what serving a request there is predicted to cost."""

from __future__ import annotations

from controller.core.decisions import Figure
from controller.core.policy import Cost
from controller.core.types import Request
from controller.dispatch.queue import RequestQueue
from controller.dispatch.shadow import Worker
from controller.dispatch.traffic import RecentTargets
from controller.predict.latency import LatencyModel

TPOT_MARGIN = 1.5  # a decode step alone this much slower than the target: no batch and no error of ours explains it


class Lane:
    """One model's part of the dispatcher's state."""

    def __init__(self, queue: RequestQueue, traffic: RecentTargets) -> None:
        self.queue = queue
        self.traffic = traffic
        self.workers: dict[str, Worker] = {}

    def cost(self, request: Request) -> Cost:
        """Predicted on the first instance: the fleet of one model is taken to be alike."""
        worker = next(iter(self.workers.values()), None)
        model = worker.latency if worker is not None else LatencyModel()
        tokens = request.prompt_tokens
        prefill = model.prefill_sums(tokens, tokens * tokens)
        context = tokens + request.output_tokens // 2
        batch = float(worker.outstanding) if worker is not None else 1.0
        service = prefill + request.output_tokens * model.marginal_decode(context, batch)
        return Cost(prefill, service, model.decode(1, context))

    def infeasible(self, request: Request, cost: Cost, margin: float) -> dict[str, Figure] | None:
        """The figures and the field to change, if the request could not make it even alone on an idle engine.

        `margin` (1.2 = 20 %) allows for the error of the prediction: a refusal cannot be taken back.
        """
        targets, tokens = request.targets, request.output_tokens
        if tokens > 1 and TPOT_MARGIN * targets.tpot_s < cost.decode_step_s:
            return {"field": "target_tbt", "decode_step_s": cost.decode_step_s, "tpot_s": targets.tpot_s}
        alone = cost.prefill_s + max(0, tokens - 1) * cost.decode_step_s
        if targets.deadline_s is not None and alone > margin * targets.deadline_s:
            return {"field": "deadline", "answer_s": alone, "deadline_s": targets.deadline_s}
        field, name, bound = "target_ttft", "ttft_s", targets.ttft_s
        # With a deadline alone, the target is cut to it: then the deadline is what asks too much.
        if targets.deadline_s is not None and targets.deadline_s <= bound:
            field, name, bound = "deadline", "deadline_s", targets.deadline_s
        if cost.prefill_s <= margin * bound:
            return None
        return {"field": field, "prefill_s": cost.prefill_s, name: bound}

    def retry_after_s(self) -> float:
        """Seconds until the queue as it is would be prefilled by all instances together, at least one."""
        if not self.workers:
            return 5.0
        rates = sum(1.0 / max(w.latency.prefill_sums(1000, 0), 1e-6) for w in self.workers.values())
        return max(1.0, self.queue.tokens / 1000 / rates)
