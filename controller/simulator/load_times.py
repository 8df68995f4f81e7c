"""Default load times of weights, by source.

"HyperFlexis: Joint Design of Algorithms and Systems for Multi-SLO Serving and Fast Scaling", Table 2, mean seconds on
its machines: from another instance's device memory (Fast Scaling), from host memory and from disk. A model uses the
column nearest in size, by the number of parameters in its name ("Llama-3.1-8B", "qwen3-30b-a3b"), if they are within a
factor of `LIKE`; all others use Qwen7B's. The columns do not grow with size (the 70B model is loaded faster than the
32B one), so nothing is interpolated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

LIKE = 1.5
SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)


def _column(device: float, host: float, disk: float) -> Mapping[str, float]:
    return MappingProxyType({"device": device, "host": host, "disk": disk})


TABLE_2: Mapping[float, Mapping[str, float]] = MappingProxyType(  # by billions of parameters
    {7.0: _column(0.89, 2.73, 4.14), 32.0: _column(2.05, 19.41, 28.84), 70.0: _column(1.16, 11.50, 22.58)}
)
LOAD_S = TABLE_2[7.0]  # for unknown models


def load_times(model: str) -> Mapping[str, float]:
    """Seconds by source: device, host, disk."""
    found = SIZE.search(model)
    billions = float(found.group(1)) if found else 0.0
    if not billions > 0:
        return LOAD_S
    nearest = min(TABLE_2, key=lambda size: abs(math.log(size / billions)))
    return TABLE_2[nearest] if max(nearest / billions, billions / nearest) <= LIKE else LOAD_S
