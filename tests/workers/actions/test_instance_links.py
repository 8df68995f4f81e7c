"""Looks at engines that say what the test says: who is told of whom, and what is stored."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from controller.core.kv_links import LinkReport, LinkState
from controller.models import Instance, InstanceLink
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_observe, instance_set_role, instance_stop
from tests import factories
from workers.actions import instance_links as links
from workers.actions.parallel_calls import AT_ONCE, ThreadCalls
from workers.actions.weights_client import EngineAway

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient")]
HANGS_S = 30.0


class Engine:
    """`told`: what it was announced, newest last; `away`: it does not answer."""

    def __init__(self, port):
        self.said = links.EngineLinks("", "10.0.0.1", port, ())
        self.told = []
        self.away = False

    def look(self):
        if self.away:
            raise EngineAway("gone")
        return self.said

    def announce(self, me, wanted, wait_s=0.0):
        self.look()
        self.told.append([each.id for each in wanted])
        reports = tuple(LinkReport(each.id, LinkState.UP, host=each.host, port=each.port) for each in wanted)
        self.said = replace(self.said, id=me, reports=reports)
        return self.said


@pytest.fixture
def stubs_by_url(monkeypatch):
    """By url."""
    found = {}
    monkeypatch.setattr(links, "LinksClient", lambda url, token, key: found[url])
    return found


@pytest.fixture
def add(stubs_by_url):
    model = factories.served_model()

    def add(name, role="prefill", ready=True, **fields):
        fields = {"model": model, **fields}
        factories.instance(id=name, role=role, backend=fields.pop("backend", "reference"), **fields)
        stubs_by_url[f"http://{name}"] = Engine(len(stubs_by_url) + 1)
        instance_observe(instance_id=name, observed_state="ready" if ready else "starting", url=f"http://{name}")
        return stubs_by_url[f"http://{name}"]

    return add


def pairs():
    return set(InstanceLink.objects.filter(closed_at__isnull=True).values_list("source", "target"))


def test_engines_are_told_of_one_another_once(add):
    p, d = add("p"), add("d", "decode")
    links.update_links("t")
    links.update_links("t")
    assert (p.told, d.told) == ([["d"]], [["p"]])
    assert pairs() == {("p", "d"), ("d", "p")}


def test_one_that_was_started_again_is_told_again(add):
    p, d = add("p"), add("d", "decode")
    links.update_links("t")
    d.said = links.EngineLinks("", "10.0.0.1", 99, ())
    links.update_links("t")
    assert d.told == [["p"], ["p"]]
    assert p.told == [["d"], ["d"]], "it is reached elsewhere now"


def test_one_that_leaves_is_forgotten_and_its_links_closed(add):
    p = add("p")
    add("d", "decode")
    links.update_links("t")
    instance_stop(actor=SYSTEM, instance_id="d")
    instance_observe(instance_id="d", observed_state="stopped")
    links.update_links("t")
    assert (p.told[-1], pairs()) == ([], set())
    assert InstanceLink.objects.filter(closed_at__isnull=False).count() == 2


def test_one_that_does_not_answer_has_its_links_down_until_it_does(add):
    add("p")
    d = add("d", "decode")
    links.update_links("t")
    d.away = True
    links.update_links("t")
    states = dict(InstanceLink.objects.values_list("target", "state"))
    assert states == {"p": "up", "d": "down"}
    d.away = False
    links.update_links("t")
    assert set(InstanceLink.objects.values_list("state", flat=True)) == {"up"}


def test_collocated_engines_are_asked_now_and_then_whether_they_borrow(add, monkeypatch):
    a, b = add("a", "collocated"), add("b", "collocated")
    links.update_links("t")
    a.said = replace(a.said, borrows=True)  # it was started again
    links.update_links("t")
    assert (pairs(), a.told) == (set(), []), "nobody asked it"
    monkeypatch.setattr(links, "ASK_AGAIN_S", 0.0)
    links.update_links("t")
    assert (pairs(), a.told, b.told) == ({("b", "a")}, [["b"]], [])


def test_collocated_engines_that_borrow_are_linked_from_all_of_their_model(add):
    a, b, x = (add(name, "collocated") for name in "abx")
    Instance.objects.filter(pk="x").update(model=factories.served_model())
    for engine in (a, b, x):
        engine.said = replace(engine.said, borrows=True)
    links.update_links("t")
    assert (pairs(), x.told) == ({("a", "b"), ("b", "a")}, [])
    c = add("c", "collocated")
    links.update_links("t")
    assert a.told[-1] == ["b", "c"]
    assert c.told == []
    b.said = replace(b.said, borrows=False)
    links.update_links("t")
    assert (b.told[-1], a.told[-1]) == ([], ["b", "c"])
    assert pairs() == {("b", "a"), ("c", "a")}


def test_one_that_borrows_and_hangs_keeps_its_links(add):
    a, _ = add("a", "collocated"), add("b", "collocated")
    a.said = replace(a.said, borrows=True)
    links.update_links("t")
    a.away = True
    for _ in range(3):
        links.update_links("t")
    assert a.told == [["b"]]
    assert dict(InstanceLink.objects.filter(closed_at=None).values_list("target", "state")) == {"a": "down"}


def test_collocated_engines_that_do_not_answer_are_linked_to_nobody(add):
    for name in "ab":
        add(name, "collocated").away = True
    assert links.update_links("t") == []
    assert pairs() == set()


def test_a_role_that_changes_opens_and_closes_links(add):
    add("p")
    d = add("d", "collocated")
    links.update_links("t")
    assert d.told == []
    instance_set_role(actor=SYSTEM, instance_id="d", role="decode")
    links.update_links("t")
    assert d.told == [["p"]]
    instance_set_role(actor=SYSTEM, instance_id="d", role="collocated")
    links.update_links("t")
    assert d.told == [["p"], []]
    assert pairs() == set()


def test_a_warm_one_is_linked_from_those_that_have_the_weights(add):
    a = add("a", "collocated")
    w = add("w", "collocated", weights="absent")
    links.update_links("t")
    assert (w.told, a.told) == ([["a"]], [])
    assert pairs() == {("a", "w")}


def test_other_models_and_other_backends_are_no_peers(add):
    p = add("p")
    add("x", "decode", model=factories.served_model())
    add("v", "decode", backend="vllm").away = True
    links.update_links("t")
    assert p.told == []


def test_a_silent_one_keeps_its_links_to_the_others(add):
    """They break or mend by themselves; only what it says itself is not known."""
    p, d = add("p"), add("d", "decode")
    links.update_links("t")
    d.away = True
    for _ in range(3):
        links.update_links("t")
    assert p.told == [["d"]], "not told to forget it"
    assert dict(InstanceLink.objects.filter(closed_at=None).values_list("target", "state")) == {"p": "up", "d": "down"}


def test_a_hundred_that_hang_hold_no_other_up(add, monkeypatch):
    looks = [threading.Event()]  # who hangs does so until the look after is over

    def hangs():
        looks[-1].wait(HANGS_S)
        raise EngineAway("no answer")

    w, _ = add("w", "collocated", weights="absent"), add("a", "collocated")
    for number in range(120):
        monkeypatch.setattr(add(f"x{number}", "collocated"), "look", hangs)
    monkeypatch.setattr(links, "PARALLEL", ThreadCalls(patience_s=0.01))
    monkeypatch.setattr(links, "ASK_S", 0.5)
    before, slowest = threading.active_count(), 0.0
    for _ in range(60):
        began = time.monotonic()
        links.update_links("t")
        slowest = max(slowest, time.monotonic() - began)
        looks.append(threading.Event())
        looks[-2].set()
        assert threading.active_count() - before <= 2 * AT_ONCE + 2
        if w.told:
            break
    assert (w.told, pairs()) == ([["a"]], {("a", "w")})
    looks[-1].set()
    assert slowest < HANGS_S, "no look waited for one to end"


def test_one_that_moves_no_kv_is_neither_told_nor_told_of(add):
    """An engine of several ranks, or without the fleet's token: it would refuse."""
    p, d = add("p"), add("d", "decode")
    d.said = links.EngineLinks("", "", 0, ())
    links.update_links("t")
    links.join(Instance.objects.get(pk="d"), "http://d", "t")
    assert (p.told, d.told, pairs()) == ([], [], set())


def test_one_that_joins_is_linked_both_ways_before_it_is_ready(add):
    p = add("p")
    d = add("d", "decode", ready=False)
    links.join(Instance.objects.get(pk="d"), "http://d", "t")
    assert (d.told, p.told) == ([["p"]], [["d"]])


def test_one_that_joins_while_a_peer_hangs_is_not_held_up_by_it(add):
    add("p").away = True
    d = add("d", "decode", ready=False)
    links.join(Instance.objects.get(pk="d"), "http://d", "t")
    assert d.told == [], "nobody it could be linked from"
