"""Recorded answers asked about again as a gateway would have: in the order of time, with what had ended by then.

`AnswerLengths` is a gateway's own. A bound is asked at the arrival, and again once each of PRODUCED is out, at the
level of that moment. Its outcome is known when the answer has ended, which may be after hundreds of later arrivals.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from controller.predict.answer_lengths import (
    PRODUCED,
    AnswerBounds,
    AnswerLengths,
    Foretold,
    LengthsInForce,
    with_bounds,
)
from controller.predict.length_forest import LengthForest

KIND = ("", "", "replayed")  # tenant, class, model
ENDS, ASKS = 0, 1  # of events at one time what has ended is known first


class PastAnswer(NamedTuple):
    """`began`, `ended`: seconds; its tokens come evenly between them. `whole` False: it was cut, and would have been
    longer. `features` as of its arrival."""

    began: float
    ended: float
    features: tuple[float, ...]
    tokens: int
    whole: bool = True


def replayed(forest: LengthForest, answers: Sequence[PastAnswer]) -> list[list[int]]:
    """Upper bounds of each answer, tokens: at its arrival and at each of PRODUCED that it went beyond. `max_tokens`
    does not cut that of the arrival, so that it tells what the forest knows."""
    lengths = AnswerLengths()
    lengths.take({KIND[2]: LengthsInForce(1, forest)})
    foretold: list[Foretold | None] = [None] * len(answers)
    judging: list[tuple[AnswerBounds, ...]] = [()] * len(answers)
    found: list[list[int]] = [[] for _ in answers]
    events = [(each.began, ASKS, number, 0) for number, each in enumerate(answers)]
    heapq.heapify(events)
    while events:
        _, what, number, stage = heapq.heappop(events)
        each, told = answers[number], foretold[number]
        if what == ENDS:
            assert told is not None
            if each.whole:
                lengths.observe(KIND, "", told, each.tokens, ended=True, again=judging[number])
            else:
                lengths.cut_off(KIND[2], told, each.tokens, judging[number])
            continue
        if told is None:
            told = foretold[number] = lengths.foretell_from(each.features, KIND, None)
            assert told.bounds is not None
            found[number].append(told.bounds[1])
        else:
            again = lengths.bounds_again(KIND[2], told, PRODUCED[stage])
            assert again is not None
            judging[number] = with_bounds(judging[number], again)
            found[number].append(again.upper)
        took = max(0.0, each.ended - each.began)
        if stage + 1 < len(PRODUCED) and each.tokens > (out := PRODUCED[stage + 1]):
            heapq.heappush(events, (each.began + took * out / each.tokens, ASKS, number, stage + 1))
        else:
            heapq.heappush(events, (each.began + took, ENDS, number, stage))
    return found
