"""Unequal experts: what is sent and computed, what orders know of it, and what that is worth."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest

from benchmarks.flow.experts import ERROR, SKEW, compare
from controller.core.errors import ConfigError
from controller.flow.policies import DeferAndPromote
from controller.simulator.flows import experts
from controller.simulator.flows.experts import ExpertSettings, SimulatedExperts
from controller.simulator.flows.prefill import PrefillRequest, PrefillRun, PrefillSettings
from controller.simulator.flows.run import FlowRun
from tests.controller.simulator.flows.test_prefill import EXPERTS, LLAMA, SLOW, requests

TOKEN = 7 * 6144 * 2 * 2  # bytes of a token on its way to two experts, in seven layers
EVEN = ExpertSettings()
UNEVEN = ExpertSettings(SKEW, error=ERROR)


@pytest.fixture
def first_rank_popular(monkeypatch):
    """Rank 0 of eight has 4 of 11 parts, each other rank one. Two ranks share a server."""
    monkeypatch.setattr(
        experts, "standard_normal", lambda name, seed: math.log(4) if name.startswith("popular 0 0 ") else 0.0
    )


def begun(settings, seed=1, batch="b", at=0.0):
    found = SimulatedExperts(EXPERTS, settings, seed)
    found.begin(batch, at)
    return found


@pytest.mark.usefixtures("first_rank_popular")
def test_tokens_go_to_the_popular_rank_and_come_back():
    """1,100 tokens of rank 2: 400 to rank 0 and 100 to rank 1, 100 each to ranks 4 to 7; rank 3 is on its server."""
    sent = begun(ExpertSettings(1.0)).sent("b", 0, [0, 0, 1_100, 0, 0, 0, 0, 0])
    assert [each / TOKEN for each in sent] == pytest.approx([400, 100, 900, 0, 100, 100, 100, 100])


@pytest.mark.usefixtures("first_rank_popular")
def test_the_popular_rank_computes_longest():
    """Eight ranks: 32 elevenths of an even share, in the time of each group's experts."""
    request = PrefillRequest("a", 0.0, 4_000, 0, "x")
    runs = [PrefillRun(PrefillSettings(EXPERTS, 1, experts=each), DeferAndPromote) for each in (UNEVEN, EVEN)]
    ends = [run.serve([request])["a"].computed - sum(run.collective_s) for run in runs]
    assert ends[0] - ends[1] == pytest.approx(8 * EXPERTS.experts_s(4_000) * (32 / 11 - 1))


def test_equal_experts_are_the_default_and_draw_nothing():
    load = requests(30, rate=15.0)
    other = replace(EVEN, drift_s=1.0, history=False)
    first, second = (
        PrefillRun(PrefillSettings(SLOW, 2, experts=each), DeferAndPromote).serve(load) for each in (EVEN, other)
    )
    assert first == second


def test_a_batch_differs_from_popularity_by_the_error_that_is_set():
    """Ranks of 500 batches, over their mean; shares add up to one, which takes an eighth of the variance off."""
    found = SimulatedExperts(EXPERTS, ExpertSettings(error=0.2), 1)
    for batch in range(500):
        found.begin(f"b{batch}", 0.0)
    factors = [8 * share for of in found._drawn.values() for share in of[0]]
    assert statistics.mean(factors) == pytest.approx(1.0)
    assert statistics.stdev(factors) == pytest.approx(0.2 * math.sqrt(7 / 8), rel=0.05)
    assert all(of == of[:1] * 8 for of in found._drawn.values())


def test_popularity_drifts_without_jumps():
    kept = ExpertSettings(1.0)
    drifting = replace(kept, drift_s=10.0)

    def shares(settings, at):
        return begun(settings, at=at)._drawn["b"][0]

    assert shares(kept, 0.0) == shares(kept, 1e6)
    path = [shares(drifting, at / 10) for at in range(400)]
    steps = [max(map(abs, map(float.__sub__, *pair))) for pair in itertools.pairwise(path)]
    assert max(steps) < 0.02
    assert max(map(abs, map(float.__sub__, path[0], path[100]))) > 0.05


