"""KV that comes from another engine or waits to be taken by one: the engine's side of prefill/decode disaggregation.

On a decode engine blocks are reserved before anything is sent, so that what arrives always has its place; on a prefill
engine the blocks of an ended sequence stay until the other side has them. Who goes where is the migrator's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from controller.core.steps import Seq, SeqState
from controller.engine.blocks import BlockManager
from controller.engine.errors import ProtocolError
from controller.engine.queue import Key, SeqQueue


class Handover:
    """`incoming`: reserved, on its way. `arrived`: here, waits for a slot. `held`: ended here, wanted elsewhere."""

    def __init__(self, blocks: BlockManager, key: Callable[[Seq], Key]) -> None:
        self._blocks = blocks
        self.incoming: dict[str, Seq] = {}
        self.arrived = SeqQueue(key)
        self.held: dict[str, Seq] = {}

    @property
    def coming(self) -> int:
        """Sequences with blocks here and no slot."""
        return len(self.incoming) + len(self.arrived)

    def reserve(self, seq: Seq) -> bool:
        """Blocks for the sequence as it is, less what the prefix cache has; False (and nothing taken) without room."""
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
        seq.computed = seq.tokens - 1  # the newest token was sampled, not yet computed
        self._blocks.seal(seq, seq.cached)
        self.arrived.add(seq)

    def drop(self, seq: Seq) -> None:
        """One that arrives is not wanted any more."""
        if self.incoming.pop(seq.id, None) is None:
            self.arrived.remove(seq)
        self._blocks.release(seq)

    def hold(self, seq: Seq) -> None:
        self.held[seq.id] = seq

    def release(self, seq: Seq) -> None:
        if self.held.get(seq.id) is seq:
            del self.held[seq.id]
            self._blocks.release(seq)

    def holders(self) -> Iterator[Seq]:
        """Everybody here who has blocks."""
        yield from self.incoming.values()
        yield from self.arrived
        yield from self.held.values()
