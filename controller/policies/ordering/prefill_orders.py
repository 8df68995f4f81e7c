"""Orders of prompts inside an engine, as plain keys: those that FlowPrefill compares (sec. 5.2, 6.3).

`s_edf`: eq. 3 on the time still needed; `d_edf`: with sgn(deadline - now) as its numerator; `edf`: by deadline; `fcfs`:
by arrival. The registered orderings of the same names rank requests in a dispatcher's queue; these rank the sequences
of an engine: waiting, running and suspended. A key is a pair, and smaller goes first; the caller breaks ties, by
arrival and id. Cost: O(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from controller.core.errors import UnknownName
from controller.policies.ordering.slack_aware_edf import slack_key

Key = tuple[float, float]


class PrefillOrder(NamedTuple):
    """An order by keys. All times in seconds on one clock; `needed` is the time that a prompt still takes.

    `key(deadline, needed, arrival, now)`. `turns_at(deadline, needed)`: when the key of a prompt without progress
    changes; infinite: never.
    """

    key: Callable[[float, float, float, float], Key]
    turns_at: Callable[[float, float], float]


def _never(deadline: float, needed: float) -> float:
    return math.inf


PREFILL_ORDERS: Mapping[str, PrefillOrder] = MappingProxyType(
    {
        "s_edf": PrefillOrder(
            lambda deadline, needed, arrival, now: slack_key(deadline, needed, now),
            lambda deadline, needed: math.nextafter(deadline - needed, math.inf),
        ),
        "d_edf": PrefillOrder(
            lambda deadline, needed, arrival, now: slack_key(deadline, 0.0, now),
            lambda deadline, needed: math.nextafter(deadline, math.inf),
        ),
        "edf": PrefillOrder(lambda deadline, needed, arrival, now: (0.0, deadline), _never),
        "fcfs": PrefillOrder(lambda deadline, needed, arrival, now: (0.0, arrival), _never),
    }
)


def prefill_order(name: str, field: str = "ordering") -> PrefillOrder:
    try:
        return PREFILL_ORDERS[name]
    except KeyError:
        valid = ", ".join(sorted(PREFILL_ORDERS))
        raise UnknownName(f"unknown {field} {name!r}; valid: {valid}", field=field) from None
