"""What bench-gating makes of its runs, and one transfer over its link with the daemon and without."""

import json

import pytest

from benchmarks.bench_gating import MODES, Loaded, cost_pct, result, table, tasks, uncontended
from benchmarks.load.scoring import Score
from benchmarks.machine.network import network_missing, second_host


def score_of(attainment):
    by_class = {"question": attainment, "document": attainment}
    return Score(attainment, by_class, 1.0, 1.0, {"question": 0.2, "document": 2.0}, {}, {"ok": 80}, 0.01)


def loaded(attained, texts, **moved):
    return Loaded([score_of(each) for each in attained], texts, ["a", "b"], moved, 0)


TOOK = {"off": [0.100, 0.120, 0.200], "on": [0.103, 0.121, 0.150]}


def found(texts=("a", "b")):
    on = loaded([0.9, 0.8, 0.7], list(texts), kv_received_bytes=5.0, kv_promotions=3.0, kv_held_seconds=1.5)
    return result({"off": loaded([0.5, 0.6, 0.7], ["a", "b"], kv_received_bytes=5.0), "on": on}, TOOK)


def test_the_figures_that_are_asked_for():
    told = json.loads(json.dumps(found()))
    assert told["attainment"] == {"off": 0.6, "on": 0.8}
    assert (told["gain"], told["promotions"], told["tokens_equal"]) == (1.333, 3.0, True)
    assert told["kv_bytes"] == {"off": 5.0, "on": 5.0}
    assert told["uncontended_cost_pct"] == pytest.approx(100 * 0.001 / 0.12, abs=0.01)


def test_an_answer_that_differs_is_told():
    assert not found(texts=("a", "c"))["tokens_equal"]


def test_the_cost_is_that_of_the_median_pair_and_may_be_negative():
    assert cost_pct({"off": [1.0, 2.0, 4.0], "on": [0.9, 1.9, 5.0]}) == pytest.approx(-5.0)


def test_the_table_has_a_row_for_each_run():
    rows = table(found()).splitlines()
    assert len(rows) == 1 + 3 + 3 + 1
    assert "3 promotions" in rows[-1]


def test_documents_move_more_and_are_due_later():
    question, document = tasks(0.25, 3.0)
    assert document.prompt.mean > 5 * question.prompt.mean
    assert document.targets.ttft_s > question.targets.ttft_s


@pytest.mark.slow
@pytest.mark.skipif(network_missing() is not None, reason=network_missing() or "")
def test_transfers_go_over_the_link_in_both_modes(monkeypatch):
    monkeypatch.setenv("FLEET_TOKEN", "bench")
    with second_host(0.2) as host:
        took = uncontended(3, 0.2, host)
    assert took.keys() == MODES.keys()
    for seconds in took.values():
        assert len(seconds) == 3
        assert min(seconds) > 1000 * 28 * 128 / 25e6, "as long as the bytes take on the link"
