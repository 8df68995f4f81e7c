"""Asking, keeping, retention, and what a spec becomes."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.core.errors import ConfigError
from controller.models import Decision, Experiment
from controller.services.actors import Actor
from controller.services.experiments import commands as service
from controller.services.experiments.reading import prefix_note, read
from controller.services.experiments.traces import trace_create
from tests import experiment_data as data
from tests import factories

pytestmark = pytest.mark.django_db


def test_what_no_one_kept_goes_after_thirty_days_and_previews_after_an_hour():
    old, kept, young, waiting = (data.experiment(name) for name in ("old", "kept", "young", "waiting"))
    preview = service.preview_create(actor=data.OLGA, name="edit", spec=data.spec(), notes=[])
    ago = {old: 31, kept: 31, young: 29, preview: 1}
    for row, days in ago.items():
        at = timezone.now() - timedelta(days=days)
        Experiment.objects.filter(pk=row.pk).update(state="cancelled", ended_at=at, kept=row == kept)
    assert service.experiments_retain(actor=Actor.job("retention")) == 1
    assert set(Experiment.objects.values_list("name", flat=True)) == {"kept", "young", "waiting"}
    assert Decision.objects.get(kind="experiment_removed").actor == "retention"
    assert waiting.state == "queued"


def test_a_script_in_a_loop_is_stopped(monkeypatch):
    monkeypatch.setattr(service, "OPEN_MAX", 1)
    data.experiment()
    with pytest.raises(ValidationError, match="1 experiments are already queued or running"):
        data.experiment()


@pytest.mark.parametrize(("block_size", "kept"), [(512, True), (16, False)])
def test_prefixes_stay_only_where_blocks_are_of_the_engines_size(block_size, kept):
    lengths = [500 + 300 * number for number in range(20)]
    blocks = [" ".join(map(str, range(-(-length // 512)))) for length in lengths]
    rows = "".join(f"{n},{length},5,{blocks[n]}\n" for n, length in enumerate(lengths))
    content = f"arrival_s,input_tokens,output_tokens,prefix_hashes\n{rows}".encode()
    trace = trace_create(actor=data.OLGA, name="blocks", content=content)
    instances = [{"profile": data.SPEED, "max_model_len": 32_768, "block_size": block_size}]
    workload = {"kind": "trace", "path": trace.slug, "ttft_s": 1.0, "tpot_s": 0.1}
    [one] = read(data.spec(instances=instances, workload=workload, policies=["slackline"]))
    demands = one.workload.demands(None, 1)
    assert [bool(each.prefix) for each in demands] == [kept] * 20
    assert bool(prefix_note(data.spec(instances=instances, workload=workload, policies=["slackline"]))) is not kept


def test_a_replay_knows_what_its_classes_are_worth():
    data.fleet()
    factories.slo_class(name="interactive", value=3.0)
    factories.slo_class(name="interactive", value=7.0, tenant=factories.tenant(name="acme"))
    data.traffic(2, tenant=lambda n: ["acme", "demo"][n])
    now = timezone.now()
    times = {"since": (now - timedelta(hours=1)).isoformat(), "until": now.isoformat()}
    row = data.experiment(workload={"kind": "window", "model": "demo", **times}, policies=["slackline"])
    [one] = read(row.spec)
    assert [each.value for each in one.workload.demands(None, 1)] == [7.0, 3.0]


PROGRAMS = {"kind": "programs", "programs": 30, "rate": 2.0, "foresight": {"kind": "oracle"}}
ROOMY = [{**data.INSTANCES[0], "max_model_len": 16_384, "kv_tokens": 262_144}]


def test_programs_are_asked_for_by_a_row_and_run():
    from controller.simulator.report.summary import report
    from controller.simulator.runner import run_once

    row = data.experiment(workload=PROGRAMS, instances=ROOMY, policies=["slackline"])
    [one] = read(row.spec)
    found = report(run_once(one, one.contenders[0], None, 1))
    assert sum(kind["programs"] for kind in found["programs"].values()) == 30
    assert found["requests"] == sum(kind["calls"] for kind in found["programs"].values())


def test_too_many_calls_of_programs_are_refused_before_anything_is_built():
    """30,000 programs of 4.5 calls each in the mean."""
    with pytest.raises(ConfigError, match="about 135,000 requests per run") as caught:
        data.experiment(workload={**PROGRAMS, "programs": 30_000}, instances=ROOMY, policies=["slackline"])
    assert caught.value.field == "workload"


def test_every_policy_is_read_with_its_own_instances():
    own = [{**data.INSTANCES[0], "count": 3}]
    row = data.experiment(policies=["slackline", {"name": "slackline", "label": "three", "instances": own}])
    assert [len(one.settings.instances) for one in read(row.spec)] == [2, 3]
    assert row.labels == ["slackline", "three"]
