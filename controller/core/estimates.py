"""What is predicted of a sequence's length and worth when it is sent to an engine. The bounds tighten as it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class LengthBound(Protocol):
    def upper(self, produced: int) -> int:
        """The most tokens that the whole answer is expected to have, given `produced` of them; more than `produced`."""
        ...

    def lower(self, produced: int) -> int:
        """The fewest tokens that the answer is expected to have; more than `produced`."""
        ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted length, worth and due times of one sequence.

    Times are seconds on the driver's clock. Goodput is in the operator's unit (tokens or requests).

    - `goodput`: earned if the sequence ends in time. For a call of a program: what the whole program earns.
    - `each_token`: every token that is delivered on time earns one (latency-sensitive requests); `goodput` is unused.
    - `due`: end of the call's stage under the amortised deadline (Concord sec. 4.1).
    - `latest`: if the sequence ends later, its targets (or its program's) cannot be met even in the best case;
      `likely_latest`: the same for the likely case.
    - `program`: calls of one program only count together. `later_*`: tokens of the program's later stages.
    - `adds`: `goodput` is the call's own part of what its program earns, so that those of all open calls add up.
    """

    length: LengthBound
    goodput: float
    each_token: bool = False
    due: float = math.inf
    latest: float = math.inf
    likely_latest: float = math.inf
    program: str = ""
    later_output: float = 0.0
    later_prompt: float = 0.0
    adds: bool = False


@dataclass(slots=True)
class ToldBounds:
    """Bounds as the gateway told them last, in tokens of the whole answer. Tokens that are out move them up."""

    least: int
    most: int

    def upper(self, produced: int) -> int:
        return max(produced + 1, self.most)

    def lower(self, produced: int) -> int:
        return max(produced + 1, self.least)

    def tell(self, least: int, most: int) -> None:
        self.least, self.most = least, most
