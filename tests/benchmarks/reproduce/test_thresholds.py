"""The scaler's thresholds of HyperFlexis' reproduction are the best of a sweep, by a rule fixed before it."""

from benchmarks.reproduce.hyperflexis.setting import MODELS, of_mix
from benchmarks.reproduce.hyperflexis.stages import stages
from benchmarks.reproduce.hyperflexis.thresholds import CANDIDATES, Swept, chosen, sweep
from controller.simulator.workloads.mixes import MIXES

FOUR = MIXES["4-task"]


def test_thresholds_are_the_cheapest_that_attain_as_much():
    scores = [(1.0, 1.4), (0.995, 1.1), (0.991, 1.05), (0.98, 1.0)]
    assert chosen(scores) == 2
    assert chosen([(0.5, 1.0), (0.9, 1.3), (0.9, 1.3)]) == 1


def test_the_sweep_of_thresholds_uses_what_its_title_says():
    loads = [
        Swept(
            "1 x",
            lambda thresholds: stages(MODELS["Qwen7B"], scaling=True, thresholds=thresholds),
            stages(MODELS["Qwen7B"]),
            of_mix(FOUR, 60.0, 30),
        )
    ]
    taken, table = sweep("slackline", loads, "Fig. 4")
    assert taken in CANDIDATES
    assert table.title.endswith(f"taken are {taken['upper']:g}, {taken['lower']:g}, {taken['sustain_s']:g} s")
    assert [row[:3] for row in table.rows] == [[*each.values()] for each in CANDIDATES]
    elastic = stages(MODELS["Qwen7B"], scaling=True, thresholds=taken).elastic
    assert {elastic.scaling.upper, elastic.decode.upper} == {taken["upper"]}
