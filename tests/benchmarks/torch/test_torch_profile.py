"""A latency profile fitted to the PyTorch executor, in the form of the shipped ones; devices that are not there."""

import json
import shutil

import pytest

from benchmarks import bench_preempt, bench_scaleout
from benchmarks.scaleout.medium import device_copy
from benchmarks.torch import profile as torch_profile
from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients
from controller.predict.latency import LatencyModel
from controller.predict.latency_fit import DecodeSample, PrefillSample
from workers.engine.profiles import SHIPPED, load_profile
from workers.profiler import ProfileSamples

pytestmark = pytest.mark.torch
TRUE = LatencyCoefficients(0.01, 2e-5, 1e-9, 0.004, 1e-7, 1e-4)
KEYS = set.intersection(*(set(profile) for profile in json.loads(SHIPPED.read_text())["profiles"]))


def known():
    model = LatencyModel(TRUE)
    prefill = [PrefillSample(n, n * n, model.prefill_sums(n, n * n)) for n in range(100, 3000, 100)]
    decode = [DecodeSample(b, b * c, model.decode(b, b * c)) for b in (1, 4, 16) for c in (64, 512, 2048)]
    return ProfileSamples(prefill, decode, points=len(prefill))


def measured(device, samples=None):
    return torch_profile.ProfilePoints(samples or known(), "llama-8b", "bfloat16", device, 400_000, "2026-11-28")


def test_steps_that_take_the_time_of_the_host_can_be_left_out_of_the_fit():
    """And its error over all of them is said. A step of few tokens takes 60 ms here, as one of 2,500 tokens does."""
    samples, model = known(), LatencyModel(TRUE)
    samples.prefill = [PrefillSample(s.tokens, s.squares, max(0.06, s.seconds)) for s in samples.prefill]
    whole, large = (torch_profile.entry(measured("GPU", samples), least) for least in (0, 2500))
    assert LatencyModel(TRUE).prefill_sums(2400, 2400**2) < 0.064 < whole["prefill"]["a"] + 0.02
    assert large["prefill"]["median_rel_err"] < 0.01 < whole["prefill"]["median_rel_err"]
    assert large["prefill"]["domain"].startswith("batch*len 2500..2900 tokens, batch 1..16")
    assert "; over all steps, from 100 tokens, the median error is 0." in large["prefill"]["domain"]
    assert "over all steps" not in whole["prefill"]["domain"]
    assert model.prefill_sums(2900, 2900**2) == pytest.approx(
        sum(large["prefill"][key] * part for key, part in (("a", 1), ("b", 2900), ("c", 2900**2))), rel=0.02
    )


def test_an_entry_has_the_keys_of_all_shipped_ones_and_the_coefficients():
    found = torch_profile.entry(measured("NVIDIA H100 80GB HBM3"))
    assert set(found) == KEYS
    assert found["aliases"] == ["llama-8b-nvidia-h100-80gb-hbm3"]
    assert found["prefill"]["b"] == pytest.approx(TRUE.prefill_b, rel=0.01)
    assert found["decode"]["c"] == pytest.approx(TRUE.decode_c, rel=0.01)


def test_added_it_is_among_the_shipped_ones_once(tmp_path, monkeypatch):
    path = tmp_path / "profiles.json"
    shutil.copy(SHIPPED, path)
    monkeypatch.setattr("workers.engine.profiles.SHIPPED", path)
    found = torch_profile.entry(measured("GPU"))
    before = len(json.loads(path.read_text())["profiles"])
    torch_profile.add(found, path)
    torch_profile.add(found | {"kv_capacity_tokens": 123_456}, path)
    assert len(json.loads(path.read_text())["profiles"]) == before + 1
    assert load_profile("llama-8b-gpu").kv_capacity_tokens == 123_456
    assert load_profile("llama-3.1-8b-a100").model == "Llama-3.1-8B"


def test_a_tiny_model_is_measured_and_an_engine_can_read_it(tmp_path, capsys):
    path = tmp_path / "mine.json"
    sizes = ("--batch-tokens", "256", "--max-num-seqs", "4", "--repeats", "1")
    points = tmp_path / "points.json"
    torch_profile.main(["--shape", "tiny", *sizes, "--output", str(path), "--points", str(points)])
    kept = json.loads(points.read_text())["samples"]
    assert len(kept["prefill"]) == len(kept["decode"]) > 1
    assert all(each["seconds"] > 0 for kind in kept.values() for each in kind)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    profile = load_profile(str(path))
    assert profile.coefficients.prefill_b == said["prefill"]["b"]
    assert profile.coefficients.prefill_a + profile.coefficients.prefill_b > 0
    assert profile.coefficients.decode_a + profile.coefficients.decode_c > 0
    assert said["weights"] == "float32"
    torch_profile.main(["--from-points", str(points)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == said
    with pytest.raises(ConfigError, match="fewer tokens"):
        torch_profile.main(["--from-points", str(points), "--least-tokens", "1000000"])


@pytest.mark.parametrize("program", [torch_profile, bench_preempt, bench_scaleout])
def test_a_device_that_is_not_there_is_an_error_naming_the_option(program, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        program.parse(["--device", "cuda", "--shape", "llama-8b"])
    assert ended.value.code == 2
    assert "--device: PyTorch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "dtype"), [(torch_profile, "float32"), (bench_preempt, "float32"), (bench_scaleout, "bfloat16")]
)
def test_number_formats_by_device(program, dtype, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert program.parse(["--shape", "tiny"]).dtype == dtype
    assert program.parse(["--shape", "tiny", "--device", "cuda"]).dtype == "bfloat16"
    assert program.parse(["--device", "cuda", "--dtype", "float16"]).dtype == "float16"


def test_a_copy_between_devices_is_measured():
    assert device_copy((16 << 20) + 5, "cpu", "cpu") > 0
