"""What is believed of a sequence's length and worth when it is sent to an engine: bounds that sharpen as it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class LengthBound(Protocol):
    def upper(self, produced: int) -> int:
        """Tokens the whole answer will have at most, as far as is known after `produced` of them. More than that."""
        ...

    def lower(self, produced: int) -> int:
        """Tokens it will have at least. More than `produced`."""
        ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """Times are on the driver's clock; goodput is in whatever unit the operator counts (tokens, requests).

    `goodput`: what ending in time earns; of a program's call, what the whole program earns. `each_token`: every token
    that comes by its own time earns one (latency-sensitive requests), and `goodput` is not used. `due`: the end of its
    stage under the amortised deadline (Concord sec. 4.1); `latest`: an end after which the promise, or the program's,
    cannot be kept any more at best, `likely_latest` most likely. `program` names calls that only count together,
    `later_*` are the tokens of its stages to come.
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
