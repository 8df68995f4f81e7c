"""What a spec may say: each value by a rule of one table, which the engine's own command line agrees with."""

from __future__ import annotations

import math

import pytest

from controller.engine.process_spec import (
    BLOCK_SIZE,
    PREEMPTIVE_BATCHING,
    PROFILES,
    RULES,
    SAYABLE,
    SOURCES,
    values_refused,
    values_refused_of_all,
)
from workers.engine.config import DEFAULT_PROFILE, build_parser, parse
from workers.engine.profiles import shipped_profiles
from workers.engine.scheduler_choice import BATCHING
from workers.engine.weights.manager import KINDS
from workers.supervisor.engine_processes import engine_argv

NOW = 1_800_000_000.0
TORCH = {"executor": "torch", "folder": "/models/m"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("profile", "nope"), ("profile", {}), ("profile", ""), ("profile", "constant:5"), ("seed", "x"), ("seed", True),
        ("seed", 1.5), ("max_num_batched_tokens", 0), ("max_model_len", "big"), ("max_model_len", 1.0),
        ("kv_blocks", -5), ("kv_blocks", 1 << 40), ("kv_capacity_tokens", "many"), ("kv_capacity_tokens", 0),
        ("block_size", 0), ("scheduling_policy", "lifo"), ("batching", "nobody's"), ("batching", ["calm"]),
        ("batching_options", "slots=7"), ("startup_delay", -4), ("startup_delay", math.nan), ("startup_delay", "4"),
        ("startup_delay", 86_400), ("scheduler", "presto"), ("boundary", "sentence"), ("chunk_tokens", 0),
        ("executor", "torh"), ("executor", ["torch"]), ("device", "tpu"), ("dtype", "int8"), ("threads", 0),
        ("kv_cache_gib", -1), ("kv_cache_gib", math.inf), ("weights", "gone"), ("host_copy", {}), ("folder", "m/m"),
        ("folder", {}), ("emulated_load_s", "engine=-1"), ("emulated_load_s", "tape=1"), ("emulated_load_s", "engine"),
        ("emulated_load_s", "engine=nan"), ("emulated_weight_bytes", -1),
        ("swap_bytes", -1), ("swap_bytes", 1.5), ("swap_bytes", "2G"), ("deadlines", 1), ("keep_room", "yes"),
        ("start_after", "x"), ("start_after", [1]), ("start_after", -1), ("start_after", True),
        ("start_after", math.nan), ("start_after", NOW + 90_000), ("start_after", 10**400),
    ],
)  # fmt: skip
def test_a_value_that_no_engine_would_take_is_named_with_what_is_allowed(name, value):
    assert list(values_refused({name: value}, NOW)) == [name]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("folder", {"executor": "torch"}),
        ("host_copy", {"host_copy": "/dev/shm/x"}),
        ("keep_room", {"keep_room": True}),
        ("deadlines", {"deadlines": True}),
        ("batching", {"scheduler": "slackline", "batching": "calm"}),
        ("batching", {"scheduler": "preemptive", "batching": "calm"}),
        ("boundary", {"boundary": "operator"}),
        ("chunk_tokens", {"chunk_tokens": 5}),
        ("swap_bytes", {"swap_bytes": 2_097_151}),
        ("swap_bytes", {"swap_bytes": 2_097_152, "block_size": 32}),
        ("swap_bytes", {"swap_bytes": 1 << 30, "scheduler": "preemptive"}),
        ("max_model_len", {"kv_blocks": 4, "max_model_len": 100}),
        ("max_model_len", {"kv_capacity_tokens": 64, "block_size": 32, "max_model_len": 65}),
    ],
)
def test_values_that_do_not_go_together_are_named(name, spec):
    assert list(values_refused(spec, NOW)) == [name]
    if "folder" not in name:
        with pytest.raises(SystemExit):
            parse(engine_argv(1, spec)[3:])


@pytest.mark.parametrize(
    "spec",
    [
        {}, dict.fromkeys(RULES), {"profile": "constant:0.5ms"}, {"profile": DEFAULT_PROFILE, "seed": -3},
        {"startup_delay": 0.0, "emulated_load_s": "engine=0.9,host=2.7,disk=4.1"}, {"emulated_load_s": ""},
        {"kv_capacity_tokens": 64, "max_model_len": 64}, {"scheduler": "preemptive", "chunk_tokens": 64},
        {"scheduler": "preemptive", "batching": PREEMPTIVE_BATCHING, "boundary": "layer"},
        {"scheduler": "slackline", "deadlines": True}, {"batching": "calm", "batching_options": {"slots": 7}},
        {"swap_bytes": 0, "scheduler": "preemptive"}, {"swap_bytes": 2_097_152}, {"swap_bytes": 1 << 31},
    ],
)  # fmt: skip
def test_what_the_engine_takes_is_not_refused(spec):
    assert values_refused(spec, NOW) == {}
    parse(engine_argv(1, spec)[3:])


def test_only_an_engine_of_one_rank_swaps():
    spec = {**TORCH, "swap_bytes": 1 << 31}
    assert values_refused(spec, NOW) == {}
    assert list(values_refused(spec, NOW, ranks=2)) == ["swap_bytes"]
    assert values_refused({**spec, "swap_bytes": 0}, NOW, ranks=2) == {}


@pytest.mark.parametrize(
    "spec",
    [
        {**TORCH, "host_copy": "/dev/shm/x", "keep_room": True, "kv_cache_gib": 0.01, "dtype": "bfloat16"},
        {"start_after": NOW + 86_000}, {"start_after": 0}, {"start_after": None}, {"profile": "/p/own.json"},
    ],
)  # fmt: skip
def test_what_only_its_host_can_tell_is_left_to_it(spec):
    assert values_refused(spec, NOW) == {}


def test_the_choices_are_those_of_the_engines_command_line():
    parser = {action.dest: action for action in build_parser()._actions}
    choices = {name: tuple(parser[name].choices or ()) for name in RULES if name in parser}
    assert choices == {name: RULES[name].choices for name in choices}
    assert set(PROFILES) == set(shipped_profiles())
    assert set(SOURCES) == set(KINDS)
    assert (parser["block_size"].default, BATCHING) == (BLOCK_SIZE, PREEMPTIVE_BATCHING)


def test_every_name_that_can_be_said_has_a_rule():
    assert set(RULES) == set(SAYABLE) - {"start_after"}


def test_of_an_endpoint_of_somebody_else_only_what_is_read_is_checked():
    assert values_refused_of_all({"dtype": "fp8", "block_size": "auto", "note": [1]}, NOW) == {}
    assert list(values_refused_of_all({"max_model_len": "big", "start_after": "x"}, NOW)) == [
        "max_model_len", "start_after",
    ]  # fmt: skip
