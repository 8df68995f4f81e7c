"""Prefixes that are copied over a shared link while their prompts are computed: two engine processes and a transfer
daemon, by which the copy whose next layer is needed sooner goes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from controller.flow.flows import FlowStage
from tests.waiting import until_on_loop
from tests.workers.engine.client import complete, post
from tests.workers.engine.kv.test_prefixes import borrowed, cached, link_to, links_of, slow_prefill
from tests.workers.engine.process import FLEET, EngineProcess, fleet
from tests.workers.flowd.running import MB, connected, nothing, serving
from workers.flowd.client import Flow, FlowClient
from workers.flowd.daemon import FlowDaemon

SHARED = [(7 * i + 3) % 500 for i in range(128)]
LAYERS, TOKEN_BYTES = 8, 32 << 10  # 4 MiB a layer: far more than the kernel takes at once
OWN = 60  # tokens of the prompt that are computed, 0.15 s a layer
OPTIONS = (
    *("--model", "tiny", "--max-model-len", "1024", "--kv-blocks", "128", "--shutdown-timeout", "0"),
    *("--kv-layers", str(LAYERS), "--kv-token-bytes", str(TOKEN_BYTES)),
)
RIVAL_BYTES = 2 * MB
SENT = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("flowd") / "d.sock")


@pytest.fixture(scope="module")
def engines(socket_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EngineProcess]]:
    options = (*OPTIONS, *slow_prefill(tmp_path_factory.mktemp("profile"), 0.02))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOW_SOCKET", socket_path)
        with fleet(source=options, borrower=(*options, "--borrow-tokens", "64", "--scheduler", "preemptive")) as found:
            yield found


async def rival_of(client: FlowClient, layer: int) -> Flow:
    """A copy to another engine, whose `layer` waits for it while layer 0 is computed there. It is small, since engines
    compute what is behind much on the link."""
    client.layer("rival", 0, "elsewhere")
    flow = client.submit(FlowStage.REUSE, RIVAL_BYTES, "127.0.0.1", None, "q", "rival", unit="elsewhere", layer=layer)
    await flow.turn(nothing)
    return flow


def permits(daemon: FlowDaemon) -> list[tuple[bool, bool, int]]:
    """Of each copy of the engine, whether it may send, whether the rival may, and its level. All as the daemon has
    decided at once: its clients hear of it one after the other, on a busy machine some milliseconds later."""
    flows = daemon.status()["flows"]
    [rival] = [each["go"] for each in flows if each["size_bytes"] == RIVAL_BYTES]
    copies = [each for each in flows if each["size_bytes"] == LAYERS * len(SHARED) * TOKEN_BYTES]
    return [(each["go"], rival, each["level"]) for each in copies]


async def test_a_copy_waits_while_its_next_layer_is_not_needed_yet(sessions, socket_path) -> None:
    source, borrower = sessions["source"], sessions["borrower"]
    async with serving(socket_path) as daemon, connected(socket_path) as client:
        await until_on_loop(lambda: len(daemon._clients) >= 2, within_s=10.0)
        await complete(source, prompt=[*SHARED, 499], max_tokens=1)
        await post(borrower, "/reset_prefix_cache", {**FLEET})
        await link_to(borrower, [(await links_of(source))["at"]])
        rival, seen, heard = await rival_of(client, layer=1), list[tuple[bool, bool, int]](), set[bool]()
        asked = asyncio.ensure_future(complete(borrower, prompt=[*SHARED, *range(OWN)], **SENT))
        while not asked.done():
            await asyncio.sleep(0.005)
            client.layer("rival", 0, "elsewhere")
            rival.sent(1)
            seen += permits(daemon)
            heard.add(rival.may_send)
        answer = await asked
        rival.end()
        whole = await complete(source, prompt=[*SHARED, *range(OWN)], **SENT)
    assert cached(answer) == len(SHARED), "held, and not taken for late"
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
    assert (await borrowed(borrower))[1] == 0
    told = [each for each in seen if each[2] > 1]  # that the daemon has placed
    assert told[0] == (True, False, 2), "layer 0 stalls the prompt, and goes before the rival"
    assert heard == {True, False}, "the rival waited, and went on"
    held = [number for number, (go, _, _) in enumerate(told) if not go]
    assert held, "layers that are needed later than the rival's gave way to it"
    assert any(go for go, _, _ in told[held[0] :]), "it went on when its prompt had come nearer"
    assert {level for go, _, level in told if go} <= {2, 3} < {level for _, _, level in told}
    assert all(rival_goes for go, rival_goes, level in told if level > 3)
