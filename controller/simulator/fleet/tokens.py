"""The time of each token, without one object per token.

Under a steady batching policy every running sequence that decodes gets one token in each step. So an instance keeps one
array of step end times, and a sequence only the spans of steps in which it decoded (one, unless it was preempted).
"""

from __future__ import annotations

from array import array


class Track:
    """Tokens of one sequence: closed spans (first step, tokens), and the first step of the open span."""

    __slots__ = ("counted", "open_at", "spans", "times")

    def __init__(self, counted: int = 0) -> None:
        """`counted`: tokens that it had before it arrived here, which are in no span."""
        self.spans: list[tuple[int, int]] = []
        self.open_at = -1
        self.counted = counted
        self.times: array[float] = array("d")  # time of each token, in place of spans, when steps are run one by one

    def begin(self, step: int, tokens_before: int) -> None:
        """A prefill ended in `step`: the first token, or the next one after a preemption."""
        if self.open_at >= 0:
            self.spans.append((self.open_at, tokens_before - self.counted))
            self.counted = tokens_before
        self.open_at = step

    def collect(self, step_ends: array[float], tokens: int) -> array[float]:
        """Times of the first `tokens` tokens."""
        if self.times:
            return self.times[:tokens]
        found: array[float] = array("d")
        for start, count in self.spans:
            found.extend(step_ends[start : start + count])
        if self.open_at >= 0:
            found.extend(step_ends[self.open_at : self.open_at + tokens - self.counted])
        return found
