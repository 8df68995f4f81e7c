"""Recorded answers asked about again: levels are a gateway's, and hear of an answer when it has ended."""

from __future__ import annotations

import pytest

from controller.predict.answer_lengths import FEATURES, AnswerLengths, LengthsInForce
from controller.predict.length_replay import KIND, PastAnswer, replayed
from tests.controller.simulator.workloads.test_analyser import forest

SHORT, LONG = ((float(prompt),) + (0.0,) * (len(FEATURES) - 1) for prompt in (50, 200))


def by_hand(answers):
    """The same, each ended before the next one begins, with a gateway's class alone."""
    lengths, found = AnswerLengths(), []
    lengths.take({KIND[2]: LengthsInForce(1, forest())})
    for features, tokens in answers:
        told = lengths.foretell_from(features, KIND, None)
        again = [lengths.bounds_again(KIND[2], told, out) for out in (50, 100, 200, 400) if tokens > out]
        lengths.observe(KIND, "", told, tokens, ended=True, again=again)
        found.append([told.bounds[1], *(each.upper for each in again)])
    return found


ANSWERS = [(LONG, 450), (SHORT, 20), (LONG, 600), (LONG, 120), (SHORT, 90), (LONG, 480)] * 4


def test_one_after_another_is_what_a_gateway_gives():
    timed = [PastAnswer(10.0 * number, 10.0 * number + 9.0, *each) for number, each in enumerate(ANSWERS)]
    assert replayed(forest(), timed) == by_hand(ANSWERS)


@pytest.mark.parametrize(("took_s", "same"), [(0.0, False), (9.0, False), (1e6, True)])
def test_no_level_moves_before_an_answer_has_ended(took_s, same):
    """Answers that are longer than every bound. The last ones are asked about at other levels, unless all still run."""
    timed = [PastAnswer(10.0 * number, 10.0 * number + took_s, LONG, 490) for number in range(30)]
    first, *_, last = replayed(forest(), timed)
    assert len(first) == len(last) == 5
    assert (first[0] == last[0]) == same


def test_what_was_cut_within_its_bounds_moves_nothing_and_beyond_them_counts_as_missed():
    ends = {"whole": [], "cut": []}
    for name, found in ends.items():
        timed = [PastAnswer(float(n), n + 0.5, LONG, 490, name == "whole") for n in range(9)]
        found += [each[0] for each in replayed(forest(), timed)]
    assert ends["whole"] == ends["cut"], "beyond"
    within = [PastAnswer(float(n), n + 0.5, LONG, 90, False) for n in range(9)]
    assert len({each[0] for each in replayed(forest(), within)}) == 1
