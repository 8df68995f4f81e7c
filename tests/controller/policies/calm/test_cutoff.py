"""A cutoff that another process goes on from."""

import json

import pytest

from controller.policies.calm.cutoff import AdaptiveCutoff

WORTH = {0.5: 10.0, 0.8: 90.0, 1.0: 40.0}


def used(cutoff, frames, contested=True):
    seen = []
    for frame in frames:
        cutoff.earned(WORTH[cutoff.value])
        cutoff.tick(frame, contested)
        seen.append(cutoff.value)
    return seen


def test_it_goes_on_as_if_it_had_never_ended():
    cutoff = AdaptiveCutoff(tuple(WORTH), frames=10, explore_every=5)
    used(cutoff, range(1, 64))
    again = AdaptiveCutoff.of(json.loads(json.dumps(cutoff.state())))
    assert again.value == cutoff.value == 0.8
    assert used(again, range(64, 400)) == used(cutoff, range(64, 400))
    assert again.state() == cutoff.state()


def test_what_a_frame_earned_that_never_ended_does_not_count():
    cutoff = AdaptiveCutoff((0.5, 1.0), frames=2)
    used(cutoff, [1])
    cutoff.earned(1e6)
    again = AdaptiveCutoff.of(cutoff.state())
    again.tick(5, contested=False)
    used(again, [6])
    assert again.state()["scores"] == [[0.5, 10.0]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"values": []}, {"values": ["low"]}, {"rule": [0, 5]}, {"rule": [40]}, {"scores": [[0.7, 1.0]]},
        {"scores": [[0.5, float("nan")]]}, {"epoch": [9, 1, 0]}, {"epoch": [-1, 1, 0]}, {"frames": [5, 3]},
        {"earned": None}, {"earned": float("inf")},
    ],
)  # fmt: skip
def test_what_is_no_state_is_refused(wrong):
    state = AdaptiveCutoff((0.5, 1.0)).state()
    with pytest.raises((KeyError, TypeError, ValueError)):
        AdaptiveCutoff.of({**state, **wrong})
    for part in state:
        with pytest.raises((KeyError, TypeError, ValueError)):
            AdaptiveCutoff.of({name: value for name, value in state.items() if name != part})
