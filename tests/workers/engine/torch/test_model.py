"""Token for token what transformers' own implementation generates, however the work is batched, cut and interrupted."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.core.steps import CacheReset, Paused, Resumed
from controller.engine import EngineScheduler
from controller.policies.batching import BATCHINGS
from tests.workers.engine.torch.bench import Bench, engine_config, folder, interrupted, program, prompts
from workers.engine.model_config import FAMILIES
from workers.engine.torch.task import Boundary

pytestmark = pytest.mark.torch
LLAMA3_ROPE = ("--rope-factor", "8", "--rope-original", "64")


@cache
def reference(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def expected(path, prompt, tokens):
    """Greedy, one prompt at a time, with the library's own cache."""
    ids = torch.tensor([prompt])
    whole = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "min_new_tokens": tokens}
    out = reference(path).generate(ids, **whole, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def scheduler(batching="chunked_prefill", **settings):
    return EngineScheduler(engine_config(**settings), BATCHINGS[batching]())


def generated(path, asked, **settings):
    bench = Bench(program(path, settings.get("blocks", 64)), scheduler(**settings))
    for index, prompt in enumerate(asked):
        bench.add(str(index), prompt)
    tokens = bench.run()
    bench.close()
    return [tokens[str(index)] for index in range(len(asked))], bench.scheduler.totals


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_every_architecture_generates_what_the_library_does(architecture):
    path, asked = folder(architecture, "--shard-mb", "1"), prompts(6)
    found, _ = generated(path, asked)
    assert found == [expected(path, prompt, 12) for prompt in asked]


@pytest.mark.parametrize(
    "options", [("--tied",), LLAMA3_ROPE, ("--head-dim", "16"), ("--kv-heads", "8"), ("--kv-heads", "1")]
)
def test_every_option_of_a_config_counts(options):
    path, asked = folder("LlamaForCausalLM", *options), prompts(4, longest=100)
    found, _ = generated(path, asked)
    assert found == [expected(path, prompt, 12) for prompt in asked]


def test_the_rope_scaling_of_llama_3_is_not_the_plain_one():
    """Or the test above could not fail."""
    prompt = prompts(1, seed=3, longest=100)[0] * 2
    scaled, plain = folder("LlamaForCausalLM", *LLAMA3_ROPE), folder()
    with torch.inference_mode():
        one, other = (reference(path)(torch.tensor([prompt])).logits[0, -1] for path in (scaled, plain))
    assert not torch.allclose(one, other, atol=1e-2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("budget", [8, 16, 64, 512])
@pytest.mark.parametrize("batching", ["chunked_prefill", "vllm_v1", "iteration_level"])
def test_batches_and_chunks_change_nothing(budget, batching):
    path, asked = folder(), prompts(9, seed=budget)
    found, totals = generated(path, asked, batching=batching, max_num_batched_tokens=budget)
    assert found == [expected(path, prompt, 12) for prompt in asked]
    assert totals.steps > 12


def test_recomputed_sequences_go_on_as_before():
    path, asked = folder(), prompts(8, seed=5, longest=16)
    found, totals = generated(path, asked, blocks=20, max_model_len=80)
    assert totals.preemptions > 1
    assert found == [expected(path, prompt, 12) for prompt in asked]


def test_a_reused_prefix_is_the_same_prefix():
    path, asked = folder(), [prompts(1, seed=2, longest=60)[0] * 2] * 2
    bench = Bench(program(path))
    first = bench.add("a", asked[0])
    bench.run()
    again = bench.add("b", asked[1])
    bench.run()
    bench.close()
    assert first.cached == 0
    assert again.cached >= len(asked[1]) - 5
    assert bench.tokens["a"] == bench.tokens["b"] == expected(path, asked[0], 12)


def test_a_dropped_cache_and_a_pause_in_between_change_nothing():
    path, asked = folder(), prompts(5, seed=7)
    bench = Bench(program(path))
    for index, prompt in enumerate(asked):
        bench.add(str(index), prompt)
    for turn in range(4):
        bench.hand_in(bench.next_event())
        bench.hand_in(Paused(release_kv=turn % 2 == 0))
        bench.hand_in(bench.next_event()) if bench.scheduler._step is not None else None
        bench.hand_in(CacheReset())
        bench.hand_in(Resumed())
    tokens = bench.run()
    bench.close()
    assert [tokens[str(index)] for index in range(5)] == [expected(path, prompt, 12) for prompt in asked]


@pytest.mark.parametrize("boundary", list(Boundary))
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_steps_left_at_every_boundary_generate_the_same(boundary, architecture):
    path, asked = folder(architecture), prompts(6, seed=4)
    tokens, bench = interrupted(path, asked, boundary)
    assert bench.executor.suspensions > bench.scheduler.totals.steps
    assert [tokens[str(index)] for index in range(6)] == [expected(path, prompt, 12) for prompt in asked]


def test_an_aborted_sequence_disturbs_no_other():
    path, asked = folder(), prompts(4, seed=9)
    bench = Bench(program(path))
    seqs = [bench.add(str(index), prompt) for index, prompt in enumerate(asked)]
    bench.hand_in(bench.next_event())
    bench.abort(seqs[1])
    tokens = bench.run()
    bench.close()
    assert len(tokens["1"]) < 12
    assert [tokens[name] for name in "023"] == [expected(path, asked[int(name)], 12) for name in "023"]


def test_the_end_token_ends_a_sequence_unless_it_may_not_yet():
    path, prompt = folder(), prompts(1)[0]
    free = expected(path, prompt, 12)
    stopping = program(path)
    object.__setattr__(stopping.model.config, "eos", frozenset({free[4]}))
    bench = Bench(stopping)
    bench.add("plain", prompt)
    bench.add("ignoring", prompt, ignore_eos=True)
    bench.add("longer", prompt, min_tokens=8)
    tokens = bench.run()
    bench.close()
    at = free.index(free[4])
    assert tokens["plain"] == free[: at + 1]
    assert tokens["ignoring"] == free
    assert len(tokens["longer"]) > 8
    assert free[4] not in tokens["longer"][:8]
