"""Worked example H6, stages apart: a prefill instance matures at now + E_P, a decode instance at now + E_d."""

import pytest

from controller.core import events as ev
from controller.core.types import Role
from controller.dispatch import build_dispatcher
from tests.controller.dispatch.disaggregation.decoders import commit, done, migrator, places
from tests.controller.dispatch.fleet import request, sends
from tests.controller.dispatch.fleet import up as prefiller


def test_h6_a_prefill_instance_matures_when_its_batch_is_prefilled():
    """1,900 tokens at a=0.01, b=1e-4 take 0.2 s; decodes are others', so nothing has to be amortised."""
    dispatcher = build_dispatcher("hyperflexis")
    dispatcher.handle([prefiller("p", role=Role.PREFILL)], 0.0)
    first = ev.Arrived(request("a", 10.0, ttft=0.7, tpot=0.25, prompt=1900))
    reply = dispatcher.handle([first], 10.0)
    assert sends(reply) == [("a", "p")]
    late = dispatcher.handle([ev.Arrived(request("b", 10.0, ttft=0.7, tpot=0.25, prompt=100))], 10.0)
    assert late.actions == []
    assert late.wake_at == pytest.approx(10.2)
    assert sends(dispatcher.handle([ev.Woke()], late.wake_at)) == [("b", "p")]


def test_h6_a_decode_instance_matures_at_the_end_of_its_next_step():
    """30 sequences make a step of 20 + 30 ms: told at 10, it ends at 10.05."""
    made = migrator(decoders=1)
    for number in range(29):
        made.handle([done(f"r{number}", now=9.0, output=1000)], 9.0)
        commit(made, f"r{number}", now=9.0)
    (place,) = made.handle([done("new", now=10.0)], 10.0).actions
    assert 10.0 + place.decision.figures["decode_s"] == pytest.approx(10.05)


def test_h6_the_decode_instance_whose_step_ends_first_is_asked_first():
    made = migrator(decoders=2)
    for number in range(3):
        made.handle([done(f"r{number}", now=9.0, output=1000)], 9.0)
        where = places(made.handle([ev.Woke()], 9.0))
        assert where == []
    counts = {each.id: each.running + each.waiting for each in made.fleet(9.0)}
    least = min(counts, key=lambda name: (counts[name], name))
    assert counts[least] == 1
    assert places(made.handle([done("new", now=10.0)], 10.0)) == [("new", least)]
