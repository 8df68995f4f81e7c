"""Progress of the KV of a prompt that is still being computed: by steps, and by layers within the running step.

A transfer that overlaps with its prefill asks here before it reads. The entries of a token in a layer exist once the
step that computes the token has passed the layer. A sequence that was evicted is computed again, with equal entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from controller.core.steps import Seq, SeqState, Step


class KvProgress:
    """`layers_done(step_id)`: the number of layers that a running step has passed; 0 for a step that has ended."""

    def __init__(self, layers_done: Callable[[int], int] = lambda step_id: 0) -> None:
        self._layers_done = layers_done
        self._computing: dict[str, tuple[int, int]] = {}  # by sequence: id of its newest step, its tokens after that

    def began(self, step: Step) -> Iterator[Seq]:
        """Call when a step begins. Yields the sequences whose prefill ends with it, among those whose KV is kept for
        another engine."""
        for seq, start, length, last in step.chunks:
            if seq.keep_kv:
                self._computing[seq.id] = (step.id, start + length)
                if last:
                    yield seq

    def forget(self, seq: Seq) -> None:
        self._computing.pop(seq.id, None)

    def coming(self, seq: Seq) -> int:
        """Number of tokens whose entries exist, or will exist after its newest step."""
        return max(seq.computed, self._computing.get(seq.id, (0, 0))[1])

    def running(self, seq: Seq) -> int | None:
        """The step that computes entries of it now; None if there is none."""
        step_id, end = self._computing.get(seq.id, (0, 0))
        return step_id if seq.state is SeqState.RUNNING and seq.computed < end else None

    def layers_done(self, step_id: int) -> int:
        return self._layers_done(step_id)

    def is_written(self, seq: Seq, layer: int, stop: int) -> bool:
        """Whether the entries of all tokens below `stop` in this layer are written."""
        if seq.computed >= stop:
            return seq.coming is None or seq.coming.layers > layer
        step_id, end = self._computing.get(seq.id, (0, 0))
        return seq.state is SeqState.RUNNING and end >= stop and self._layers_done(step_id) > layer
