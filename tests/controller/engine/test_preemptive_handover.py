"""KV of others on an engine that preempts prefills: taken over, and decoded between its prompts."""

import pytest

from controller.core.steps import Aborted, Landed, Reserve, SeqState
from tests.controller.engine.virtual_device import Device, build, prompt


def coming(name, tokens=1000, output=20):
    """A sequence whose first token another engine sampled."""
    seq = prompt(name, 0.0, tokens, output=output)
    seq.output_tokens = 1
    return seq


def test_what_landed_decodes_beside_prompts_and_leaves_nothing():
    seq = coming("d", output=20)
    device = Device(build()).add(prompt("A", 0.2, 10_000, 60.0))
    device.at(0.0, Reserve(seq))
    device.at(1.0, Landed(seq))
    device.run()
    assert len(device.tokens_at["d"]) == 19
    assert set(device.ends) == {"d", "A"}
    assert device.computed == {"A": 10_000}, "the KV that came was not computed again"
    assert device.engine.blocks.free == 4096
    assert device.engine.idle


def test_room_is_kept_for_its_longest_answer_or_it_is_refused():
    device = Device(build(kv_blocks=80, max_model_len=1200))
    first, second = coming("a", 600, output=500), coming("b", 600, output=500)
    device.at(0.0, Reserve(first), Reserve(second))
    device.at(1.0, Landed(first))
    device.run()
    assert device.rejected == {"b": "no_room"}
    assert list(device.ends) == ["a"]
    assert (second.blocks, device.engine.blocks.free) == ([], 80)


def test_one_that_fits_no_model_is_too_long():
    device = Device(build(max_model_len=500))
    device.at(0.0, Reserve(coming("a", 600)))
    device.run()
    assert device.rejected == {"a": "too_long"}


@pytest.mark.parametrize("landed", [False, True])
def test_one_that_hangs_up_gives_its_blocks_back(landed):
    seq = coming("d", output=500)
    device = Device(build())
    device.at(0.0, Reserve(seq))
    if landed:
        device.at(0.5, Landed(seq))
    device.at(1.0, Aborted(seq))
    device.run()
    assert seq.state is SeqState.FINISHED
    assert device.engine.blocks.free == 4096
    assert device.engine.idle


@pytest.mark.parametrize(
    ("size", "taking"),
    [
        ({"kv_blocks": 20, "max_model_len": 300}, [(0.11, Reserve)]),
        ({"kv_blocks": 200, "max_model_len": 300, "max_num_seqs": 2}, [(0.05, Reserve), (0.11, Landed)]),
    ],
    ids=["its blocks", "its seat"],
)
def test_kv_that_takes_the_room_of_the_prompt_to_run_next_makes_that_wait(size, taking):
    running, urgent, other = prompt("A", 0.0, 150, 100.0), prompt("B", 0.1, 100, 1.0), coming("C", 100)
    # The device stops only at its next boundary, so that the room is taken while the signal is out.
    device = Device(build(**size), lambda step, seconds, used: min(seconds, used + 0.04)).add(running, urgent)
    for when, event in taking:
        device.at(when, event(other))
    if len(taking) == 1:
        device.at(0.5, Landed(other))
    device.run()
    assert set(device.ends) == {"A", "B", "C"}
    assert device.rejected == {}
    assert device.engine.blocks.usage == 0
