"""Whatever comes, wherever it is stopped: nothing is lost, computed twice or kept; rounds are about two a request."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.steps import (
    Aborted,
    Added,
    FinishReason,
    Landed,
    Paused,
    Reserve,
    Resumed,
    Seq,
    Start,
    Suspend,
    Suspended,
)
from controller.engine import PreemptionConfig
from controller.policies.ordering.prefill_orders import PREFILL_ORDERS
from tests.controller.engine.virtual_device import Device, build, prompt
from workers.engine.emulated import EmulatedExecutor
from workers.engine.profiles import load_profile

SLOWEST = 0.05  # seconds until a boundary

requests = st.lists(
    st.tuples(
        st.integers(0, 40),  # arrives, tenths of a second
        st.integers(1, 900),  # tokens: milliseconds
        st.integers(1, 60),  # deadline after arrival, tenths
        st.integers(1, 4),  # output
        st.one_of(st.none(), st.integers(0, 60)),  # aborted, tenths
    ),
    max_size=14,
)
takeovers = st.lists(
    st.tuples(
        st.integers(0, 400),  # room is asked for, hundredths of a second
        st.integers(1, 900),  # tokens whose KV comes
        st.integers(1, 30),  # output
        st.one_of(st.none(), st.integers(0, 300)),  # landed after hundredths; None: it never does, and hangs up
    ),
    max_size=6,
)
preemptions = st.builds(
    lambda kind, chunk: PreemptionConfig(kind, chunk or (100 if kind == "chunk" else None), decode_a=0.01),
    st.sampled_from(["operator", "layer", "chunk", "none"]),
    st.sampled_from([None, 64, 300]),
)


def device_of(seed, engine):
    rng = random.Random(seed)
    return Device(engine, lambda step, seconds, used: used + rng.random() * SLOWEST)


@pytest.mark.simulated
@settings(deadline=None, max_examples=150)
@given(
    rows=requests,
    coming=takeovers,
    preemption=preemptions,
    ordering=st.sampled_from(sorted(PREFILL_ORDERS)),
    seed=st.integers(0, 99),
    room=st.sampled_from([(70, 16), (4096, 16), (4096, 2)]),
    pause=st.one_of(st.none(), st.tuples(st.integers(0, 40), st.booleans())),
)
def test_nothing_is_lost_or_doubled(rows, coming, preemption, ordering, seed, room, pause):
    blocks, slots = room
    engine = build(ordering, True, 700, preemption, kv_blocks=blocks, max_model_len=1000, max_num_seqs=slots)
    device = device_of(seed, engine)
    seqs = []
    for number, (arrives, tokens, deadline, output, aborted) in enumerate(rows):
        seq = prompt(f"r{number}", arrives / 10, tokens, (arrives + deadline) / 10, output, tpot_s=0.1)
        seqs.append(seq)
        device.at(seq.arrival, Added(seq))
        if aborted is not None:
            device.at(max(aborted / 10, seq.arrival) + 1e-4, Aborted(seq))
    for number, (asked, tokens, output, landed) in enumerate(coming):
        seq = prompt(f"kv{number}", asked / 100, tokens, output=output + 1, tpot_s=0.1)
        seq.output_tokens = 1  # sampled where its prompt was computed
        seqs.append(seq)
        device.at(seq.arrival, Reserve(seq))
        device.at(seq.arrival + 4.0 if landed is None else seq.arrival + landed / 100, _arrival(seq, landed))
    if pause is not None:
        device.at(pause[0] / 10, Paused(pause[1]))
        device.at(pause[0] / 10 + 1.0, Resumed())
    if pause is not None and pause[1]:
        device.computed = _Forgiving()
    device.run()
    assert {seq.id for seq in seqs} == device.ends.keys() | device.rejected.keys()
    assert all(name.startswith("kv") for name in device.rejected)
    assert device.running is None
    assert not device.beside
    assert engine.idle
    assert engine.blocks.usage == 0
    for seq in seqs:
        if seq.id in device.rejected:
            continue
        if seq.finish is FinishReason.LENGTH:
            assert seq.output_tokens == seq.max_tokens
            if seq.id.startswith("r"):
                assert device.ends[seq.id] >= seq.arrival + seq.prompt_tokens * 0.001 - 1e-9
        else:
            assert seq.finish is FinishReason.ABORT


def _arrival(seq, landed):
    return Aborted(seq) if landed is None else Landed(seq)


class _Forgiving(dict):
    """KV was given back: prompts are computed again from their start."""

    def get(self, name, default=0):
        return _Any()


class _Any:
    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch", [True, False])
def test_about_two_rounds_a_request(batch):
    rng = random.Random(7)
    engine = build(batch=batch)
    device = device_of(7, engine)
    at = 0.0
    for number in range(400):
        at += rng.expovariate(2.5)
        device.add(prompt(f"r{number}", at, rng.randint(20, 600), at + rng.choice([0.5, 5.0])))
    device.run()
    rounds = engine.rounds
    submits = 400 - rounds.batched
    assert rounds.rounds == 400 + submits  # one for each arrival, one for each task's end
    assert rounds.submits == submits
    assert rounds.preempts == rounds.resumes > 0
    assert (rounds.batched > 0) is batch
    commands = sum(what in ("start", "resume", "suspend") for _, what, _ in device.log)
    assert commands < 2 * rounds.rounds


def test_the_same_tokens_whether_suspended_or_not():
    """Through the emulated executor of the reference engine: preemption changes times, never results."""
    assert _tokens(stops=0) == _tokens(stops=5)


def _tokens(stops):
    timer, out = _Timer(), []
    engine = build()
    profile = load_profile("constant:10ms")

    def sink(event):
        if isinstance(event, Suspended):
            out.append(("suspended", event.seconds))
            executor.resume(event.step_id)
        else:
            out.extend(sampled.token for sampled in event.sampled)

    executor = EmulatedExecutor(profile, timer, sink, _Halves())
    (start,) = engine.handle([Added(Seq("A", 0.0, 50, 1, due=9.0, seed=3))], 0.0).actions
    assert isinstance(start, Start)
    executor.start(start.step)
    for _ in range(stops):
        timer.time += 0.001
        executor.suspend(start.step.id)
        timer.fire()
    timer.fire()
    assert sum(isinstance(each, tuple) for each in out) == stops
    assert timer.time == pytest.approx(0.01)
    return [each for each in out if not isinstance(each, tuple)]


class _Halves:
    def next_boundary(self, step, seconds, used):
        return used + 0.0005


class _Timer:
    def __init__(self):
        self.time, self.pending = 0.0, None

    def now(self):
        return self.time

    def call_at(self, when, callback):
        self.pending = (when, callback)
        return lambda: setattr(self, "pending", None)

    def fire(self):
        (when, callback), self.pending = self.pending, None
        self.time = max(self.time, when)
        callback()


def test_a_suspend_reaches_the_executor_by_id():
    engine = build()
    device = Device(engine)
    device.tell(Added(prompt("A", 0.0, 1000, 9.0)))
    reply = engine.handle([Added(prompt("B", 0.1, 10, 0.2))], 0.1)
    assert [type(action) for action in reply.actions] == [Suspend]
    assert reply.actions[0].step_id == device.running[0].id
