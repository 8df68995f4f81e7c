"""Weights of a scale-out as a transfer between ports: its time alone, on narrow links, beside KV, without a source."""

from dataclasses import replace

import pytest

from controller.core.errors import ConfigError
from controller.core.types import Outcome
from controller.scale import ScalingConfig
from controller.simulator import ElasticSettings, Failure, LinkSettings, Simulation, SimulationSettings
from controller.simulator.experiment import parse_experiment
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.fleet.links import FleetLinks
from controller.simulator.fleet.weight_loads import WeightLoads
from controller.simulator.heap import EventHeap
from controller.simulator.network import GIGA, LinkFailure, NetworkTransfer, PortSpeed
from controller.simulator.runner import compare
from tests.controller.simulator.fleet.test_disaggregation import DECODE, PREFILL, run
from tests.controller.simulator.fleet.test_elastic import QUICK, scaled
from tests.controller.simulator.runs import SMALL, facts, simulate, some_demands
from tests.controller.simulator.test_machine_speed import FILE

LOAD = {"device": 0.9, "host": 2.7, "disk": 4.1}
MOVED = ElasticSettings(QUICK, "device", LOAD, weights_gb=9.0)  # at 10 GB/s


def seconds(result):
    return [each.up_at - each.asked_at for each in result.scaled_out]


def test_on_idle_links_a_load_takes_its_time_and_nothing_else_changes():
    moved, timed = scaled(elastic=MOVED), scaled(elastic=replace(MOVED, weights_gb=None))
    assert seconds(moved)[0] == pytest.approx(0.9)
    assert moved.moved_bytes == 0.0
    assert facts(moved) == facts(timed)


def test_two_loads_over_a_narrow_port_share_it_from_when_the_second_begins():
    """9 GB at 4.5 GB/s. The second is asked for after 1 s: half of the port each for 2 s, and then 4.5 GB alone."""
    links = LinkSettings(bandwidth_gb_s=20.0, ports=(PortSpeed(0, 4.5),))
    first, second = scaled(elastic=MOVED, links=links).scaled_out[:2]
    assert second.asked_at == first.asked_at + 1.0
    assert (first.up_at, second.up_at) == pytest.approx((first.asked_at + 3.0, first.asked_at + 4.0))


def test_a_new_process_loads_once_it_has_started():
    assert seconds(scaled(elastic=replace(MOVED, start_s=3.0)))[0] == pytest.approx(3.9)


def test_with_its_source_gone_it_loads_from_the_disk():
    """The first instance dies 0.4 s into the load."""
    asked = scaled(elastic=MOVED).scaled_out[0].asked_at
    first = scaled(elastic=MOVED, failures=(Failure(0, asked + 0.4),)).scaled_out[0]
    assert (first.asked_at, first.up_at) == (asked, pytest.approx(asked + 0.4 + 4.1))


def test_with_the_sources_link_cut_it_loads_from_the_disk():
    asked = scaled(elastic=MOVED).scaled_out[0].asked_at
    links = LinkSettings(failures=(LinkFailure(0, asked + 0.4, 60.0),))
    assert seconds(scaled(elastic=MOVED, links=links))[0] == pytest.approx(0.4 + 4.1)


def up_at(monkeypatch, failure=None, others=1, elastic=MOVED, **settings):
    """When the replacement of the first instance is up. `others`: instances beside it, which may have the weights."""
    came, bring_up = {}, Simulation.bring_up

    def remember(self, name):
        bring_up(self, name)
        came[name] = self.heap.now

    elastic = replace(elastic, scaling=replace(QUICK, min_instances=1 + others, max_instances=1 + others))
    settings = {"failures": (failure or Failure(0, 2.0, 3.0),), "elastic": elastic, **settings}
    with monkeypatch.context() as patched:
        patched.setattr(Simulation, "bring_up", remember)
        simulate(some_demands(30, rate=3.0), "slackline", (SMALL,) * (1 + others), **settings)
    return came["engine-0-1"]


def test_a_replacement_is_up_when_its_failure_says_if_the_links_are_idle(monkeypatch):
    moved, timed = up_at(monkeypatch), up_at(monkeypatch, elastic=replace(MOVED, weights_gb=None))
    assert (moved, timed) == (pytest.approx(5.0), 5.0)


def test_the_weights_of_a_replacement_are_the_last_that_it_waits_for(monkeypatch):
    """9 GB at 4.5 GB/s take 2 s and not 0.9, from 0.9 s before the 3 s are over; never less than a load takes."""
    narrow = LinkSettings(bandwidth_gb_s=20.0, ports=(PortSpeed(1, 4.5),))
    assert up_at(monkeypatch, links=narrow) == pytest.approx(2.0 + 3.0 - 0.9 + 2.0)
    assert up_at(monkeypatch, Failure(0, 2.0, 0.1), links=narrow) == pytest.approx(2.0 + 2.0)
    assert up_at(monkeypatch, Failure(0, 2.0, 0.1)) == pytest.approx(2.0 + 0.9)


