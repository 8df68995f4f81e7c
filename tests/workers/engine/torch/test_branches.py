"""Branches of a checkpoint with a real model: the copied block holds the KV that the branch would have computed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from controller.core.steps import Release
from controller.engine import EngineScheduler
from controller.policies.batching import BATCHINGS
from tests.workers.engine.torch.bench import Bench, engine_config, folder, program

pytestmark = pytest.mark.torch
PROMPT = list(range(10, 24))


def test_branches_say_what_whole_prompts_say():
    made = program(folder())
    scheduler = EngineScheduler(engine_config(prefix_caching=False), BATCHINGS["chunked_prefill"]())
    bench = Bench(made, scheduler)
    step = bench.add("step", PROMPT, 5, ignore_eos=True, checkpoint="step")
    bench.run()
    prompts = [[*step.token_ids, 30 + number] for number in range(4)]
    for number, prompt in enumerate(prompts):
        bench.add(f"whole-{number}", prompt, 6, ignore_eos=True)
        bench.run()
    branches = [
        bench.add(f"branch-{number}", prompt, 6, ignore_eos=True, branch_of="step")
        for number, prompt in enumerate(prompts)
    ]
    bench.run()
    for number, seq in enumerate(branches):
        assert bench.tokens[f"branch-{number}"] == bench.tokens[f"whole-{number}"]
        assert seq.cached == len(PROMPT) + 4, "all but the newest token, which had no KV"
    assert len({tuple(tokens) for tokens in bench.tokens.values()}) > 3
    bench.hand_in(Release(step))
    assert scheduler.blocks.usage == 0
    bench.close()


def test_a_branch_of_evicted_kv_says_the_same():
    scheduler = EngineScheduler(engine_config(prefix_caching=False, pinned_share=1.0), BATCHINGS["chunked_prefill"]())
    bench = Bench(program(folder()), scheduler)
    step = bench.add("step", PROMPT, 5, ignore_eos=True, checkpoint="step")
    bench.run()
    prompt = [*step.token_ids, 30]
    held = bench.add("held", prompt, 6, ignore_eos=True, branch_of="step")
    bench.run()
    for number in range(2):  # from 25 to 35 blocks each, of all 64
        bench.add(f"large-{number}", range(10 * number, 100 + 10 * number), 40, ignore_eos=True)
    bench.run()
    assert not scheduler.checkpoints
    late = bench.add("late", prompt, 6, ignore_eos=True, branch_of="step")
    bench.run()
    assert (held.cached, late.cached) == (len(PROMPT) + 4, 0)
    assert bench.tokens["late"] == bench.tokens["held"]
    assert scheduler.blocks.usage == 0
    bench.close()
