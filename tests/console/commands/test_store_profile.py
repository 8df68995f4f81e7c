"""A measured profile becomes the one that gateways start from."""

import json

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from controller.models import Decision, Instance, LatencyProfile
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_register
from tests.factories import served_model

pytestmark = pytest.mark.django_db
COEFFICIENTS = {
    "prefill_a": 0.01, "prefill_b": 2e-4, "prefill_c": 1e-8, "decode_a": 0.005, "decode_b": 1e-7, "decode_c": 3e-4,
}  # fmt: skip


def profile(tmp_path, **changes):
    path = tmp_path / "p.json"
    path.write_text(
        json.dumps({"coefficients": COEFFICIENTS, "fit": {"samples": 42, "decode_p95_error": 0.1}, **changes})
    )
    return str(path)


def test_the_newest_profile_reaches_the_gateways_and_is_audited(tmp_path):
    model = served_model(name="demo")
    instance_register(actor=SYSTEM, id="e1", model=model, url="http://e1:8000", backend="vllm", device_kind="cpu")
    Instance.objects.update(observed_state=Instance.Observed.READY)
    call_command("store_profile", profile(tmp_path), model="demo", device_kind="cpu")
    call_command(
        "store_profile",
        profile(tmp_path, coefficients={**COEFFICIENTS, "decode_a": 0.009}),
        model="demo",
        device_kind="cpu",
    )
    (spec,) = gateway_snapshot().instances
    assert spec.latency is not None
    assert spec.latency.decode_a == 0.009
    assert LatencyProfile.objects.filter(active=True).count() == 1
    assert LatencyProfile.objects.get(active=True).samples == 42
    assert Decision.objects.filter(kind="latency_profile_created").count() == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"coefficients": {"prefill_a": 1}}, "prefill_b"),
        ({"coefficients": {**COEFFICIENTS, "decode_a": "x"}}, "could not convert"),
        ({"coefficients": {**COEFFICIENTS, "decode_a": -1.0}}, "0 or more"),
        ({"coefficients": None}, "coefficients"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path, changes, said):
    served_model(name="demo")
    with pytest.raises(CommandError, match=said):
        call_command("store_profile", profile(tmp_path, **changes), model="demo", device_kind="cpu")


def test_a_file_or_model_that_is_not_there_is_refused(tmp_path):
    served_model(name="demo")
    with pytest.raises(CommandError, match=r"no-such\.json"):
        call_command("store_profile", str(tmp_path / "no-such.json"), model="demo", device_kind="cpu")
    with pytest.raises(CommandError, match="does not exist"):
        call_command("store_profile", profile(tmp_path), model="nope", device_kind="cpu")
