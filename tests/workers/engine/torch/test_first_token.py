"""A source of the fleet that says nonsense: an engine with a real model says so and lives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from controller.core.steps import FinishReason, Seq, SeqState
from tests.workers.engine.client import COMPLETIONS, complete, post, samples
from tests.workers.engine.offers import signed
from tests.workers.engine.process import FLEET
from tests.workers.engine.torch.bench import VOCABULARY, folder, program
from workers.engine.kv.server import KvServer
from workers.engine.torch.kv.layout import TorchKv

pytestmark = pytest.mark.torch
PROMPT = [(7 * i) % VOCABULARY for i in range(100)]


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    common = ("--executor", "torch", "--model", str(folder()), "--threads", "1", "--kv-cache-gib", "0.01")
    return {"d": (*common, "--profile", "constant:5ms", "--shutdown-timeout", "0", "--role", "decode")}


@pytest.mark.parametrize(("token", "status"), [(10**6, 502), (VOCABULARY, 502), (VOCABULARY - 1, 200)])
async def test_a_first_token_beyond_the_vocabulary_is_an_error_and_the_engine_lives(
    sessions: dict[str, aiohttp.ClientSession], token: int, status: int
) -> None:
    made = program(folder(), block_size=16)
    source = Seq("s", 0.0, 100, 1, token_ids=[*PROMPT, token], keep_kv=True, computed=100, output_tokens=1)
    source.blocks, source.state, source.finish = list(range(7)), SeqState.FINISHED, FinishReason.LENGTH
    server = KvServer(TorchKv(made.cache, made.model), FLEET["token"], {"s": source}.get, lambda seq: None)
    await server.start("127.0.0.1", 0)
    offer = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": server.port}
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    params = signed({**offer, "remote_request_id": "s", "remote_num_tokens": 100, "first_token": 1})
    answered, said = await post(sessions["d"], COMPLETIONS, {**body, "kv_transfer_params": params})
    assert answered == status, said
    if status == 502:
        assert (said["error"]["kv"]["reason"], f"{token} is not a valid first token" in said["error"]["message"]) == (
            "corrupt",
            True,
        )
    assert (await samples(sessions["d"]))["vllm:kv_cache_usage_perc", ""] == 0
    assert (await complete(sessions["d"], **{**body, "prompt": [1, 2, 3]}))["usage"]["completion_tokens"] == 4
    server.close()
