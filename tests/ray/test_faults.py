"""What happens to engines on a real Ray cluster when it is full, loses a node or does not answer: all under load."""

from __future__ import annotations

import time

import pytest
import requests

from tests.faults.load import Load, recorded
from tests.ray.conftest import DEVICES, NODES
from tests.ray.fleet import READY_S

pytestmark = [pytest.mark.ray, pytest.mark.db]

BOTH = DEVICES * len(NODES)  # engines that fill the two nodes
JOINS, ITS_DEVICES = "127.0.0.4", 4
REPLACED_S = 30.0
AWAY_S = 30.0
BODY = {"max_tokens": 40, "ignore_eos": True, "target_ttft": 5.0, "target_tbt": 0.5, "waiting_time": 50.0}


def under_load(fleet, rate):
    return Load(fleet.system, rate=rate, body={**BODY, "model": fleet.model})


@pytest.fixture
def all_done(figures):
    """Checks that each request ended well and was counted once."""

    def check(load):
        bad = [each for each in load.sent if each.ended != "done"]
        figures["requests"] = figures.get("requests", 0) + len(load.sent)
        figures["lost"] = figures.get("lost", 0) + len(bad)
        assert bad == []
        recorded(load.system, load.sent)

    return check


def test_load_scales_from_one_to_four_over_both_nodes(fleet, figures, all_done):
    fleet.hold(1)
    fleet.policy(min_instances=1, max_instances=BOTH, upper=0.5)
    with under_load(fleet, 6) as load:
        figures["scale_1_to_4_s"] = round(fleet.system.until(lambda: len(fleet.ready()) == BOTH, READY_S), 1)
        assert set(fleet.nodes().values()) == set(NODES)
        fleet.system.until(lambda: all(load.served(id) for id in fleet.ready()), 30.0)
    all_done(load)


def test_want_of_resources_is_told_and_healed_by_a_node_that_joins(fleet, cluster, figures):
    fleet.hold(BOTH)
    fleet.policy(min_instances=BOTH + 1, max_instances=BOTH + 1)
    fleet.system.until(lambda: "pending" in fleet.rows().values(), READY_S)
    [waiting] = fleet.rows().keys() - set(fleet.ready())
    told = "waits for 1 device on one node: the most that is free on one is 0 device"
    fleet.system.until(lambda: told in fleet.column("error", waiting), 30.0)
    began = time.monotonic()
    cluster.add(JOINS, ITS_DEVICES)
    fleet.system.until(lambda: len(fleet.ready()) == BOTH + 1, READY_S)
    figures["healed_s"] = round(time.monotonic() - began, 1)
    assert fleet.nodes()[waiting] == JOINS, "the same instance, not another one"


def test_engines_of_a_killed_raylet_are_replaced_elsewhere(fleet, cluster, figures, all_done):
    if JOINS not in cluster.nodes:
        cluster.add(JOINS, ITS_DEVICES)
    fleet.hold(BOTH + 1)
    victims = {id: fleet.column("url", id) for id, node in fleet.nodes().items() if node == NODES[0]}
    assert victims
    before = fleet.made()
    with under_load(fleet, 4) as load:
        fleet.system.until(lambda: all(load.served(id) for id in victims), 30.0)
        fleet.system.until(lambda: all(load.streaming(id) for id in victims), 30.0)
        killed_at = time.monotonic()
        cluster.kill_raylet(NODES[0])
        fleet.system.until(lambda: not victims.keys() & set(fleet.ready()), READY_S)
        figures["lost_told_s"] = round(time.monotonic() - killed_at, 1)
        fleet.system.until(lambda: len(fleet.ready()) == BOTH + 1, 2 * REPLACED_S)
        replaced_s = time.monotonic() - killed_at
        assert NODES[0] not in fleet.nodes().values()
    open_then = [each for each in load.sent if each.at < killed_at < each.at + each.took_s]
    begun = [each for each in open_then if each.first_s is not None and each.at + each.first_s < killed_at]
    figures |= {"replaced_s": round(replaced_s, 1), "open_at_kill": len(open_then), "begun_at_kill": len(begun)}
    all_done(load)
    fleet.system.until(lambda: not victims.keys() & fleet.rows().keys(), 2 * REPLACED_S)
    fleet.hold(BOTH + 1)
    assert len(fleet.made() - before) == len(victims), "one for each, though scaler and reconciler both saw the loss"
    for url in victims.values():
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/health", timeout=5)
    assert replaced_s <= REPLACED_S


def test_a_head_that_does_not_answer_stops_and_doubles_nothing(fleet, cluster, figures, all_done):
    fleet.hold(BOTH)
    before, jobs, nodes = fleet.rows(), set(cluster.jobs()), cluster.alive()
    with under_load(fleet, 4) as load:
        fleet.system.until(lambda: load.ends()["done"] >= 5, 30.0)
        frozen_at = time.monotonic()
        cluster.freeze_head()
        try:
            fleet.system.until(lambda: fleet.look()[1] is not None, AWAY_S)
            figures["stale_told_s"] = round(time.monotonic() - frozen_at, 1)
            page = fleet.session.get(f"{fleet.system.console}/fleet/", timeout=10).text
            assert 'The provisioner <span class="mono">ray/default</span> has been unreachable since' in page
            while time.monotonic() < frozen_at + AWAY_S:
                assert fleet.rows() == before
                time.sleep(0.5)
        finally:
            cluster.thaw_head()
        thawed_at = time.monotonic()
        fleet.system.until(lambda: fleet.look()[1] is None, READY_S)
        figures["seen_again_s"] = round(time.monotonic() - thawed_at, 1)
        until_s = time.monotonic() + 10.0  # longer than the head takes to find a node dead
        while time.monotonic() < until_s:
            assert fleet.rows() == before
            time.sleep(0.5)
    away = load.between(frozen_at + 1.0, thawed_at)
    assert {each.instance for each in away} == set(before)
    all_done(load)
    assert (set(cluster.jobs()), cluster.alive()) == (jobs, nodes), "nothing was submitted, no node was given up"
    assert all(cluster.jobs()[id] == "RUNNING" for id in before)


def test_engines_that_are_stopped_are_drained_first(fleet, cluster, figures, all_done):
    fleet.hold(BOTH)
    with under_load(fleet, 2) as load:
        fleet.system.until(lambda: all(load.served(id) for id in fleet.ready()), 30.0)
        began, gone = time.monotonic(), set(fleet.rows())
        fleet.policy(min_instances=1, max_instances=1)
        fleet.system.until(lambda: len(fleet.rows()) == 1 and not fleet.rows("draining"), 2 * READY_S)
        gone -= fleet.rows().keys()
        fleet.system.until(lambda: all(fleet.rows("stopped")[id] == "stopped" for id in gone), READY_S)
        figures["drained_4_to_1_s"] = round(time.monotonic() - began, 1)
    all_done(load)
    fleet.system.until(lambda: all(cluster.jobs()[id] == "SUCCEEDED" for id in gone), 30.0)
