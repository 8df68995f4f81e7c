"""The engine scheduler under random arrivals and aborts: nothing lost, doubled or invented."""

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.steps import Aborted, FinishReason
from controller.policies.batching import BATCHINGS
from tests.controller.engine.driver import Driver, expected_output, make_seq

arrivals = st.fixed_dictionaries(
    {
        "gap": st.integers(0, 3),  # steps since the one before
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=30),
        "max_tokens": st.integers(1, 12),
        "priority": st.integers(-1, 1),
        "abort_after": st.one_of(st.none(), st.integers(0, 12)),
    }
)


@settings(max_examples=120, deadline=None)
@given(
    script=st.lists(arrivals, min_size=1, max_size=14),
    batching=st.sampled_from(list(BATCHINGS)),
    policy=st.sampled_from(["priority", "fcfs"]),
    kv_blocks=st.integers(11, 24),
    budget=st.integers(4, 20),
)
def test_no_request_is_lost_doubled_or_invented(script, batching, policy, kv_blocks, budget):
    """Random arrivals and aborts on a tight cache: each ends once, with its own tokens, and all blocks return."""
    driver = Driver(
        batching,
        kv_blocks=kv_blocks,
        max_model_len=44,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        scheduling_policy=policy,
    )
    seqs, aborts = play(driver, script)
    driver.run()
    each_ended_once(driver, seqs, aborts)
    if batching == "chunked_prefill":
        assert all(step.tokens <= budget for step in driver.steps)


def each_ended_once(driver, seqs, aborts):
    """With its own tokens, all of them unless it was aborted; and every block came back."""
    assert set(driver.ended) == {seq.id for seq in seqs}
    for seq in seqs:
        expected, found = expected_output(seq), driver.outputs[seq.id]
        assert found == expected[: len(found)]
        if driver.ended[seq.id] is FinishReason.ABORT:
            assert seq.id in aborts
        else:
            assert len(found) == min(seq.max_tokens, 44 - seq.prompt_tokens)
    assert driver.scheduler.idle
    assert driver.scheduler.blocks.free == driver.scheduler.config.kv_blocks


def play(driver, script):
    seqs, due = [], []
    tick = 0
    for serial, item in enumerate(script):
        for _ in range(item["gap"]):
            tick += 1
            _abort_due(driver, due, tick)
            if driver.step is not None:
                driver.finish_step()
        seq = make_seq(
            str(serial),
            item["prompt"],
            item["max_tokens"],
            priority=item["priority"],
            arrival=driver.now + serial / 1e6,
        )
        seqs.append(seq)
        driver.add(seq)
        if item["abort_after"] is not None:
            due.append((tick + item["abort_after"], seq))
    for _, seq in due:
        driver.send(Aborted(seq))
    return seqs, {seq.id for _, seq in due}


def _abort_due(driver, due, tick):
    for when, seq in due:
        if when == tick:
            driver.send(Aborted(seq))
