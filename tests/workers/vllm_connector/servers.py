"""Two servers' halves of the connector on this machine, without vLLM: caches of random bytes, and what is ordered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.waiting import until
from workers.supervisor.ports import free_port
from workers.vllm_connector.blocks import CacheBlocks
from workers.vllm_connector.plan import Kept, KvLoad, KvOrders, PromptOffer
from workers.vllm_connector.settings import ConnectorSettings
from workers.vllm_connector.transfers import Transfers, TransfersEnded

HOST, TOKEN, SECRET = "127.0.0.1", "of-one-fleet-only", "5" * 32
LAYERS, BLOCKS, BLOCK_TOKENS = 3, 12, 16
SENT, WANTED = (7, 2, 9, 4), (1, 3, 0, 5)  # blocks at either side
WAIT_S = 20.0


def cache(seed: int, entries: int = BLOCKS, width: int = 4096) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(seed)
    return {f"layer{at}": drawn.integers(0, 256, (entries, 2, width), np.uint8) for at in range(LAYERS)}


def blocks_of(caches: dict[str, np.ndarray], about: str = "model") -> CacheBlocks:
    return CacheBlocks(caches, BLOCKS, BLOCK_TOKENS, about)


def settings(port: int, peer: int, **changed: Any) -> ConnectorSettings:
    given = {"host": HOST, "port": port, "peers": frozenset({f"{HOST}:{peer}"}), "token": TOKEN, **changed}
    return ConnectorSettings(**given)


class Pair:
    """A server that prefilled and one that decodes. `here`, `there`: their caches."""

    def __init__(self, sender: dict[str, Any], receiver: dict[str, Any], about: str, width: int) -> None:
        ports = free_port(), free_port()
        self.here, self.there = cache(1, width=width), cache(2, width=width)
        self.source = Transfers(settings(*ports, **sender), blocks_of(self.here))
        self.target = Transfers(settings(*reversed(ports), **receiver), blocks_of(self.there, about))
        self.offer = PromptOffer(HOST, ports[0], SECRET, 60, "digest")
        self.moved = TransfersEnded(set(), set(), set())

    def keep(self, kv_usage: float = 0.0) -> None:
        self.source.order(KvOrders(kept=[Kept(SECRET, "p", SENT)], kv_usage=kv_usage))

    def load(self, offer: PromptOffer | None = None, due_in_s: float | None = None, kv_usage: float = 0.0) -> None:
        due = None if due_in_s is None else time.time() + due_in_s
        self.target.order(KvOrders(loads=[KvLoad("d", offer or self.offer, 0, WANTED, due)], kv_usage=kv_usage))

    def look(self) -> TransfersEnded:
        """All that has ended so far."""
        for side in (self.source, self.target):
            ended = side.ended()
            self.moved.sent.update(ended.sent)
            self.moved.loaded.update(ended.loaded)
            self.moved.lost.update(ended.lost)
        return self.moved

    def until(self, done: Callable[[TransfersEnded], object]) -> TransfersEnded:
        until(lambda: done(self.look()), WAIT_S)
        return self.moved

    def equal(self) -> bool:
        return all(
            np.array_equal(self.here[name][list(SENT)], self.there[name][list(WANTED)]) for name in self.here
        )  # fmt: skip


@contextmanager
def pair(
    sender: dict[str, Any] | None = None,
    receiver: dict[str, Any] | None = None,
    about: str = "model",
    width: int = 4096,
) -> Iterator[Pair]:
    """`sender`, `receiver`: settings that differ; `about`: the receiver's model."""
    made = Pair(sender or {}, receiver or {}, about, width)
    try:
        yield made
    finally:
        made.source.close()
        made.target.close()
