"""Concord's CALM: the window of similar prompt lengths (Alg. 4.1), fairness (sec. 4.3), and what a sequence earned."""

from __future__ import annotations

import numpy as np

from controller.core.steps import Seq
from controller.policies.calm.columns import Column


def with_fairness(priority: Column, fair: Column, weight: float, largest: float | None = None) -> Column:
    """Sec. 4.3: (1 - f) x priority + f x fair, with priority scaled to [0, 1]; `fair` is larger for those served less.
    `largest`: the priority that counts as 1, where there are others to be compared with.
    """
    scale = (float(priority.max(initial=0.0)) if largest is None else largest) or 1.0
    blended: Column = (1.0 - weight) * priority / scale + weight * fair
    return blended


def select(priority: Column, inputs: Column, slack: Column, slots: int, cutoff: float) -> Column:
    """Alg. 4.1 lines 11 to 17: indices of the batch; all, if there are fewer than `slots`."""
    count = len(priority)
    if count <= slots:
        return np.arange(count)
    threshold = cutoff * np.partition(priority, count - slots)[count - slots]
    candidates = np.flatnonzero(priority >= threshold)
    candidates = candidates[np.lexsort((slack[candidates], inputs[candidates]))]
    sums = np.concatenate(([0.0], np.cumsum(priority[candidates])))
    windows = sums[slots:] - sums[:-slots]
    best = float(windows.max())
    first = int(np.argmax(windows >= best - 1e-9 * max(1.0, abs(best))))  # equal sums: the shortest inputs
    return candidates[first : first + slots]


def earned(seq: Seq, now: float) -> float:
    """Goodput of a sequence that just ended, for comparing cutoffs: its tokens, or 0 if it was too late."""
    if seq.estimate is not None and not seq.estimate.each_token:
        return float(seq.tokens) if now <= seq.estimate.latest else 0.0
    late = now > seq.due + (seq.output_tokens - 1) * seq.tpot_s if seq.output_tokens > 1 else now > seq.due
    return 0.0 if late else float(seq.output_tokens)
