"""KV that is damaged on its way: noticed by its checksum, told as such, and pulled again unharmed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson
import pytest

from controller.core.steps import FinishReason, Seq, SeqState
from tests.workers.engine.client import COMPLETIONS, complete, post, samples
from tests.workers.engine.offers import fleet_offer
from tests.workers.engine.process import FLEET
from tests.workers.engine.proxy import ELSEWHERE, Wire
from workers.engine.kv.links import Links, Peer
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import EmulatedKv
from workers.engine.kv.transfer import KvTraffic
from workers.engine.kv.wire import KvTransferError

PROMPT = list(range(10, 110))
LAYERS, TOKEN_BYTES = 4, 1024
A_LAYER = TOKEN_BYTES * len(PROMPT)


class Deaf(EmulatedKv):
    """Takes whatever comes, as a real cache does: only the checksum is left to tell."""

    def write(self, seq: Seq, layer: int, start: int, data: bytes) -> None:
        return


def framed(**content: object) -> int:
    """Bytes of a frame on the wire."""
    return 4 + len(orjson.dumps(content))


HEAD = framed(**EmulatedKv(LAYERS, TOKEN_BYTES).layout._asdict(), tokens=len(PROMPT))
LAYER_HEAD = framed(layer=0, start=0, stop=len(PROMPT))
WHOLE_LAYER = LAYER_HEAD + A_LAYER + 4


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (HEAD + LAYER_HEAD, "the first byte of all"),
        (HEAD + WHOLE_LAYER + LAYER_HEAD + A_LAYER // 2, "one in the middle of the second layer"),
        (HEAD + LAYERS * WHOLE_LAYER - 5, "the last one of all"),
        (HEAD + LAYER_HEAD + A_LAYER + 3, "the last one of a checksum"),
    ],
)
async def test_one_bit_that_was_turned_over_is_noticed(at: int, what: str) -> None:
    store = Deaf(LAYERS, TOKEN_BYTES)
    source = Seq("s", 0.0, len(PROMPT), 1, token_ids=[*PROMPT, 7], keep_kv=True, computed=len(PROMPT), output_tokens=1)
    source.state, source.finish = SeqState.FINISHED, FinishReason.LENGTH
    taken: list[Seq] = []
    server = KvServer(EmulatedKv(LAYERS, TOKEN_BYTES), "t", {"s": source}.get, taken.append)
    await server.start("127.0.0.1", 0)
    server.names.add(f"{ELSEWHERE}:{server.port}")
    links = Links(store, "t", KvTraffic(), 5.0)
    target = Seq("t", 0.0, len(PROMPT), 8, token_ids=[*PROMPT, 0], output_tokens=1)
    offer = fleet_offer(ELSEWHERE, server.port, "s", len(PROMPT))
    async with Wire(server.port) as wire:
        links.announce([Peer("p", ELSEWHERE, server.port)])
        await links.tried(5.0)  # its bandwidth is measured: what comes next is the pull
        wire.flip(at)
        with pytest.raises(KvTransferError, match="checksum of layer") as raised:
            await links.pull(offer, target)
        assert (wire.flips, raised.value.reason, raised.value.moved.reason) == (1, "corrupt", "corrupt"), what
        moved, first_token = await links.pull(offer, target)
        assert (first_token, moved.bytes) == (7, LAYERS * A_LAYER)
        async with asyncio.timeout(5.0):
            while not taken:
                await asyncio.sleep(0.01)
        assert len(taken) == 1, "of the damaged one nobody said that it was taken"
        (report,) = links.reports()
        assert (report.failures, "checksum" in report.last_error) == (1, True)
    links.close()
    server.close()


OPTIONS = (
    *("--profile", "constant:2ms", "--model", "tiny", "--max-model-len", "512", "--kv-blocks", "64"),
    *("--kv-layers", str(LAYERS), "--kv-token-bytes", str(TOKEN_BYTES), "--shutdown-timeout", "0"),
    *("--no-enable-prefix-caching",),
)


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    prefill = (*OPTIONS, "--role", "prefill", "--advertise-host", ELSEWHERE)
    return {"p": prefill, "d": (*OPTIONS, "--role", "decode")}


async def test_through_two_engines_it_is_told_its_blocks_are_free_and_the_same_offer_serves_again(sessions) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}
    whole = await complete(sessions["p"], **asked)
    first = await complete(sessions["p"], **{**asked, "max_tokens": 1}, kv_transfer_params={"do_remote_decode": True})
    params = first["kv_transfer_params"]
    async with Wire(params["remote_port"]) as wire:
        peer = {"id": "p", "host": ELSEWHERE, "port": params["remote_port"]}
        status, _ = await post(sessions["d"], "/links", {**FLEET, "id": "d", "peers": [peer], "wait_s": 5.0})
        assert status == 200, "its link is measured: what comes next is the pull"
        wire.flip(LAYERS * A_LAYER // 2)
        status, said = await post(sessions["d"], COMPLETIONS, {**asked, "kv_transfer_params": params})
        assert (status, said["error"]["kv"]["reason"], wire.flips) == (502, "corrupt", 1)
        assert (await samples(sessions["d"]))["vllm:kv_cache_usage_perc", ""] == 0
        status, said = await post(sessions["d"], COMPLETIONS, {**asked, "kv_transfer_params": params})
        assert (status, said["choices"][0]["text"]) == (200, whole["choices"][0]["text"])
