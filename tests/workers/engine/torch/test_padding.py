"""What lies in the cache beside a sequence's own entries is nobody's: whatever it is, it changes no answer."""

from __future__ import annotations

import math

import pytest
import torch

from controller.core.steps import Chunk, FinishReason, Seq, SeqState, Step
from tests.workers.engine.offers import fleet_offer
from tests.workers.engine.proxy import ELSEWHERE, Wire
from tests.workers.engine.torch.bench import VOCABULARY, folder, program
from tests.workers.engine.torch.test_model import expected
from workers.engine.kv.links import Links, Peer
from workers.engine.kv.server import KvServer
from workers.engine.kv.transfer import KvTraffic
from workers.engine.kv.wire import KvTransferError
from workers.engine.torch.kv.layout import TorchKv
from workers.engine.torch.model.batch import segments_of
from workers.engine.torch.task import OperatorProgram, StepTask

pytestmark = pytest.mark.torch
LENGTHS = (37, 5, 18)
TOKENS = 6


def prompt(length: int) -> list[int]:
    return [(7 * i + length) % VOCABULARY for i in range(length)]


@torch.inference_mode()
def run(made: OperatorProgram, step: Step) -> None:
    task = StepTask(step.id, made, segments_of(step))
    while not task.over:
        task.advance()
    for segment, token in task.sampled:
        segment.seq.computed = segment.end
        segment.seq.token_ids.append(token)
        segment.seq.output_tokens += 1


def answers(made: OperatorProgram, damaged: int | None = None) -> list[list[int]]:
    """Of prompts of all lengths, in two chunks each and then decoded together. None of them has block 0; `damaged` is
    the one whose own entries are no numbers when that begins."""
    seqs, free = [], iter(range(1, 64))
    for length in LENGTHS:
        blocks = [next(free) for _ in range(-(-(length + TOKENS) // made.cache.block_size))]
        seqs.append(Seq(str(length), 0.0, length, TOKENS, token_ids=prompt(length), blocks=blocks))
    for seq in seqs:
        run(made, Step(1, (Chunk(seq, 0, 3, False),), (), 0))
        run(made, Step(2, (Chunk(seq, 3, seq.prompt_tokens - 3, True),), (), 0))
    if damaged is not None:
        made.cache.memory[:, :, seqs[damaged].blocks] = math.nan
    for turn in range(TOKENS - 1):
        run(made, Step(3 + turn, (), tuple(seqs), 0))
    return [seq.token_ids[seq.prompt_tokens :] for seq in seqs]


def of_the_library() -> list[list[int]]:
    return [expected(folder(), prompt(length), TOKENS) for length in LENGTHS]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
def test_entries_that_are_no_numbers_stay_with_the_request_they_belong_to(which: int, bad: float) -> None:
    made = program(folder())
    made.cache.memory[:, which, 0] = bad
    assert answers(made) == of_the_library()


@pytest.mark.parametrize("damaged", range(len(LENGTHS)))
def test_those_that_are_decoded_beside_a_damaged_one_are_not_damaged(damaged: int) -> None:
    found, wanted = answers(program(folder()), damaged), of_the_library()
    assert found[damaged] != wanted[damaged]
    assert [*found[:damaged], *found[damaged + 1 :]] == [*wanted[:damaged], *wanted[damaged + 1 :]]


async def test_a_pull_that_ended_with_a_wrong_checksum_changes_no_other_answer() -> None:
    """Its entries were written before the checksum came, into the block that shorter sequences were padded with."""
    one, other = program(folder()), program(folder())
    one.cache.memory.fill_(math.nan)
    here, there = TorchKv(one.cache), TorchKv(other.cache)
    source = Seq("s", 0.0, 4, 1, token_ids=[1, 2, 3, 4, 9], keep_kv=True, blocks=[0], computed=4, output_tokens=1)
    source.state, source.finish = SeqState.FINISHED, FinishReason.LENGTH
    server = KvServer(here, "t", {"s": source}.get, lambda taken: None)
    await server.start("127.0.0.1", 0)
    server.names.add(f"{ELSEWHERE}:{server.port}")
    links = Links(there, "t", KvTraffic(), 30.0)
    target = Seq("t", 0.0, 4, 8, token_ids=[1, 2, 3, 4, 0], output_tokens=1, blocks=[0])
    async with Wire(server.port) as wire:
        links.announce([Peer("p", ELSEWHERE, server.port)])
        await links.tried(5.0)  # its bandwidth is measured: what comes next is the pull
        wire.flip(3 * here.token_bytes)
        with pytest.raises(KvTransferError, match="checksum of layer"):
            await links.pull(fleet_offer(ELSEWHERE, server.port, "s", 4), target)
    links.close()
    server.close()
    assert other.cache.memory[0, :, 0].isnan().any()
    assert answers(other) == of_the_library()
