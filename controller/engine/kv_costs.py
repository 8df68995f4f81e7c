"""What the loss of a sequence's KV costs here: to copy it to host memory and back, or to compute it again.

Both are learned from the steps that ran, and begin with what was measured before the first one. Seconds are those for
which the batch stands still, so a prompt token that is computed beside decodes is charged what it adds to the step.
Attention makes a prompt's later tokens dearer, so seconds per token are kept by position, in ranges that double.
An estimate that only unused copies could correct moves back to what was measured at the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.core.steps import Step

LEARNING = 0.2  # weight of the newest observation
FORGETTING = 0.02  # of what was learned of copies, with each time that they looked dearer


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Measured at the start, in seconds. `out_s`, `back_s`: of one KV block; None: not measured. `prefill_s`: per
    prompt token, by the token's position."""

    out_s: float | None = None
    back_s: float | None = None
    prefill_s: Mapping[int, float] = field(default_factory=dict)


class KvCosts:
    """Learned costs of one engine. `block_size` in tokens; `swaps`: whether there is host memory to copy to."""

    def __init__(self, block_size: int, start: MeasuredCosts | None = None, *, swaps: bool = False) -> None:
        self._block_size, self._swaps = block_size, swaps
        self._start = start or MeasuredCosts()
        self._out_s, self._back_s = self._start.out_s, self._start.back_s
        self._decode_s: dict[int, float] = {}  # of a step without prompts, by the number of its sequences (`_about`)
        self._prefill_s = {_range(position): seconds for position, seconds in self._start.prefill_s.items()}

    # ---- what was seen --------------------------------------------------------------------------------------------

    def observe(self, step: Step, seconds: float, out_s: float = 0.0, back_s: float = 0.0) -> None:
        """A step has ended. `seconds`: all of it; `out_s`, `back_s`: of them for copies to host memory and back."""
        if step.swaps.out and out_s > 0:
            self._out_s = _learn(self._out_s, out_s / len(step.swaps.out))
        if step.swaps.back and back_s > 0:
            self._back_s = _learn(self._back_s, back_s / len(step.swaps.back))
        computing = seconds - out_s - back_s
        if computing <= 0:
            return
        beside = _about(len(step.decodes))
        if not step.chunks:
            self._decode_s[beside] = _learn(self._decode_s.get(beside), computing)
            return
        # What decodes cost is known from steps of about as many. Without such a step, the prompt's part is not known.
        extra = computing - self._decode_s.get(beside, computing) if step.decodes else computing
        if extra > 0:
            self._learn_prefill(step, extra / sum(chunk.length for chunk in step.chunks))

    def _learn_prefill(self, step: Step, token_s: float) -> None:
        for place in {_range(chunk.start + chunk.length // 2) for chunk in step.chunks}:
            self._prefill_s[place] = _learn(self._prefill_s.get(place), token_s)

    def copies_looked_dearer(self) -> None:
        """Nothing was copied, so that an estimate of copies that is too high would stay for ever."""
        self._out_s = _back(self._out_s, self._start.out_s)
        self._back_s = _back(self._back_s, self._start.back_s)

    # ---- what it costs --------------------------------------------------------------------------------------------

    def swap_s(self, blocks: int, both: bool = True) -> float | None:
        """Seconds to copy this many blocks to host memory and, with `both`, back. None: not known here."""
        if not self._swaps or self._out_s is None or self._back_s is None:
            return None
        return blocks * (self._out_s + (self._back_s if both else 0.0))

    def back_s(self, blocks: int) -> float:
        """Seconds to copy this many blocks from host memory; 0 where that is not known."""
        return blocks * (self._back_s or 0.0)

    def recompute_s(self, tokens: int) -> float | None:
        """Seconds to compute the KV of a sequence's first `tokens` tokens. None: no prompt has been seen yet."""
        if not self._prefill_s:
            return None
        found, first = 0.0, 0
        while first < tokens:
            until = min(tokens, max(2 * first, 16))
            found += (until - first) * self._token_s(_range((first + until) // 2))
            first = until
        return found

    def stall_s(self, kv_tokens: int, both: bool = True) -> float | None:
        """Seconds that the loss of this much KV costs by the cheaper way. None: nothing is known yet."""
        ways = (self.swap_s(-(-kv_tokens // self._block_size), both), self.recompute_s(kv_tokens))
        return min((way for way in ways if way is not None), default=None)

    def figures(self) -> dict[str, Any]:
        """Learned so far, in seconds, for people."""
        return {
            "block_out_s": self._out_s,
            "block_back_s": self._back_s,
            "prefill_token_s": {str(1 << place): seconds for place, seconds in sorted(self._prefill_s.items())},
        }

    def _token_s(self, place: int) -> float:
        nearest = min(self._prefill_s, key=lambda known: (abs(known - place), known))
        return self._prefill_s[nearest]


def _range(position: int) -> int:
    return max(1, position).bit_length() - 1


def _about(decodes: int) -> int:
    """Numbers of decodes that are taken as equal: they differ by less than a tenth, and up to 12 each is its own."""
    return round(8 * math.log2(max(1, decodes)))


def _learn(known: float | None, seen: float) -> float:
    return seen if known is None else known + LEARNING * (seen - known)


def _back(known: float | None, start: float | None) -> float | None:
    return known if known is None or start is None else known + FORGETTING * (start - known)
