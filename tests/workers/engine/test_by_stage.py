"""`--scheduler slackline`: what the combined set runs inside an engine, by its role."""

import pytest

from tests.workers.engine.process import EngineProcess
from workers.engine.config import parse

pytestmark = pytest.mark.usefixtures("fleet_token")


@pytest.mark.parametrize(
    ("options", "batching", "preemptive"),
    [
        ([], "chunked_prefill", False),
        (["--deadlines"], "calm", False),
        (["--role", "prefill"], "slo_aware_batching", True),
        (["--role", "prefill", "--deadlines"], "slo_aware_batching", True),
        (["--role", "decode"], "kairos_decode", False),
    ],
)
def test_the_role_chooses(options, batching, preemptive):
    config = parse(["--port", "1", "--scheduler", "slackline", *options])
    assert config.batching.name == batching
    assert (config.preemption is not None) == preemptive
    if preemptive:
        assert config.preemption.boundary == "operator"


@pytest.mark.parametrize(
    ("options", "batching", "preemptive"),
    [
        ([], "chunked_prefill", False),
        (["--role", "prefill"], "slo_aware_batching", True),
        (["--role", "decode"], "kairos_decode", False),
        (["--role", "decode", "--scheduling-policy", "fcfs"], "kairos_decode", False),
        (["--role", "prefill", "--scheduler", "continuous"], "chunked_prefill", False),
        (["--role", "prefill", "--batching", "vllm_v1"], "vllm_v1", False),
        (["--role", "decode", "--batching-options", '{"long_prefill_tokens": 512}'], "chunked_prefill", False),
        (["--role", "prefill", "--long-prefill-token-threshold", "512"], "chunked_prefill", False),
        (["--role", "decode", "--scheduler", "preemptive"], "slo_aware_batching", True),
    ],
)
def test_in_a_role_it_is_the_default_and_what_is_said_wins(options, batching, preemptive):
    config = parse(["--port", "1", *options])
    assert (config.batching.name, config.preemption is not None) == (batching, preemptive)


def test_the_profile_gives_what_the_policies_predict_by():
    decode = parse(["--port", "1", "--scheduler", "slackline", "--role", "decode"])
    latency = decode.profile.coefficients
    assert (decode.batching.config.decode_a, decode.batching.config.decode_b) == (latency.decode_a, latency.decode_b)
    deadlines = parse(["--port", "1", "--scheduler", "slackline", "--deadlines"]).batching.config
    assert (deadlines.prefill_s, deadlines.rectangles, deadlines.slots) == (latency.prefill_b, True, 96)


def test_a_profile_without_a_time_for_tokens_starts_too():
    options = ["--port", "1", "--scheduler", "slackline", "--profile", "constant:5ms"]
    for more in (["--deadlines"], ["--role", "prefill"], ["--role", "decode"]):
        assert parse([*options, *more]).batching is not None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--scheduler", "slackline", "--batching", "calm"], "--batching: must not be set with --scheduler slackline"),
        (["--deadlines"], "--deadlines: requires --scheduler slackline"),
        (["--scheduler", "slackline", "--boundary", "layer"], "--boundary: requires --scheduler preemptive"),
    ],
)
def test_what_cannot_go_together(options, complaint, capsys):
    with pytest.raises(SystemExit):
        parse(["--port", "1", *options])
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["--batching", "calm"], ""),
        (["--scheduler", "slackline", "--deadlines"], ""),
        (["--role", "decode", "--deadlines"], "--deadlines has no effect in this role: kairos_decode batching"),
        ([], ""),
        (["--role", "decode"], ""),
    ],
)
def test_an_engine_says_at_its_start_that_it_reads_no_deadlines(options, warned):
    with EngineProcess("--profile", "constant:2ms", *options) as engine:
        warnings = [line for line in engine.log if " WARNING " in line]
    assert len(warnings) == bool(warned)
    assert warned in "".join(warnings)
