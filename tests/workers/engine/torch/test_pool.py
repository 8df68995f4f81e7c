"""The execution pool: signal, acknowledgement, suspension, resumption; and FlowPrefill's scheduler on it."""

import queue
import random
import threading

import pytest
import torch

from controller.core.steps import Chunk, ComingPrefix, Seq, Step, StepDone, Suspended
from controller.engine import PreemptionConfig, PreemptivePrefill
from controller.policies.batching.slo_aware_batching import SloAwareBatching
from tests.workers.engine.torch.bench import Bench, engine_config, folder, program, prompts
from workers.engine.torch.executor import TorchExecutor
from workers.engine.torch.model.batch import segments_of
from workers.engine.torch.task import Boundary, ModelStage, OperatorProgram, StepTask

pytestmark = pytest.mark.torch
DENSE = ["qkv_proj", "attn", "o_proj", "gate_up_proj", "down_proj"]
SPARSE = ["qkv_proj", "attn", "o_proj", "gate", "experts"]


def step_of(step_id, tokens, first_block=0):
    seq = Seq(f"s{step_id}", 0.0, len(tokens), 4, token_ids=list(tokens))
    seq.blocks = list(range(first_block, first_block + -(-len(tokens) // 4)))
    return Step(step_id, (Chunk(seq, 0, len(tokens), last=True),), (), 0)


class Gate:
    """Lets the test decide when each operator of a program may run; `at` names the one that waits."""

    def __init__(self, plain: OperatorProgram) -> None:
        self.program = plain
        self.permits = threading.Semaphore(0)
        self.reached: queue.Queue[str] = queue.Queue()
        plain.stages = [stage._replace(operator=self._gated(stage)) for stage in plain.stages]

    def _gated(self, stage: ModelStage):
        def run(p):
            self.reached.put(stage.name)
            assert self.permits.acquire(timeout=20)
            stage.operator(p)

        return run

    def run_to(self, operators: int) -> list[str]:
        """Let so many operators run and wait until the next one asks; their names."""
        names = [self.reached.get(timeout=20)]
        for _ in range(operators):
            self.permits.release()
            names.append(self.reached.get(timeout=20))
        return names

    def free(self) -> None:
        self.permits.release(1000)


class Pool:
    def __init__(self, program, boundary=Boundary.OPERATOR):
        self.events: queue.Queue = queue.Queue()
        self.executor = TorchExecutor(program, self.events.put, lambda call: call(), self.events.put, boundary=boundary)

    def next(self):
        event = self.events.get(timeout=20)
        if isinstance(event, Exception):
            raise event
        return event

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.executor.close()


@pytest.mark.parametrize(
    ("architecture", "names"),
    [("LlamaForCausalLM", DENSE), ("MixtralForCausalLM", SPARSE), ("Qwen3MoeForCausalLM", SPARSE)],
)
def test_checks_lie_between_the_papers_operators(architecture, names):
    stages = program(folder(architecture)).stages
    assert [stage.name for stage in stages] == [*names, *names, "lm_head"]
    assert [stage.boundary for stage in stages[:5]] == [Boundary.OPERATOR] * 4 + [Boundary.LAYER]


@pytest.mark.parametrize(
    ("boundary", "signalled_in", "stops_behind"),
    [
        (Boundary.OPERATOR, 0, 1), (Boundary.OPERATOR, 1, 2), (Boundary.OPERATOR, 4, 5), (Boundary.OPERATOR, 7, 8),
        (Boundary.LAYER, 0, 5), (Boundary.LAYER, 3, 5), (Boundary.LAYER, 4, 5), (Boundary.LAYER, 6, 10),
    ],
)  # fmt: skip
@pytest.mark.sampled(3)
def test_a_signal_is_answered_at_the_next_boundary(boundary, signalled_in, stops_behind):
    gate = Gate(program(folder()))
    with Pool(gate.program, boundary) as pool:
        pool.executor.start(step_of(1, range(20)))
        gate.run_to(signalled_in)
        pool.executor.suspend(1)
        gate.free()
        event = pool.next()
        assert isinstance(event, Suspended)
        assert event.seconds > 0
        task = pool.executor._pool._aside[1]
        assert task.done == stops_behind


def test_a_signal_in_the_last_operator_is_answered_by_the_end():
    gate = Gate(program(folder()))
    with Pool(gate.program) as pool:
        pool.executor.start(step_of(1, range(20)))
        gate.run_to(10)
        pool.executor.suspend(1)
        gate.free()
        assert isinstance(pool.next(), StepDone)
        pool.executor.start(step_of(2, range(20)))
        assert pool.next().step_id == 2
        assert pool.events.empty()


def test_without_boundaries_a_step_runs_whole():
    gate = Gate(program(folder()))
    with Pool(gate.program, None) as pool:
        pool.executor.start(step_of(1, range(20)))
        gate.run_to(2)
        pool.executor.suspend(1)
        gate.free()
        assert isinstance(pool.next(), StepDone)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_step_left_behind_every_operator_ends_with_the_same_bits(architecture):
    """Other steps run in between; the last hidden states, logits and KV entries are compared bit for bit."""
    plain = program(folder(architecture))
    whole = StepTask(1, plain, segments_of(step_of(1, range(40))))
    with torch.inference_mode():
        while whole.done < whole.length - 1:
            whole.advance()
        hidden = whole._pass.hidden.clone()
        whole.advance()
    memory = plain.cache.memory[:, :, :10].clone()

    plain.cache.memory.zero_()
    cut, kept = StepTask(1, plain, segments_of(step_of(1, range(40)))), []
    with torch.inference_mode():
        for _ in range(cut.length):
            cut.advance()
            if cut._pass is not None:
                kept.append(cut._pass.hidden)
            other = StepTask(2, plain, segments_of(step_of(2, range(100, 150), first_block=20)))
            while not other.over:
                other.advance()
    assert torch.equal(kept[-1], hidden)
    assert torch.equal(plain.cache.memory[:, :, :10], memory)
    assert [token for _, token in cut.sampled] == [token for _, token in whole.sampled]


def test_others_run_while_one_lies_suspended_and_each_keeps_its_result():
    plain = program(folder())
    alone = {}
    with Pool(plain) as pool:
        for step_id in range(1, 6):
            pool.executor.start(step_of(step_id, range(step_id, step_id + 30), first_block=8 * (step_id - 1)))
            alone[step_id] = pool.next().sampled[0].token
    gate = Gate(program(folder()))
    with Pool(gate.program) as pool:
        for step_id in range(1, 6):
            pool.executor.start(step_of(step_id, range(step_id, step_id + 30), first_block=8 * (step_id - 1)))
            gate.run_to(step_id)
            pool.executor.suspend(step_id)
            gate.permits.release()
            assert isinstance(pool.next(), Suspended)
        gate.free()
        for step_id in (3, 1, 5, 2, 4):
            pool.executor.resume(step_id)
            done = pool.next()
            assert (done.step_id, done.sampled[0].token) == (step_id, alone[step_id])


def test_seconds_count_the_parts_and_not_the_wait():
    plain = program(folder())
    gate = Gate(plain)
    with Pool(plain) as pool:
        pool.executor.start(step_of(1, range(30)))
        gate.run_to(3)
        pool.executor.suspend(1)
        gate.free()
        first = pool.next()
        threading.Event().wait(0.3)
        pool.executor.resume(1)
        done = pool.next()
        assert first.seconds < done.seconds < first.seconds + 0.25


def test_commands_out_of_order_are_errors():
    gate = Gate(program(folder()))
    with Pool(gate.program) as pool:
        for wrong in (pool.executor.resume, pool.executor.discard):
            with pytest.raises(RuntimeError, match="step 1 is not suspended"):
                wrong(1)
        pool.executor.start(step_of(1, range(8)))
        with pytest.raises(RuntimeError, match="a step is running"):
            pool.executor.start(step_of(2, range(8)))
        gate.run_to(0)
        pool.executor.suspend(1)
        gate.free()
        pool.next()
        with pytest.raises(RuntimeError, match="step 1 is suspended already"):
            pool.executor.suspend(1)
        pool.executor.discard(1)
        with pytest.raises(RuntimeError, match="step 1 is not suspended"):
            pool.executor.resume(1)


def test_a_signal_after_a_task_stopped_for_a_layer_is_answered_by_that_stop():
    """The worker has put the task aside, and the scheduler, which has not heard of it yet, wants another prompt."""
    gate = Gate(program(folder()))
    step = step_of(1, range(8))
    step.chunks[0].seq.coming = ComingPrefix(Seq("prefix", 0.0, 4, 0), layers=1)
    with Pool(gate.program) as pool:
        pool.executor.start(step)
        gate.free()
        stopped = pool.next()
        pool.executor.suspend(1)
        assert isinstance(stopped, Suspended)
        assert stopped.layers == 2
        step.chunks[0].seq.coming.layers = 2
        pool.executor.resume(1)
        assert isinstance(pool.next(), StepDone)
        with pytest.raises(RuntimeError, match="step 1 is not suspended"):
            pool.executor.resume(1)


def test_a_broken_operator_is_reported_and_not_swallowed():
    plain = program(folder())

    def broken(p):
        raise MemoryError("no room")

    plain.stages[3] = plain.stages[3]._replace(operator=broken)
    with Pool(plain) as pool:
        pool.executor.start(step_of(1, range(8)))
        with pytest.raises(MemoryError, match="no room"):
            pool.next()


def test_closing_does_not_wait_for_the_step():
    gate = Gate(program(folder()))
    pool = Pool(gate.program)
    pool.executor.start(step_of(1, range(8)))
    gate.run_to(1)
    closing = threading.Thread(target=pool.executor.close)
    closing.start()
    gate.permits.release()
    closing.join(timeout=10)
    assert not closing.is_alive()
    assert pool.events.empty()


# ---- FlowPrefill's scheduler on the real executor -----------------------------------------------------------------


def preemptive(boundary, **settings):
    rules = SloAwareBatching.Config(prefill_a=0.001, prefill_b=1e-5, batch_tokens=100)
    return PreemptivePrefill(
        engine_config(200, max_num_seqs=16, max_model_len=300, **settings),
        SloAwareBatching(rules),
        PreemptionConfig(boundary=boundary, chunk_tokens=50 if boundary == "chunk" else None),
    )


@pytest.mark.parametrize("boundary", ["operator", "layer", "chunk"])
def test_an_urgent_prompt_goes_first_and_the_preempted_one_still_says_the_same(boundary):
    long, short = prompts(1, seed=20, longest=30)[0] * 7, prompts(1, seed=21)[0]
    alone = {}
    for name, prompt in (("long", long), ("short", short)):
        bench = Bench(program(folder(), 200), preemptive(boundary))
        bench.add(name, prompt, due=100.0, tpot_s=100.0)
        alone |= bench.run()
        bench.close()

    gate = Gate(program(folder(), 200))
    where = {"operator": Boundary.OPERATOR, "layer": Boundary.LAYER, "chunk": None}[boundary]
    bench = Bench(gate.program, preemptive(boundary), where)
    bench.add("long", long, due=100.0, tpot_s=100.0)
    gate.run_to(3)
    bench.add("short", short, due=1.0, tpot_s=100.0)
    gate.free()
    order = []
    bench_perform = bench._perform
    bench._perform = lambda action: (order.append(action), bench_perform(action))[1]
    assert bench.run() == alone
    bench.close()
    first = next(action.seq.id for action in order if hasattr(action, "token"))
    assert first == "short"
    if boundary == "chunk":
        assert bench.count(Suspended) == 0
    else:
        assert bench.count(Suspended) == 1
        assert bench.scheduler.rounds.resumes == 1


def test_many_random_preemptions_change_no_token():
    asked, rng = prompts(12, seed=30, longest=100), random.Random(30)
    alone = {}
    for index, prompt in enumerate(asked):
        bench = Bench(program(folder(), 200), preemptive("operator"))
        bench.add(str(index), prompt, max_tokens=4, due=100.0, tpot_s=100.0)
        alone |= bench.run()
        bench.close()
    preempted = 0
    for _ in range(4):
        bench = Bench(program(folder(), 200), preemptive("operator"))
        for index, prompt in enumerate(asked):
            bench.add(str(index), prompt, max_tokens=4, due=rng.uniform(1.0, 100.0), tpot_s=rng.uniform(0.01, 100.0))
            if rng.random() < 0.3:
                threading.Event().wait(rng.uniform(0.0, 0.003))
            while not bench.events.empty():
                event = bench.next_event()
                bench.log.append(event)
                bench.hand_in(event)
        assert bench.run() == alone
        preempted += bench.count(Suspended)
        bench.close()
    assert preempted > 0
