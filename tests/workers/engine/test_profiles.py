import json

import pytest

from controller.core.errors import ConfigError, UnknownName
from controller.core.steps import Chunk, Seq, Step
from controller.core.types import LatencyCoefficients
from workers.engine.profiles import SHIPPED, Profile, load_profile, shipped_profiles

TEN = Profile("ten", "m", LatencyCoefficients(0.01, 1e-4, 1e-8, 0.02, 1e-6, 1e-3), 1000)


def seq(prompt: int) -> Seq:
    return Seq("s", 0.0, prompt, 10)


def step(chunks: tuple[tuple[int, int], ...] = (), decodes: tuple[int, ...] = ()) -> Step:
    made = tuple(Chunk(seq(start + length), start, length, True) for start, length in chunks)
    return Step(1, made, tuple(seq(length) for length in decodes), sum(decodes))


def test_prefill_alone():
    assert TEN.seconds(step(((0, 100), (0, 1000)))) == pytest.approx(0.1301)


def test_a_past_costs_attention_only():
    assert TEN.seconds(step(((1000, 100),))) == pytest.approx(0.01 + 0.01 + 1e-8 * 100 * 2100)


def test_chunks_of_a_prompt_cost_its_square_and_one_constant_each():
    whole = TEN.seconds(step(((0, 1000),)))
    halves = TEN.seconds(step(((0, 500),))) + TEN.seconds(step(((500, 500),)))
    assert halves == pytest.approx(whole + 0.01)


def test_decode_alone():
    assert TEN.seconds(step(decodes=(100, 200))) == pytest.approx(0.02 + 300e-6 + 2e-3)


def test_a_mixed_step_has_one_constant_the_larger():
    assert TEN.seconds(step(((0, 100),), (100, 200))) == pytest.approx(0.02 + 0.01 + 1e-4 + 300e-6 + 2e-3)


@pytest.mark.parametrize(
    ("name", "seconds"), [("constant:5ms", 0.005), ("constant:250us", 250e-6), ("constant:1.5s", 1.5)]
)
def test_a_constant_profile_takes_that_long_whatever_runs(name, seconds):
    profile = load_profile(name)
    assert profile.seconds(step(((0, 999),), (5, 5))) == pytest.approx(seconds)


def test_shipped_profiles_name_their_source_and_credit():
    raw = json.loads(SHIPPED.read_text())["profiles"]
    assert all(profile["source"] and profile["credit"] for profile in raw)
    shipped = shipped_profiles()
    assert len(shipped) == sum(1 + len(profile["aliases"]) for profile in raw)  # no alias twice


@pytest.mark.parametrize(
    ("alias", "model", "prefill_a"),
    [
        ("llama-3.1-8b-a100", "Llama-3.1-8B", 6.63e-3),
        ("llama-3.1-8b-h100", "Llama-3.1-8B", 2.45e-3),
        ("qwen2.5-7b-a100", "Qwen2.5-7B", 4.58e-3),
        ("qwen3-32b-a100-tp2", "Qwen3-32B", 1.90e-2),
        ("llama-3.1-70b-a100-tp4", "Llama-3.1-70B", 1.96e-2),
        ("llama-3.1-70b-h100-tp4", "Llama-3.1-70B", 6.64e-3),
        ("llama-2-70b-a100-tp2", "Llama-2-70B", 3.51e-2),
    ],
)
def test_aliases_and_published_figures(alias, model, prefill_a):
    profile = load_profile(alias)
    assert profile.model == model
    assert profile.coefficients.prefill_a == pytest.approx(prefill_a, rel=0.01)
    assert profile.kv_capacity_tokens > 10_000


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(UnknownName, match=r"unknown profile 'gpt-5'; valid: .*llama-3.1-8b-a100.*constant:"):
        load_profile("gpt-5")


def test_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"model": "mine", "prefill": {"a": 1, "b": 2, "c": 3}, "decode": {"a": 4, "b": 5, "c": 6}})
    )
    assert load_profile(str(path)).coefficients == LatencyCoefficients(1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("[]", "expected an object"),
        ('{"prefill": {"a": 1, "b": 1, "c": 1}}', "decode needs numbers"),
        ('{"prefill": {"a": 1, "b": -1, "c": 1}, "decode": {"a": 1, "b": 1, "c": 1}}', "prefill needs numbers"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path, text, complaint):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_profile(str(path))
