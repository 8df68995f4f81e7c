"""One request in a simulation, and its record at the end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from controller.core.steps import Seq
from controller.core.types import Outcome, Request, Targets
from controller.simulator.report.results import SimRecord
from controller.simulator.workloads.demand import Demand
from controller.slo.attainment import judge


class SimulatedRequest:
    """State of one request. `sends`: attempts on engines. Times are on the gateway's clock, absolute.

    The client of a disaggregated request has its first token from the decode instance, once that has the KV, although
    the prefill instance sampled it (decision 30), or after a step there (InstanceSettings.first_token_with_kv).
    """

    __slots__ = (
        "demand",
        "first_at",
        "head",
        "instance",
        "landed_at",
        "prefill_instance",
        "prefilled_at",
        "prefills",
        "request",
        "seen",
        "sends",
        "sent_at",
        "seq",
    )

    def __init__(self, demand: Demand, request: Request) -> None:
        self.demand = demand
        self.request = request
        self.instance = ""
        self.seq: Seq | None = None
        self.prefills = False  # `seq` is its prefill stage alone
        self.sends = 0
        self.sent_at: float | None = None
        self.first_at: float | None = None
        self.head: array[float] = array("d")  # of the first token, if a decode instance sends it
        self.seen: array[float] = array("d")  # token times that its client saw until its engine failed
        self.prefill_instance = ""
        self.prefilled_at: float | None = None  # when its prefill ended, if another instance decodes
        self.landed_at: float | None = None  # when its KV arrived at the decode instance

    @property
    def landing(self) -> bool:
        """Whether its KV has arrived at the decode instance, and the gateway has not seen its first token yet."""
        return self.landed_at is not None and self.first_at is None

    def sequence(self, now: float, *, prefill_only: bool = False) -> Seq:
        """A new sequence for each attempt. The engine orders by the time of arrival at the engine, not at the gateway.

        `prefill_only`: it ends with its first token and its KV is kept, unless that is the whole answer.
        """
        self.prefills = prefill_only
        demand, targets = self.demand, self.request.targets
        self.seq = Seq(
            id=demand.id,
            arrival=now,
            prompt_tokens=demand.prompt_tokens,
            max_tokens=demand.output_tokens,
            ignore_eos=True,
            block_hashes=list(demand.prefix),
            due=demand.at + targets.ttft_s,
            ttft_s=targets.ttft_s,
            tpot_s=targets.tpot_s,
            value=self.request.value,
            estimate=demand.estimate,
            tenant=demand.tenant,
        )
        if prefill_only:
            self.seq.max_tokens, self.seq.keep_kv = 1, demand.output_tokens > 1
        return self.seq

    def decode_sequence(self, now: float, rank: int, first_with_kv: bool) -> Seq:
        """The sequence as a decode instance continues it: one token exists, or will, and all before it is computed
        elsewhere. Without `first_with_kv` the decode instance samples the first token again.
        """
        running, prefills = self.seq, self.prefills
        seq = self.sequence(now)
        self.seq, self.prefills = running, prefills
        seq.priority, seq.output_tokens = rank, int(first_with_kv)
        return seq

    def go_on(self, instance_id: str, seq: Seq, now: float) -> None:
        """Its KV has arrived: the decode instance sends the first token, if it has one."""
        self.instance, self.seq, self.landed_at, self.prefills = instance_id, seq, now, False
        if seq.output_tokens:
            seq.first_token_at = seq.last_token_at = now
            self.head = array("d", (now,))

    def recall(self) -> None:
        """The decode instance drops it again, before the client had its first token."""
        self.seq, self.landed_at, self.head = None, None, array("d")

    def restart(self) -> None:
        """Back to the queue, after a failure before the first token or a loss of KV."""
        self.instance, self.seq = "", None

    def record(self, outcome: Outcome, reason: str, now: float, times: Sequence[float], keep: bool) -> SimRecord:
        """`times`: of every token as the client saw it, absolute. TPOT is over all tokens after the first."""
        demand, seq, targets = self.demand, self.seq, self.request.targets
        produced = len(times)
        after = np.asarray(times) - demand.at
        ttft = float(after[0]) if produced else None
        tpot = float(after[-1] - after[0]) / (produced - 1) if produced > 1 else None
        e2e = now - demand.at if outcome is Outcome.OK else None
        outlook = judge(
            targets,
            outcome,
            ttft_s=ttft,
            tpot_s=tpot,
            e2e_s=e2e,
            prompt_tokens=demand.prompt_tokens,
            output_tokens=produced,
            token_times=(),
        )
        goodput = outlook.goodput_tokens
        if outcome is Outcome.OK and targets.deadline_s is None:
            goodput = paced_tokens(after, targets)
        return SimRecord(
            id=demand.id,
            at=demand.at,
            tenant=demand.tenant,
            slo_class=demand.slo_class,
            instance=self.instance,
            outcome=outcome,
            reason=reason,
            prompt_tokens=demand.prompt_tokens,
            output_tokens=produced,
            targets=targets,
            queue_s=None if self.sent_at is None else self.sent_at - demand.at,
            ttft_s=ttft,
            tpot_s=tpot,
            e2e_s=e2e,
            ttft_met=outlook.ttft_met,
            tpot_met=outlook.tpot_met,
            deadline_met=outlook.deadline_met,
            attained=outlook.attained,
            goodput_tokens=goodput,
            attempts=self.sends,
            preemptions=seq.preemptions if seq is not None else 0,
            cached_tokens=seq.cached if seq is not None else 0,
            prefill_instance=self.prefill_instance,
            kv_transfer_s=None
            if self.landed_at is None or self.prefilled_at is None
            else self.landed_at - self.prefilled_at,
            token_times=array("d", after.tolist()) if keep else None,
        )


def paced_tokens(after: np.ndarray, targets: Targets) -> int:
    """slo.attainment.token_goodput for a column, since a run judges tens of millions of tokens."""
    due = targets.ttft_s + np.arange(len(after)) * targets.tpot_s + 1e-9
    return int((after <= due).sum())
