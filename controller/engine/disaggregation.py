"""KV transfers as the engine's scheduler sees them: sequences that arrive from or wait for another engine.

A decode engine reserves blocks before anything is sent, so that arriving KV always has room. A prefill engine keeps the
blocks of a finished sequence until the other side has copied them. The migrator (controller.dispatch) decides which
request goes where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from controller.core.steps import Seq, SeqState
from controller.engine.blocks import BlockManager
from controller.engine.errors import ProtocolError
from controller.engine.seats import Key, SeqQueue


class KvInTransit:
    """Sequences by stage of their transfer.

    `incoming`: blocks reserved, KV on its way. `arrived`: KV here, waiting for a slot. `held`: finished here, kept
    until another engine has taken the KV.
    """

    def __init__(self, blocks: BlockManager, key: Callable[[Seq], Key]) -> None:
        self._blocks = blocks
        self.incoming: dict[str, Seq] = {}
        self.arrived = SeqQueue(key)
        self.held: dict[str, Seq] = {}
        self._stale: set[str] = set()  # incoming when cached prefixes were dropped: theirs must not be cached either

    @property
    def coming(self) -> int:
        """Sequences that hold blocks here but no slot."""
        return len(self.incoming) + len(self.arrived)

    def reserve(self, seq: Seq) -> bool:
        """Take blocks for its current tokens, less its cached prefix. All or nothing: False if there are too few."""
        if not self._blocks.fits(seq):
            return False
        seq.cached = self._blocks.take_prefix(seq)
        self._blocks.extend(seq, seq.tokens - seq.computed)
        seq.state = SeqState.ARRIVING
        self.incoming[seq.id] = seq
        return True

    def land(self, seq: Seq) -> None:
        if self.incoming.pop(seq.id, None) is not seq:
            raise ProtocolError(f"KV of {seq.id!r} landed without a reservation")
        self._stale.discard(seq.id)
        seq.computed = seq.tokens - 1  # the newest token was sampled, not yet computed
        self._blocks.seal(seq, seq.cached)
        self.arrived.add(seq)

    def keep_prefix(self, seq: Seq, tokens: int) -> None:
        """End a reservation: the first `tokens` tokens stay in the prefix cache, as far as they fill blocks."""
        if self.incoming.pop(seq.id, None) is not seq:
            raise ProtocolError(f"a prefix of {seq.id!r} ended without a reservation")
        if seq.id not in self._stale:
            seq.computed = max(seq.cached, min(tokens, seq.tokens))
            self._blocks.seal(seq, seq.cached)
        self._stale.discard(seq.id)
        self._blocks.release(seq)

    def lend(self, seq: Seq) -> None:
        """Keep the cached prefix of a sequence of another engine until `release`."""
        self._blocks.take_prefix(seq)
        seq.state = SeqState.FINISHED
        self.hold(seq)

    def forget_prefixes(self) -> None:
        """Cached prefixes are dropped, most likely because the model changes."""
        self._stale.update(self.incoming)

    def drop(self, seq: Seq) -> None:
        """Give up an incoming or arrived sequence."""
        if self.incoming.pop(seq.id, None) is None:
            self.arrived.remove(seq)
        self._stale.discard(seq.id)
        self._blocks.release(seq)

    def hold(self, seq: Seq) -> None:
        self.held[seq.id] = seq

    def release(self, seq: Seq) -> None:
        if self.held.get(seq.id) is seq:
            del self.held[seq.id]
            self._blocks.release(seq)

    def holders(self) -> Iterator[Seq]:
        """All sequences here that hold blocks."""
        yield from self.incoming.values()
        yield from self.arrived
        yield from self.held.values()
