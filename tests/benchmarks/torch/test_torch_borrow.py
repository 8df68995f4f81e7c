"""What is made of the answers that each way of a borrowed prefix gave. The runs need two hosts and no busy machine."""

import pytest

from benchmarks.torch import borrow
from benchmarks.torch.borrow import ThreeWays, TimedAnswer


def answered(computed, after, during, cached=100):
    ways = zip(borrow.WAYS, (computed, after, during), strict=True)
    return {way: TimedAnswer(seconds, 0 if way == "computed" else cached, "a") for way, seconds in ways}


def test_medians_and_what_is_saved_by_computing_during_the_copy():
    found = borrow.result([answered(3.0, 2.0, 1.0), answered(4.0, 2.0, 1.5), answered(5.0, 9.0, 1.6, 50)], 100, True)
    assert found["ttft_s"] == {"computed": 4.0, "after": 2.0, "during": 1.5}
    assert found["saved_pct"] == 25.0
    assert found["borrowed"] == {"computed": 0.0, "after": pytest.approx(0.833), "during": pytest.approx(0.833)}
    assert found["tokens_equal"] is True
    assert "during         1.500 s       83%" in borrow.table(found)


def test_every_way_gets_a_prefix_of_its_own_and_one_prompt_is_compared(monkeypatch):
    sent = []

    def ask(url, prompt):
        sent.append((url, list(prompt)))
        return TimedAnswer(1.0, 0, "b" if url == "odd" else "a")

    monkeypatch.setattr(borrow, "ask", ask)
    bed = ThreeWays("lender", {way: way for way in borrow.WAYS}, 1000, 1)
    bed.round(40, 5)
    lent, got = sent[::2], sent[1::2]
    assert [url for url, _ in lent] == ["lender"] * 3
    assert [url for url, _ in got] == list(borrow.WAYS)
    assert all(one[1][:40] == other[1][:40] for one, other in zip(lent, got, strict=True))
    assert len({tuple(prompt[:40]) for _, prompt in got}) == 3
    assert bed.equal(40, 5)
    assert not ThreeWays("lender", {"even": "even", "odd": "odd"}, 1000, 1).equal(40, 5)
