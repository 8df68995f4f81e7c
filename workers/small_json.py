"""JSON of small messages, for code that also runs in vLLM's environment, which has no orjson.

Both know the same values; what is no number in JSON (NaN, infinity) no message of ours may contain. `dumps` raises
ValueError or TypeError, `loads` ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _loads(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


dumps: Callable[[Any], bytes] = _dumps
loads: Callable[[bytes], Any] = _loads
try:
    import orjson
except ImportError:
    pass
else:
    dumps, loads = orjson.dumps, orjson.loads
