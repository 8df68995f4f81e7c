"""The words and the figures of the workflow story; the story itself is told in tests/browser."""

from __future__ import annotations

import json

import pytest

from benchmarks.workflows.story import StoryFailed, being_written, computed, in_words, place_of, prefilled, went_on

ANSWERED = {
    "what": "answered", "step": "explore-0", "took_s": 0.52, "instance": "engine-1", "stored": "", "shared": "",
    "prompt_tokens": 1800, "cached_tokens": 1790, "output_tokens": 30,
}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"what": "begun", "new": True, "left_s": 60.0}, "The workflow begins: 60.0 of 60 s left."),
        ({"what": "begun", "new": False, "left_s": 51.04}, "The workflow goes on: 51.0 of 60 s left."),
        (
            {"what": "forked", "checkpoint": "held", "branches": 3},
            "Forked at the plan into 3 branches, its engine holds the plan's KV for 60 s.",
        ),
        (
            {"what": "forked", "checkpoint": "lost", "branches": 3},
            "Forked at the plan into 3 branches, the plan's KV is lost.",
        ),
        (
            {"what": "forked", "checkpoint": "over"},
            "The plan's checkpoint has ended, so branches compute their whole prompts.",
        ),
        (ANSWERED, "explore-0: 30 tokens written in 0.5 s at engine-1, 10 of 1,800 prompt tokens computed."),
        (ANSWERED | {"stored": "req-1"}, "explore-0: the stored answer, 30 tokens, none of them new."),
        (
            ANSWERED | {"shared": "req-1"},
            "explore-0: the answer of the equal request, 30 tokens, without a call of its own.",
        ),
        (
            {"what": "done", "left_s": 4.25, "in_time": True},
            "The workflow is done 4.2 s before its deadline, in time.",
        ),
        (
            {"what": "done", "left_s": -0.1, "in_time": False},
            "The workflow is done 0.1 s after its deadline, not in time.",
        ),
        ({"what": "writing", "step": "explore-1"}, ""),
    ],
)
def test_each_event_is_told_in_words(event, told):
    assert in_words(event, 60) == told


def test_one_step_or_several_are_being_written():
    assert being_written(["explore-1"]) == "explore-1 is being written"
    assert being_written(["explore-1", "explore-2"]) == "explore-1 and explore-2 are being written"


def test_tokens_are_computed_by_engines_that_were_asked():
    row = {"prompt_tokens": 100, "output_tokens": 20, "attempts": 1}
    assert (computed(row), computed(row | {"attempts": 0}), prefilled(ANSWERED)) == (120, 0, 10)
    assert [went_on({"decisions": [{"reason": each}]}) for each in ("from_checkpoint", "sooner_again")] == [True, False]


def test_without_a_running_system_it_says_what_to_start(tmp_path):
    with pytest.raises(StoryFailed, match=r"credentials.json is missing: start `make up` first, or set DATA_DIR"):
        place_of(tmp_path)


def test_addresses_and_engines_that_are_ready_are_read_from_the_folder(tmp_path):
    (tmp_path / "credentials.json").write_text(json.dumps({"api_key": "sk-1", "model": "demo"}))
    (tmp_path / "ports.json").write_text(json.dumps({"gateway": 1, "console": 2}))
    (tmp_path / "engines").mkdir()
    for name, state in (("a", "ready"), ("b", "exited")):
        told = json.dumps({"url": f"http://{name}", "state": state})
        (tmp_path / "engines" / f"{name}.state.json").write_text(told)
    place = place_of(tmp_path)
    assert (place.gateway, place.console) == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert (place.api_key, place.model, place.engines) == ("sk-1", "demo", ("http://a",))