def test_layers_may_have_popular_ranks_of_their_own():
    by_layer = begun(replace(UNEVEN, by_layer=True))._drawn["b"]
    assert len({tuple(each) for each in by_layer}) == 8
    assert len({tuple(each) for each in begun(UNEVEN)._drawn["b"]}) == 1


def watched(monkeypatch, settings, seed, load):
    """Of each order the time, and by batch its computing and loads by request and port; when batches ended; bytes of
    exchanges by port and batch."""
    orders, ended, sent = [], [], {}
    end, submit = SimulatedExperts.end, FlowRun.submit_all

    def note(self, flows):
        for flow, path in flows:
            if ".c" in flow.id:
                sent[flow.batch, path[0]] = sent.get((flow.batch, path[0]), 0.0) + flow.size_bytes
        submit(self, flows)

    def note_end(self, batch, tokens):
        ended.append(run.now)
        end(self, batch, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(FlowRun, "submit_all", note)
        patch.setattr(SimulatedExperts, "end", note_end)
        run = PrefillRun(PrefillSettings(SLOW, 1, budget=0.0, experts=settings, seed=seed), DeferAndPromote)
        run.on_order = lambda batches, order: orders.append(
            (run.now, {b.id: {"": b.compute_s, **{r.id: dict(r.load) for r in b.requests}} for b in batches})
        )
        run.serve(load)
    return orders, ended, sent


def test_an_order_knows_what_ended_batches_sent_and_nothing_of_its_own(monkeypatch):
    """Until a batch has ended, orders are those of even shares, whatever is drawn; a batch that runs is no history."""
    load = [PrefillRequest(f"q{place}", 0.03 * place, 3_000 + 100 * place, 0, f"x{place}") for place in range(12)]
    before = []
    for seed, history in ((1, True), (2, True), (1, False)):
        orders, ended, _ = watched(monkeypatch, replace(UNEVEN, history=history), seed, load)
        before.append([loads for at, loads in orders if at < ended[0]][:2])
        after = [loads for at, loads in orders if at > ended[0]]
        assert after
    assert len(before[0]) == 2
    assert before[0] == before[1] == before[2]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_history_expects_what_popular_ranks_get(monkeypatch, seed):
    """Of the last of eleven requests that come one at a time: its bytes at the rank that gets most of them but its own,
    as expected and as sent."""
    load = [PrefillRequest(f"q{place}", 5.0 * place, 2_000, 0, f"x{place}") for place in range(11)]
    off = {}
    for history in (True, False):
        orders, _, sent = watched(monkeypatch, replace(UNEVEN, history=history), seed, load)
        batch, of = next((name, of["q10"]) for _, each in orders for name, of in each.items() if "q10" in of)
        received = sorted((size, port) for (name, port), size in sent.items() if name == batch and port.endswith("in"))
        size, port = received[-2]
        off[history] = of[port] / size - 1
    assert abs(off[True]) < 0.35
    assert off[False] < -0.4


@pytest.mark.parametrize(
    ("load", "seeds"),
    [("12", 6), *(pytest.param(load, 20, marks=pytest.mark.simulated) for load in ("9", "12"))],
)
def test_with_history_fewer_are_let_through_wrongly_and_as_many_or_more_are_in_time(load, seeds):
    """Without what is learned both kinds of orders are the same."""
    found = compare(load, SKEW, range(1, seeds + 1))
    wrongly = {name: each["late_after_all"] / each["let_through"] for name, each in found.items()}
    assert wrongly["history"] < 0.9 * wrongly["even"]
    assert found["history"]["attainment"] >= found["even"]["attainment"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"skew": -1.0}, "skew"),
        ({"skew": math.nan}, "skew"),
        ({"error": math.inf}, "error"),
        ({"drift_s": 0.0}, "drift_s"),
        ({"drift_s": math.nan}, "drift_s"),
    ],
)
def test_a_wrong_setting_names_its_field(given, field):
    with pytest.raises(ConfigError) as error:
        ExpertSettings(**given)
    assert error.value.field == field


def test_a_dense_model_has_no_unequal_experts():
    with pytest.raises(ConfigError, match="Llama 3 8B has no experts") as error:
        PrefillSettings(replace(EXPERTS, model=LLAMA), 1, experts=UNEVEN)
    assert error.value.field == "experts"
