"""What another role of an instance would do: said before, or refused with the reason."""

from __future__ import annotations

import pytest

from console.panels.role_change import prospects
from controller.models import Instance, ScalingPolicy, ServedModel
from controller.models.fleet import Role

MODEL = ServedModel(pk=1, name="demo")


def instance(name, role="collocated", **fields):
    return Instance(**{"id": name, "model": MODEL, "role": role, "backend": "reference", **fields})


def policy(role, least=1, most=4):
    return ScalingPolicy(model=MODEL, role=role, min_instances=least, max_instances=most)


def of(row, *others, policies=(), disaggregates=True):
    found = prospects(row, [row, *others], {each.role: each for each in policies}, disaggregates)
    return {each.role: each for each in found}


def test_every_other_role_is_a_prospect():
    assert set(of(instance("a"), instance("b"))) == {Role.PREFILL, Role.DECODE}


def test_prefill_needs_somebody_who_decodes():
    alone = of(instance("a"), instance("b"))[Role.PREFILL]
    assert "Change another instance to decode first" in alone.refused
    beside = of(instance("a"), instance("b", "decode"))[Role.PREFILL]
    assert beside.refused == ""
    assert any("1 instance of demo can decode what it prefills" in each for each in beside.effects)


@pytest.mark.parametrize("others", [(), (instance("b", "decode"),)])
def test_the_last_one_that_prefills_stays(others):
    assert "no request can start" in of(instance("a"), *others)[Role.DECODE].refused
    assert "no request can start" in of(instance("a", "prefill"), *others)[Role.DECODE].refused


def test_the_last_one_that_decodes_stays_while_others_only_prefill():
    found = of(instance("a", "decode"), instance("b", "prefill"), instance("c"))
    assert all("Change those first" in each.refused for each in found.values())
    assert "for 1 prefill instance of demo" in found[Role.COLLOCATED].refused
    assert of(instance("a", "decode"), instance("c"))[Role.COLLOCATED].refused == ""


def test_a_decode_instance_that_no_one_feeds_is_said():
    assert "it receives no requests until it has one" in " ".join(of(instance("a"), instance("b"))[Role.DECODE].effects)


def test_what_is_stopped_or_cannot_hand_over_is_refused():
    stopped = of(instance("a", desired_state="stopped"), instance("b", "decode"), instance("c"))
    assert set(stopped) == {Role.PREFILL, Role.DECODE}
    assert all("stopped" in each.refused for each in stopped.values())
    deaf = of(instance("a"), instance("b", "decode"), instance("c"), disaggregates=False)
    assert set(deaf) == {Role.PREFILL, Role.DECODE}
    assert all("does not support disaggregation" in each.refused for each in deaf.values())


def test_what_the_scaler_will_make_of_it_is_said():
    policies = [policy("collocated", least=2), policy("decode", most=1)]
    said = of(instance("a"), instance("b"), instance("c", "decode"), policies=policies)
    decode, prefill = (" ".join(said[role].effects) for role in (Role.DECODE, Role.PREFILL))
    assert "collocated requires at least 2" in decode
    assert "decode allows at most 1, so the scaler drains one" in decode
    assert "has no scaling policy for prefill" in prefill


def test_a_vllm_server_must_have_been_started_for_it():
    said = of(instance("a", backend="vllm"), instance("b", "decode"))[Role.PREFILL].effects
    assert any("kv_both" in each for each in said)
    known = of(instance("a", backend="vllm", spec={"kv_role": "kv_both"}), instance("b", "decode"))[Role.PREFILL]
    assert (known.refused, any("kv_both" in each for each in known.effects)) == ("", False)


def test_a_vllm_server_started_for_one_side_is_refused_the_other():
    giver = instance("a", "prefill", backend="vllm", spec={"kv_role": "kv_producer"})
    found = of(giver, instance("b", "prefill"), instance("c", "decode"))
    assert "kv_producer, so it cannot decode" in found[Role.DECODE].refused
    assert found[Role.COLLOCATED].refused == ""


def test_an_engine_that_must_be_told_is_emptied_first_and_never_becomes_collocated():
    row = instance("a", "prefill", backend="sglang")
    found = of(row, instance("b", "prefill"), instance("c", "decode"))
    assert "only between prefill and decode" in found[Role.COLLOCATED].refused
    assert any("the engine has switched" in each for each in found[Role.DECODE].effects)
