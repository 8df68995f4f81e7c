"""KV of a prefill that is left for a more urgent one, of a real model: the cases of test_suspended, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.workers.engine import test_suspended as cases
from tests.workers.engine.suspended import LAYERS, Pair, Part, listening, of_pairs
from tests.workers.engine.torch.bench import folder
from workers.engine.config import parse
from workers.engine.server import with_model
from workers.engine.torch.kv.layout import TorchKv
from workers.engine.torch.task import ModelStage, OperatorProgram

pytestmark = pytest.mark.torch


class Gates:
    """One in front of each layer of a model, for all steps together."""

    def __init__(self, program: OperatorProgram) -> None:
        self._permits = threading.Semaphore(0)
        program.stages = [self._behind(stage) if stage.name == "qkv_proj" else stage for stage in program.stages]

    def let(self, layers: int) -> None:
        self._permits.release(layers)

    def _behind(self, stage: ModelStage) -> ModelStage:
        def operator(p: Any) -> None:
            self._permits.acquire()
            stage.operator(p)

        return stage._replace(operator=operator)


def part(role: str, *more: str) -> tuple[Part, OperatorProgram]:
    options = ("--port", "0", "--host", "127.0.0.1", "--executor", "torch", "--threads", "1", "--kv-blocks", "64")
    model = ("--model", str(folder("LlamaForCausalLM", "--layers", str(LAYERS))), "--no-enable-prefix-caching")
    serving = ("--profile", "constant:1ms", "--scheduler", "slackline", "--role", role)
    config = with_model(parse([*options, *model, *serving, *more]))
    return Part(config, TorchKv(config.program.cache).token_bytes), config.program


@pytest.fixture
async def pair(fleet_token) -> AsyncIterator[Pair]:
    (prefill, program), (decode, _) = part("prefill"), part("decode")
    async with listening(Pair(prefill, decode, Gates(program))) as pair:
        yield pair


globals().update(of_pairs(cases))
