"""A device on virtual time for the preemptive scheduler: runs, suspends and resumes steps, and checks the protocol."""

import heapq
import math

from controller.core.steps import (
    Aborted,
    Added,
    Discard,
    Finish,
    Landed,
    Reject,
    Resume,
    Seq,
    Start,
    StepsDone,
    Suspend,
    Suspended,
)
from controller.engine import EngineConfig, PreemptionConfig, PreemptivePrefill
from controller.policies.batching.slo_aware_batching import SloAwareBatching, SloAwareBatchingConfig

MS = 0.001  # seconds a token


def at_once(step, seconds, used):
    """Boundaries everywhere: a signal is answered where it finds the step."""
    return used


def build(ordering="s_edf", batch=True, batch_tokens=4096, preemption=None, **engine):
    config = {"kv_blocks": 4096, "max_model_len": 60_000, "max_num_seqs": 16, "prefix_caching": False, **engine}
    rules = SloAwareBatching(SloAwareBatchingConfig(0.0, MS, 0.0, batch_tokens, ordering, batch))
    return PreemptivePrefill(EngineConfig(**config), rules, preemption or PreemptionConfig())


def prompt(name, arrives, tokens, deadline=math.inf, output=1, **fields):
    return Seq(name, arrives, tokens, output, ignore_eos=True, due=deadline, ttft_s=deadline - arrives, **fields)


class Device:
    """`log`: what the scheduler commanded, with its times. `ends`: when each sequence ended."""

    def __init__(self, engine, boundary=at_once, token_s=MS, decode_s=0.01):
        self.engine, self.boundary = engine, boundary
        self.token_s, self.decode_s = token_s, decode_s
        self.now = 0.0
        self.log, self.ends, self.rejected = [], {}, {}
        self.running = None  # [step, seconds, used, since, until]
        self.beside = {}
        self.happenings = []
        self.wake_at = None
        self.computed = {}
        self.tokens_at = {}
        self._serial = 0

    def at(self, when, *events):
        self._serial += 1
        heapq.heappush(self.happenings, (when, self._serial, events))

    def add(self, *seqs):
        for seq in seqs:
            self.at(seq.arrival, Added(seq))
        return self

    def run(self, limit=100_000):
        for _ in range(limit):
            if not self.turn():
                return self
        raise AssertionError("it never ends")

    def turn(self):
        due = self.running[3] + self.running[4] - self.running[2] if self.running else math.inf
        external = self.happenings[0][0] if self.happenings else math.inf
        wake = self.wake_at if self.wake_at is not None else math.inf
        self.now = max(self.now, min(due, external, wake))
        if min(due, external, wake) == math.inf:
            return False
        if due <= min(external, wake):
            self.tell(self._ended())
        elif external <= wake:
            self.tell(*heapq.heappop(self.happenings)[2])
        else:
            self.tell()
        return True

    def _ended(self):
        step, seconds, _, _, until = self.running
        self.running = None
        if until < seconds:
            self.beside[step.id] = [step, seconds, until]
            return Suspended(step.id, until)
        for chunk in step.chunks:
            assert self.computed.get(chunk.seq.id, 0) == chunk.start, "computed twice or never"
            self.computed[chunk.seq.id] = chunk.start + chunk.length
        for seq in step.decodes:
            self.tokens_at.setdefault(seq.id, []).append(self.now)
        return StepsDone(step.id, 1, seconds)

    def tell(self, *events):
        happened = [event for event in events if not self._pointless(event)]
        reply = self.engine.handle(happened, self.now)
        self.wake_at = reply.wake_at
        assert self.wake_at is None or self.wake_at >= self.now
        for action in reply.actions:
            self._do(action)
        self.engine.check()

    def _pointless(self, event):
        """Nothing more is told of one that got no room, and of one that ended not that its KV came."""
        match event:
            case Landed(seq):
                return seq.id in self.rejected or seq.id in self.ends
            case Aborted(seq):
                return seq.id in self.rejected
        return False

    def _do(self, action):
        match action:
            case Start(step):
                assert self.running is None
                seconds = self.token_s * sum(c.length for c in step.chunks) + self.decode_s * bool(step.decodes)
                self.running = [step, seconds, 0.0, self.now, seconds]
                self.log.append((self.now, "decode" if step.decodes else "start", self._names(step)))
            case Suspend(step_id):
                step, seconds, used, since, _ = self.running
                assert step.id == step_id
                self.running[4] = min(seconds, self.boundary(step, seconds, used + self.now - since))
                self.log.append((self.now, "suspend", self._names(step)))
            case Resume(step_id):
                assert self.running is None
                step, seconds, used = self.beside.pop(step_id)
                self.running = [step, seconds, used, self.now, seconds]
                self.log.append((self.now, "resume", self._names(step)))
            case Discard(step_id):
                step, _, _ = self.beside.pop(step_id)
                self.log.append((self.now, "discard", self._names(step)))
            case Finish(seq):
                assert seq.id not in self.ends
                self.ends[seq.id] = self.now
            case Reject(seq, code):
                self.rejected[seq.id] = code

    @staticmethod
    def _names(step):
        return " ".join(seq.id for seq in (*(chunk.seq for chunk in step.chunks), *step.decodes))
