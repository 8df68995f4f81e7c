import socket

import pytest

from workers.engine.config import parse


def test_defaults_come_from_the_profile():
    config = parse(["--port", "1", "--profile", "qwen2.5-14b-a100"])
    assert config.model == "Qwen2.5-14B"
    assert config.engine.kv_blocks == 215_963 // 16
    assert config.engine.max_model_len == 8192
    assert config.batching.name == "chunked_prefill"


def test_a_small_cache_bounds_the_context():
    assert parse(["--port", "1", "--kv-blocks", "10"]).engine.max_model_len == 160


def test_the_budget_grows_with_the_batch():
    assert parse(["--port", "1", "--max-num-seqs", "4000"]).engine.max_num_batched_tokens == 4000


def test_the_prefill_threshold_reaches_the_policy():
    config = parse(["--port", "1", "--long-prefill-token-threshold", "100"])
    assert config.batching.config.long_prefill_tokens == 100


def test_the_options_of_a_batching_policy_reach_it():
    given = '{"slots": 12, "cutoffs": [0.8, 0.9], "cutoff": 1}'
    config = parse(["--port", "1", "--batching", "calm", "--batching-options", given])
    found = config.batching.config
    assert (found.slots, tuple(found.cutoffs), found.cutoff, found.frame_steps) == (12, (0.8, 0.9), 1, 50)


def test_host_memory_holds_whole_blocks():
    config = parse(["--port", "1", "--swap-bytes", "5000000"])
    assert config.engine.swap_blocks == 2
    assert config.swap.block_s == 32 * 4096 * 16 / 16e9
    assert parse(["--port", "1"]).swap is None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--profile", "nope"], "--profile: unknown profile 'nope'; valid: "),
        (["--role", "prefill"], "--role: role prefill needs KV transfers: set FLEET_TOKEN"),
        (["--max-model-len", "99999999"], "--max-model-len: max_model_len (99999999) must fit"),
        (["--max-num-seqs", "0"], "--max-num-seqs: "),
        (["--scheduling-policy", "lifo"], "invalid choice: 'lifo'"),
        (["--startup-delay", "-1"], "not between 0 and 86400"),
        (["--kv-blocks", "-3"], "--kv-blocks: "),
        (["--port", "-5"], "argument --port: -5 is not a port: 0 (any that is free) to 65535"),
        (["--port", "65536"], "argument --port: 65536 is not a port"),
        (["--port", "http"], "argument --port: http is not a port"),
        (["--kv-port", "-5"], "argument --kv-port: -5 is not a port"),
        (["--long-prefill-token-threshold", "0"], "--long-prefill-token-threshold: "),
        (["--batching", "iteration_level", "--long-prefill-token-threshold", "9"], "does not cut prompts"),
        (["--swap-bytes", "-1"], "--swap-bytes: must be at least 0, got -1"),
        (["--swap-bytes", "100"], "--swap-bytes: 100 bytes are less than one KV block of 2097152 bytes"),
        (["--swap-bytes", "9999999", "--scheduler", "preemptive"], "--swap-bytes: the preemptive scheduler evicts no"),
        (["--swap-bytes", "9999999", "--emulated-swap-bytes-per-s", "0"], "--emulated-swap-bytes-per-s: must be pos"),
        (["--batching-options", "slots=3"], "--batching-options: is not JSON"),
        (["--batching-options", "[96]"], "--batching-options: must be an object"),
        (["--batching-options", '{"slots": 96}'], "--batching-options: slots: batching chunked_prefill has no setting"),
        (["--batching", "calm", "--batching-options", '{"slots": 0}'], "--batching-options: slots: slots must be"),
        (["--batching", "calm", "--batching-options", '{"slots": "9"}'], "slots must be a whole number, is '9'"),
        (["--batching", "calm", "--batching-options", '{"rectangles": 1}'], "rectangles must be true or false"),
        (
            ["--batching", "calm", "--batching-options", '{"preemption": {"threshold": "x"}}'],
            "--batching-options: preemption.threshold: threshold must be a number",
        ),
        (
            ["--long-prefill-token-threshold", "9", "--batching-options", '{"long_prefill_tokens": 8}'],
            "--long-prefill-token-threshold: is also set in --batching-options",
        ),
    ],
)
def test_a_wrong_option_is_named(options, complaint, capsys):
    with pytest.raises(SystemExit):
        parse(["--port", "1", *options])
    assert complaint in capsys.readouterr().err


def test_the_fleets_token_may_come_from_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "token").write_text("fleet-secret\n")
    monkeypatch.delenv("FLEET_TOKEN", raising=False)
    monkeypatch.setenv("FLEET_TOKEN_FILE", str(tmp_path / "token"))
    assert parse(["--port", "1", "--role", "prefill"]).kv.token == "fleet-secret"
    monkeypatch.setenv("FLEET_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(SystemExit):
        parse(["--port", "1"])
    assert "error: FLEET_TOKEN_FILE=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reached_at"),
    [
        ([], "127.0.0.1"),
        (["--host", "10.1.2.3"], "10.1.2.3"),
        (["--host", "0.0.0.0"], socket.gethostname()),
        (["--host", "0.0.0.0", "--advertise-host", "gpu-7"], "gpu-7"),
    ],
)
def test_other_engines_are_told_an_address_they_can_reach(options, reached_at):
    assert parse(["--port", "0", *options]).kv.reached_at == reached_at