def test_a_replacement_of_the_only_instance_loads_from_the_disk(monkeypatch):
    assert up_at(monkeypatch, others=0) == pytest.approx(2.0 + 3.0 - 0.9 + 4.1)


@pytest.mark.parametrize("flow_policy", ["off", "mfs"])
def test_beside_kv_it_takes_longer_and_nothing_is_lost(flow_policy):
    """KV of a megabyte a token, or of a byte, leaves through the port that the weights leave through."""
    stages = [ScalingConfig("model", role, max_instances=2, sustain_s=2.0) for role in ("prefill", "decode")]
    elastic = ElasticSettings(stages[0], "device", LOAD, stages[1], weights_gb=9.0)
    took = {}
    for kv_bytes in (1, 1_000_000):
        instances = tuple(replace(each, kv_bytes_per_token=kv_bytes) for each in (PREFILL, DECODE))
        links = LinkSettings(bandwidth_gb_s=10.0, flow_policy=flow_policy)
        result = run(some_demands(300, rate=60.0), instances, elastic=elastic, links=links)
        assert {record.outcome for record in result.records} == {Outcome.OK}
        took[kv_bytes] = seconds(result)
    assert took[1][0] == pytest.approx(0.9, rel=1e-3)
    assert max(took[1_000_000]) > 1.2 * 0.9


def test_a_transfer_that_was_cancelled_calls_nobody():
    cluster, heap = Cluster(SimulationSettings((SMALL,))), EventHeap()
    links, heard = FleetLinks(LinkSettings(bandwidth_gb_s=1.0), cluster, heap), []
    for name in ("w", "x"):
        links.send(
            NetworkTransfer(name, "a", name, GIGA), lambda name=name: heard.append(("ended", name, heap.now)),
            lambda name=name: heard.append(("lost", name, heap.now)),
        )  # fmt: skip
    assert links.busy("a")
    links.cancel("w")
    while heap:
        _, _, _, look, _ = heap.pop()
        look()
    assert heard == [("ended", "x", 1.0)]
    assert not links.busy("a")


def test_an_order_that_is_cancelled_frees_the_link(monkeypatch):
    """It is given up as soon as its weights move: nothing is left on the links, and it never serves."""
    begun, begin = [], WeightLoads.begin

    def give_up(self, name):
        begin(self, name)
        begun.append(self._run.links.busy(name))
        self._run.cluster.give_up(name, self._run.heap.now)
        self.cancel(name)
        begun.append(self._run.links.busy(name))

    monkeypatch.setattr(WeightLoads, "begin", give_up)
    result = scaled(elastic=MOVED)
    assert set(zip(begun[::2], begun[1::2], strict=True)) == {(True, False)}
    assert result.scaled_out == []


def test_an_experiment_file_may_ask_for_both():
    raw = {**FILE, "settings": {"elastic": {"weights_gb": 15.2}, "links": {"flow_policy": "mfs"}}}
    settings = parse_experiment(raw, lambda path: {}, lambda path: []).settings
    assert (settings.elastic.weights_gb, settings.links.flow_policy) == (15.2, "mfs")
    raw["settings"]["links"]["flow_policy"] = "karuna"
    with pytest.raises(ConfigError) as caught:
        parse_experiment(raw, lambda path: {}, lambda path: [])
    assert caught.value.field == "settings.links.flow_policy"


def test_a_comparison_scales_out_later_where_weights_share_the_links_with_kv():
    """The same file with KV of a byte a token and of two megabytes, and with loads that take their time in any case."""
    scaling = {"max_instances": 2, "sustain_s": 2.0, "load_s": LOAD, "decode": {"max_instances": 2, "sustain_s": 2.0}}
    kinds = [{"profile": PREFILL.latency._asdict(), "role": role} for role in ("prefill", "decode")]
    took = {}
    for kv_bytes, weights_gb in ((1, 9.0), (2_000_000, 9.0), (2_000_000, None)):
        moved = {"weights_gb": weights_gb} if weights_gb else {}
        raw = {
            "instances": [{**each, "kv_bytes_per_token": kv_bytes, "max_num_seqs": 8} for each in kinds],
            "workload": {"kind": "mix", "mix": "4-task", "per_task": 60, "rate": 60.0},
            "settings": {"elastic": {**scaling, **moved}, "links": {"bandwidth_gb_s": 10.0}},
        }
        entry = compare(parse_experiment(raw, lambda path: {}, lambda path: []))["entries"][0]
        took[kv_bytes, weights_gb] = entry["first_seed"]["time_to_scale_s"]
    assert [took[1, 9.0], took[2_000_000, None]] == pytest.approx([0.9, 0.9], rel=1e-3)
    assert took[2_000_000, 9.0] > 1.2 * 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights_gb": 0.0}, "weights_gb must be positive"),
        ({"weights_gb": float("inf")}, "weights_gb must be positive"),
        ({"weights_gb": 9.0, "source": "host"}, "only weights from a device"),
    ],
)
def test_bad_weights_are_refused(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        replace(MOVED, **change)
    assert caught.value.field == "weights_gb"
