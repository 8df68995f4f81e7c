"""When sequences that decode on a prefill engine get the device: at the last moment that keeps their promises."""

from __future__ import annotations

import math
from collections.abc import Sequence

from controller.core.steps import Seq
from controller.engine.tasks import PreemptionConfig


class DecodeTurns:
    """Token n after the first is due n times the promised mean after it (Kairos eq. 2 reads slack the same way)."""

    def __init__(self, config: PreemptionConfig) -> None:
        self._config = config

    def due(self, decoding: Sequence[Seq], now: float) -> float | None:
        """When the next step of all of them must begin, not before now; None where nothing presses."""
        if not decoding:
            return None
        config = self._config
        context = sum(seq.tokens for seq in decoding)
        step_s = config.decode_a + config.decode_b * context + config.decode_c * len(decoding)
        last = min((seq.first_token_at or now) + seq.output_tokens * seq.tpot_s for seq in decoding)
        return None if math.isinf(last) else max(now, last - step_s - config.decode_margin_s)

    def is_due(self, decoding: Sequence[Seq], now: float) -> bool:
        due = self.due(decoding, now)
        return due is not None and due <= now
