"""Theorem 1 of MFS: serving the smallest relative layer index first gives the shortest prefill, whatever the order."""

import itertools
import random
from typing import NamedTuple

import pytest

from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import DeferAndPromote
from controller.flow.scheduler import LayerStarted
from controller.simulator.flows.run import FlowRun


class Transfer(NamedTuple):
    """`layer` consumes it. A collective is ready when the layer before has been computed, reuse from the start."""

    name: str
    layer: int
    size: float
    collective: bool


def instance(seed):
    """Seconds of computing by layer, and at most five transfers over a link of rate 1."""
    rng = random.Random(seed)
    compute = [rng.choice([0.5, 1.0, 2.0]) for _ in range(rng.randint(2, 4))]
    kinds = [(layer, rng.random() < 0.5) for layer in rng.choices(range(len(compute)), k=rng.randint(2, 5))]
    return compute, [
        Transfer(f"{number}", layer, rng.choice([0.5, 1.0, 1.5, 3.0]), collective and layer > 0)
        for number, (layer, collective) in enumerate(kinds)
    ]


def makespan(compute, transfers, order):
    """When the last layer has been computed, with strict priorities in this order."""
    now, left = 0.0, {each.name: each.size for each in transfers}
    layer, computing_until = 0, None
    by_name = {each.name: each for each in transfers}
    while True:
        if computing_until is None and not any(left[each.name] for each in transfers if each.layer == layer):
            computing_until = now + compute[layer]
        ready = [
            name for name in order if left[name] and (not by_name[name].collective or by_name[name].layer <= layer)
        ]
        until = [computing_until] if computing_until is not None else []
        until += [now + left[ready[0]]] if ready else []
        step = min(until) - now
        now += step
        if ready:
            left[ready[0]] -= step
            if left[ready[0]] < 1e-12:
                left[ready[0]] = 0.0
        if computing_until is not None and now >= computing_until - 1e-12:
            layer, computing_until = layer + 1, None
            if layer == len(compute):
                return now


def by_index(transfers):
    return [each.name for each in sorted(transfers, key=lambda each: each.layer)]


@pytest.mark.parametrize("block", range(10))
def test_no_order_is_shorter_than_the_smallest_index_first(block):
    worse = 0
    for seed in range(100 * block, 100 * block + 100):
        compute, transfers = instance(seed)
        ours = makespan(compute, transfers, by_index(transfers))
        others = [makespan(compute, transfers, order) for order in itertools.permutations(e.name for e in transfers)]
        assert ours <= min(others) + 1e-9, seed
        worse += max(others) > ours + 1e-9
    assert worse > 20  # in many instances the order matters


@pytest.mark.parametrize("within", ["batch", "least"])
@pytest.mark.parametrize("seed", range(40))
def test_the_scheduler_serves_the_smallest_index_first(seed, within):
    """The same instances through the scheduler and the network that the simulator uses."""
    compute, transfers = instance(seed)
    run = FlowRun({"out": 1.0, "in": 9.0}, lambda: DeferAndPromote(DeferAndPromote.Config(within=within)))
    pending = {each.name: each for each in transfers}
    layer, computing_until, waits = 0, None, {each.name for each in transfers}

    def submit(ready):
        for each in ready:
            stage = FlowStage.COLLECTIVE if each.collective else FlowStage.REUSE
            del pending[each.name]
            run.submit(MsFlow(each.name, stage, each.size, "out", "in", "u", "b", ("r",), each.layer))

    run.tell("out", [LayerStarted("u", "b", 0)])
    submit([each for each in transfers if not each.collective])
    while layer < len(compute):
        if computing_until is None and not any(each.layer == layer and each.name in waits for each in transfers):
            computing_until = run.now + compute[layer]
        waits -= {flow.id for flow in run.advance(min(run.next_event(), computing_until or float("inf")))}
        if computing_until is not None and run.now >= computing_until - 1e-12:
            layer, computing_until = layer + 1, None
            run.tell("out", [LayerStarted("u", "b", layer)])
            submit([each for each in list(pending.values()) if each.layer <= layer])
    assert run.now == pytest.approx(makespan(compute, transfers, by_index(transfers)))
