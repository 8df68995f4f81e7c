"""KV that is taken while it is computed, of engines on emulated devices: the cases of test_suspended, in order."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from tests.workers.engine import test_suspended as cases
from tests.workers.engine.suspended import Pair, listening, of_pairs
from tests.workers.engine.torch.test_suspended import Gates, part
from tests.workers.engine.torch.two_devices import EmulatedTensor, emulated

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build for CUDA: test_cuda is for that"),
]


@pytest.fixture
async def pair(fleet_token: str) -> AsyncIterator[Pair]:
    """The one computes and gives, the other takes and goes on."""
    with emulated():
        (prefill, program), (decode, other) = (part(role, "--device", "cuda") for role in ("prefill", "decode"))
        assert {type(each.cache.memory) for each in (program, other)} == {EmulatedTensor}
        async with listening(Pair(prefill, decode, Gates(program))) as pair:
            yield pair


globals().update(of_pairs(cases))
