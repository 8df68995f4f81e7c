"""Two clusters at once: one that is away holds nobody up, and each has its own engines, nodes and devices."""

from __future__ import annotations

import re

import pytest
import requests

from tests.ray.conftest import WEST
from tests.ray.fleet import READY_S

pytestmark = [pytest.mark.ray, pytest.mark.db]

HERE, THERE = "on-default", "on-west"
TOLD_S = 30.0


def nodes_on(page, name):
    """Text of each row of the cluster's section on *Fleet*, by node."""
    section = page.partition(f'data-key="cluster-ray/{name}"')[2].partition("</section>")[0]
    rows = re.findall(r'<tr data-key="ray/[^"]*">(.*?)</tr>', section)
    texts = [" ".join(re.sub(r"<[^>]*>", " ", row).split()) for row in rows]
    return {text.split()[0]: text for text in texts}


def taken_on(page, name):
    """Devices of the cluster's nodes that are not free. A node that was lost has none."""
    alive = [text for text in nodes_on(page, name).values() if text.split()[1] == "alive"]
    found = [re.search(r"device (\d+) of (\d+)", text) for text in alive]
    return sum(int(each[2]) - int(each[1]) for each in found if each)


@pytest.mark.thorough
def test_two_clusters_at_once(fleet, cluster, west, figures):
    system = fleet.system
    system.until(lambda: fleet.look("west")[1] is not None, TOLD_S)
    fleet.start(THERE, cluster="west")
    fleet.start(HERE)
    system.until(lambda: fleet.ready() == [HERE], READY_S)
    assert fleet.look()[1] is None
    assert fleet.rows()[THERE] == "pending", "nobody knows of another cluster to start it on"
    assert nodes_on(fleet.page(), "west") == {}
    system.until(lambda: taken_on(fleet.page(), "default") == 1, TOLD_S)

    figures["west_joined_s"] = round(system.until(lambda: west.start(devices=1) is None, READY_S), 1)
    figures["on_west_s"] = round(system.until(lambda: fleet.ready() == [HERE, THERE], READY_S), 1)
    assert fleet.nodes()[THERE] == WEST != fleet.nodes()[HERE]
    assert west.jobs()[THERE] == cluster.jobs()[HERE] == "RUNNING"
    assert (THERE in cluster.jobs(), HERE in west.jobs()) == (False, False)
    system.until(lambda: "device 0 of 1" in nodes_on(fleet.page(), "west").get(WEST, ""), TOLD_S)
    assert WEST not in nodes_on(fleet.page(), "default")
    headers, body = {"Authorization": f"Bearer {system.key()}"}, {"model": fleet.model, "prompt": "a", "max_tokens": 2}
    served = set()

    def asked():
        answer = requests.post(f"{system.gateway}/v1/completions", json=body, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        served.add(answer.headers["x-slackline-instance"])
        return served == {HERE, THERE}

    system.until(asked, TOLD_S)

    fleet.stop(THERE)
    system.until(lambda: fleet.rows("stopped") == {THERE: "stopped"}, READY_S)
    system.until(lambda: west.jobs()[THERE] == "SUCCEEDED", TOLD_S)
    assert (fleet.rows(), cluster.jobs()[HERE]) == ({HERE: "ready"}, "RUNNING")
