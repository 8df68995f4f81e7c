"""How far the KV of a prompt is that is still being computed: by whole steps, and by layers within the step that runs.

A transfer that overlaps with its prefill asks here before it reads: entries of a token in a layer are there once the
step that computes the token has passed the layer. A sequence that gave its blocks back begins anew, with equal entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from controller.core.steps import Seq, SeqState, Step


class KvProgress:
    """`layers_done(step_id)`: how many layers a step under way has passed, 0 for one that is over."""

    def __init__(self, layers_done: Callable[[int], int] = lambda step_id: 0) -> None:
        self._layers_done = layers_done
        self._computing: dict[str, tuple[int, int]] = {}  # by sequence: its newest step, its tokens when that has ended

    def began(self, step: Step) -> Iterator[Seq]:
        """Those whose prompt will be whole when this step has ended, of the sequences whose KV others take."""
        for seq, start, length, last in step.chunks:
            if seq.keep_kv:
                self._computing[seq.id] = (step.id, start + length)
                if last:
                    yield seq

    def forget(self, seq: Seq) -> None:
        self._computing.pop(seq.id, None)

    def coming(self, seq: Seq) -> int:
        """Tokens whose entries are there, or will be when its newest step has ended."""
        return max(seq.computed, self._computing.get(seq.id, (0, 0))[1])

    def there(self, seq: Seq, layer: int, stop: int) -> bool:
        """Are the entries of all tokens below `stop` in this layer written?"""
        if seq.computed >= stop:
            return True
        step_id, end = self._computing.get(seq.id, (0, 0))
        return seq.state is SeqState.RUNNING and end >= stop and self._layers_done(step_id) > layer
