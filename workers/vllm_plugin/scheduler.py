"""A scheduler class for vLLM that orders its queue, and chooses who decodes, by Slackline's policies.

It changes what vLLM's scheduler sees before a step (the order of the waiting queue, who sits out, who loses a seat),
and never what it does in a step: KV blocks, chunks, prefix cache and stops remain vLLM's. The queue is ordered once a
step and stands still within it, because vLLM peeks at a request, decides, and pops it later. Times are monotonic
seconds.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from controller.core.steps import Aborted, Added, Chunk, FinishReason, Seq, Step, StepRan
from controller.core.told_hints import estimate_of
from workers.vllm_plugin.arrivals import Arrivals
from workers.vllm_plugin.hints import read_hints
from workers.vllm_plugin.policy import EngineNow, first_due, policy_of, settings_from
from workers.vllm_plugin.versions import check_version

check_version(vllm.__version__)


class _Sent(NamedTuple):
    """A step on its way. `began`: when it was given to the model."""

    step: Step
    began: float


class SlacklineScheduler(AsyncScheduler):
    """`--scheduler-cls workers.vllm_plugin.scheduler.SlacklineScheduler`; settings: `--additional-config`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings_from(self.vllm_config.additional_config)
        self._policy = policy_of(self._settings, self.max_num_active_reqs)
        # Under `--scheduling-policy priority` vLLM's queue is a heap, which has no other order.
        self.waiting: Any = FCFSRequestQueue()
        self._seqs: dict[str, Seq] = {}
        self._arrivals = Arrivals(time.monotonic, time.time)
        self._sent: deque[tuple[int, _Sent]] = deque()
        self._ended = 0.0  # the last step
        self._pauses = False  # the plan of this step lets running requests sit out
        self._stood = False  # the last step ran nothing, while running requests sat out

    # ---- requests --------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        if request.request_id not in self.requests:
            seq = self._seqs[request.request_id] = _seq_of(request, self._arrivals.at(request.arrival_time))
            self._policy.observe(Added(seq), time.monotonic())
        super().add_request(request)

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        """Every request ends here, however it ends."""
        seq = self._seqs.pop(request.request_id, None)
        if seq is not None:
            aborted = request.status == RequestStatus.FINISHED_ABORTED
            seq.finish = FinishReason.ABORT if aborted else FinishReason.STOP
            if aborted:
                self._policy.observe(Aborted(seq), time.monotonic())
        return super()._free_request(request, delay_free_blocks)

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        _refresh(self._seqs[request.request_id], request)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        now = time.monotonic()
        held = self._arrange(now)
        decoding = {request.request_id for request in self.running if self._seqs[request.request_id].decoding}
        output = super().schedule(throttle_prefills)
        self._stood = self._pauses and not output.num_scheduled_tokens
        self.waiting.extend(held)
        self._sent.append((id(output), _Sent(self._step(output, decoding), now)))
        return output

    def _arrange(self, now: float) -> list[Any]:
        """Order the queue for this step; returns the requests that are taken out of it for the step."""
        for request in self.running:  # one that waits changes only when it is preempted
            seq = self._seqs[request.request_id]
            _refresh(seq, request)
            if seq.first_token_at is None and seq.decoding:  # the step before this one computes it, if it has not yet
                seq.first_token_at = now
        engine = EngineNow(
            self.max_num_scheduled_tokens,
            self.max_num_active_reqs,
            [self._seqs[request.request_id] for request in self.running],
            [self._seqs[request.request_id] for request in self.waiting],
        )
        plan = self._policy.plan(engine, now)
        # Who is paused keeps its blocks, and who waits may lack them: the same plan again would run nothing for long.
        paused = () if plan is None or self._stood else plan.paused
        self._pauses = bool(paused)
        if plan is None:
            return []
        evicted = {seq.id for seq in plan.evicted if self._evict(self.requests[seq.id], now)}
        for seq in paused:
            if seq.id not in evicted:  # `schedule` counts the step first
                self.requests[seq.id].next_decode_eligible_step = self.current_step + 2
        self.waiting.clear()
        self.waiting.extend(self.requests[seq.id] for seq in plan.waiting)
        return [self.requests[name] for name in (*(seq.id for seq in plan.held), *sorted(evicted))]

    def _evict(self, request: Any, now: float) -> bool:
        """Take its seat and KV; it is computed again later. False if its blocks are still being read."""
        if request.status != RequestStatus.RUNNING or not self._request_blocks_can_be_freed(request):
            return False
        self.running.remove(request)
        self._preempt_request(request, now, drop_stale_output=self.requires_kv_delivery)
        return True

    def _step(self, output: Any, decoding: set[str]) -> Step:
        chunks, decodes = [], []
        for name, tokens in output.num_scheduled_tokens.items():
            seq = self._seqs[name]
            if name in decoding:
                decodes.append(seq)
            else:
                request = self.requests[name]  # its tokens of this step are counted as computed already
                start = request.num_computed_tokens - tokens
                chunks.append(Chunk(seq, start, tokens, not request.is_prefill_chunk))
        decodes.sort(key=lambda seq: (seq.tokens, seq.id))
        return Step(self.current_step, tuple(chunks), tuple(decodes), sum(seq.tokens for seq in decodes))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        while self._sent:
            name, sent = self._sent.popleft()
            if name == id(scheduler_output):
                self._ran(sent, now)
                break
        return outputs

    def _ran(self, sent: _Sent, now: float) -> None:
        """Steps overlap: one begins when the one before it ends, at the earliest."""
        seconds, self._ended = now - max(sent.began, self._ended), now
        for seq in (*sent.step.decodes, *(chunk.seq for chunk in sent.step.chunks)):
            request = self.requests.get(seq.id)
            if request is None or seq.finish is not None:
                continue
            _refresh(seq, request)
        if sent.step.chunks or sent.step.decodes:
            self._policy.observe(StepRan(sent.step, 1, seconds), now)


def _seq_of(request: Any, arrived: float) -> Seq:
    """Its targets on this clock, from what was left when it reached the server's front end, at `arrived`."""
    params = request.sampling_params
    hints = read_hints(params.extra_args if params is not None else None)
    seq = Seq(
        request.request_id,
        arrived,
        request.num_prompt_tokens,
        request.max_tokens,
        priority=request.priority,
        due=first_due(arrived, hints.ttft_left_s),
        ttft_s=hints.ttft_s,
        tpot_s=hints.tpot_s,
        value=hints.value,
        tenant=hints.told.tenant,
    )
    seq.estimate = estimate_of(hints.told, seq, arrived)
    return seq


def _refresh(seq: Seq, request: Any) -> None:
    """vLLM counts tokens as computed when it schedules them, and a token that is on its way as a placeholder."""
    seq.computed = request.num_computed_tokens
    seq.output_tokens = request.num_output_tokens + request.num_output_placeholders
