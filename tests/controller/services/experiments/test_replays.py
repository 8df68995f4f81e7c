"""Replays and previews are of the fleet that serves: with its roles, and with what its classes let be late."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controller.core.errors import ConfigError
from controller.core.types import Outcome, Role
from controller.models import Experiment, InstanceLink, KvTransfer
from controller.selectors.experiments.edits import ClassEdit, Owners, edit_as_json, edit_of_json
from controller.selectors.experiments.fleet_model import fleet_today, size_of
from controller.selectors.experiments.kv_today import NOT_MEASURED
from controller.services.experiments.previews import EDITED, RECORDED, preview_order
from controller.services.experiments.reading import read
from controller.services.experiments.specs import resolved
from controller.services.slo.flow_settings import flow_settings_create, flow_settings_update
from tests import experiment_data as data
from tests import factories
from workers.experiments import runner as worker

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("unsent_experiments")]
FROM_ITS_CLASS = [{"kind": "slo", "reason": "class", "figures": {}}]


def roles(prefill: int = 1, decode: int = 1) -> None:
    """A fleet whose only fit is of collocated engines, as after a change of roles."""
    model = data.fleet(instances=0)
    for role in ["prefill"] * prefill + ["decode"] * decode:
        factories.instance(model, device_kind="a100", max_num_seqs=16, role=role)


def preview(edit: ClassEdit) -> Experiment:
    row = preview_order(
        actor=data.OLGA, name="edit", edit=edit, policy="slackline", overrides={}, now=timezone.now()
    )  # fmt: skip
    assert worker.next_experiment(previews_only=True)
    return Experiment.objects.get(pk=row.pk)


def test_a_preview_on_prefill_and_decode_instances_runs_through_both():
    from controller.simulator.runner import run_once

    roles()
    data.traffic(40, may_defer=False)
    row = preview(ClassEdit("interactive", Owners(), 0.5, 0.06, None, 5.0))
    assert (row.state, row.error) == ("done", "")
    assert [each["first_seed"]["requests"] for each in row.result["entries"]] == [40, 40]

    one = read(row.spec)[0]
    assert [each.role for each in one.settings.instances] == [Role.DECODE, Role.PREFILL]
    for record in run_once(one, one.contenders[0], None, 1).records:
        assert (record.outcome, record.instance, record.prefill_instance) == (Outcome.OK, "engine-0", "engine-1")


def settings_of(group):
    """As the simulator builds it, beside an engine of each stage: neither may be alone."""
    stages = [{"profile": data.SPEED, "model": group["model"], "role": stage} for stage in ("prefill", "decode")]
    spec, _ = resolved({**data.spec(), "instances": [group, *stages]}, data.no_profile)
    return read(spec)[0].settings.instances[0]


def moved(request: str, **fields) -> None:
    defaults = {
        "started_at": timezone.now() - timedelta(minutes=1), "request": request, "attempt": 1, "model": "demo",
        "source": "p", "target": "d", "outcome": "done", "state": "released", "reason": "", "bytes": 400_000,
        "seconds": 0.002, "tokens": 100, "cached": 50, "layers": 28, "measured_by": "engine",
    }  # fmt: skip
    KvTransfer.objects.create(**{**defaults, **fields})


def test_kv_moves_in_a_preview_as_it_does_between_todays_engines():
    roles()
    requests = data.traffic(3, prompt_tokens=100)
    for number, request in enumerate(requests):
        moved(request, bytes=400_000 * (number + 1), seconds=0.002)
    moved(requests[0], outcome="failed", seconds=9.0)
    moved(requests[0], measured_by="gateway", seconds=9.0)
    asked = {"instances": {"fleet": "today", "model": "demo"}}
    spec, notes = resolved({**data.spec(), **asked}, data.no_profile)
    assert spec["settings"] == {"links": {"bandwidth_gb_s": pytest.approx(0.4), "overlap": True, "layers": 28}}
    assert [group["kv_bytes_per_token"] for group in spec["instances"]] == [8000, 8000]
    assert notes == ["KV moves at 0.4 GB/s, 8,000 bytes a token: the medians of the last 3 transfers."]

    at = timezone.now()
    for target, speed in (("d", 2e9), ("e", 3e9), ("f", 4e9)):
        link = {"source": "p", "target": target, "model": "demo", "since": at, "created_at": at, "observed_at": at}
        InstanceLink.objects.create(**link, bandwidth_bytes_s=speed, closed_at=at if target == "f" else None)
    spec, notes = resolved({**data.spec(), **asked}, data.no_profile)
    assert spec["settings"]["links"]["bandwidth_gb_s"] == pytest.approx(2.5), "how long pulls took says less"
    assert notes == ["KV moves at 2.5 GB/s, the median of 2 links; 8,000 bytes a token, that of the last 3 transfers."]

    given = {"settings": {"links": {"bandwidth_gb_s": 25.0}}}
    spec, notes = resolved({**data.spec(), **asked, **given}, data.no_profile)
    assert (spec["settings"], notes) == (given["settings"], []), "what was asked for stays"


def test_links_of_a_preview_have_the_flow_policy_by_which_daemons_schedule():
    """And none as long as no engine asks a daemon. The time for which a transfer was held says nothing of its link."""
    roles()
    for request in data.traffic(3, prompt_tokens=100):
        moved(request, bytes=400_000, seconds=1.002, held_s=1.0, flow="lost")
    asked = {"instances": {"fleet": "today", "model": "demo"}}

    def links() -> tuple[dict, str]:
        spec, notes = resolved({**data.spec(), **asked}, data.no_profile)
        read(spec)
        return spec["settings"]["links"], notes[0]

    flow_settings_create(actor=data.OLGA, flow_policy="mfs")
    assert "flow_policy" not in links()[0]
    moved(data.traffic(1)[0], bytes=400_000, seconds=0.002, flow="scheduled")
    found, note = links()
    assert (found["bandwidth_gb_s"], found["flow_policy"]) == (pytest.approx(0.2), "mfs")
    assert note.endswith("4,000 bytes a token: the medians of the last 4 transfers; the flow policy is mfs.")
    flow_settings_update(actor=data.OLGA, version=1, changes={"flow_policy": "off"})
    assert "flow_policy" not in links()[0]


def test_without_transfers_or_roles_nothing_is_made_up():
    roles()
    asked = {"instances": {"fleet": "today", "model": "demo"}}
    spec, notes = resolved({**data.spec(), **asked}, data.no_profile)
    assert ("settings" in spec, notes) == (False, [NOT_MEASURED])
    assert resolved(data.spec(), data.no_profile)[1] == []


def test_a_fleet_with_roles_grows_and_shrinks_in_one_of_them():
    roles(prefill=2, decode=1)

    def counts(*change, **named):
        groups = fleet_today("demo", *change, **named)
        return {group["role"]: group["count"] for group in groups}

    assert counts() == {"prefill": 2, "decode": 1}
    assert counts(-1) == {"prefill": 1, "decode": 1}, "of the role that most have"
    assert counts(2, role="decode") == {"prefill": 2, "decode": 3}
    for change, named, field in ((-1, {"role": "decode"}, "change"), (1, {"role": "collocated"}, "role")):
        with pytest.raises(ConfigError) as caught:
            counts(change, **named)
        assert caught.value.field == f"instances.{field}"

    asked = {"fleet": "today", "model": "demo", "change": 1, "role": "decode"}
    spec, _ = resolved({**data.spec(), "instances": asked}, data.no_profile)
    assert size_of(spec["instances"]) == 4


def test_a_reference_engine_batches_as_it_was_told():
    model = data.fleet(instances=0)
    factories.instance(model, device_kind="a100", max_num_seqs=16, spec={"batching": "iteration_level"})
    (group,) = fleet_today("demo")
    assert group["batching"] == "iteration_level"


@pytest.mark.parametrize(
    ("told", "role", "expected"),
    [
        ({"scheduler": "continuous"}, "collocated", {"batching": "chunked_prefill"}),
        (
            {"scheduler": "preemptive", "boundary": "chunk", "chunk_tokens": 512},
            "collocated",
            {
                "engine_kind": "preemptive_prefill",
                "batching": "slo_aware_batching",
                "preemption": {"boundary": "chunk", "chunk_tokens": 512},
            },
        ),
        ({"scheduler": "preemptive"}, "prefill", {"engine_kind": "preemptive_prefill"}),
        ({"scheduler": "slackline", "deadlines": True}, "collocated", {"engine_kind": "slackline", "deadlines": True}),
        ({"scheduler": "slackline"}, "decode", {"engine_kind": "slackline"}),
        (
            {"batching": "calm", "batching_options": {"slots": 7}},
            "collocated",
            {"batching": "calm", "batching_settings": {"slots": 7}},
        ),
        ({"scheduling_policy": "fcfs", "max_num_batched_tokens": 4096}, "collocated", {"scheduling_policy": "fcfs"}),
        ({"kv_blocks": 1000, "block_size": 32}, "collocated", {"kv_tokens": 32_000, "block_size": 32}),
    ],
)
def test_a_replay_runs_the_schedulers_that_the_engines_run(told, role, expected):
    model = data.fleet(instances=0)
    factories.instance(model, device_kind="a100", max_num_seqs=16, role=role, spec=told)
    (group,) = fleet_today("demo")
    assert {name: group.get(name) for name in expected} == expected
    if role == "collocated":
        spec, _ = resolved({**data.spec(), "instances": {"fleet": "today", "model": "demo"}}, data.no_profile)
        one, *_ = read(spec)
        assert {name: getattr(one.settings.instances[0], name) for name in expected} == expected


@pytest.mark.parametrize(
    ("told", "role", "complaint"),
    [
        ({"scheduler": "preemptive"}, "decode", "decodes under scheduler 'preemptive'"),
        ({"scheduler": "lottery"}, "collocated", "runs scheduler 'lottery', which the simulator does not know"),
    ],
)
def test_a_scheduler_that_cannot_be_replayed_is_refused_by_name(told, role, complaint):
    model = data.fleet(instances=0)
    row = factories.instance(model, device_kind="a100", role=role, spec=told)
    with pytest.raises(ConfigError, match=complaint) as caught:
        fleet_today("demo")
    assert (caught.value.field, row.pk in str(caught.value)) == ("instances", True)


@pytest.mark.parametrize(
    ("started", "role", "more"),
    [
        ("prefill", "collocated", {}),
        ("decode", "prefill", {}),
        ("collocated", "decode", {"deadlines": True, "batching_options": {"slots": 7}}),
    ],
)
def test_an_engine_that_turned_keeps_the_scheduler_of_its_start_in_a_replay(started, role, more):
    model = data.fleet(instances=0)
    told = {"scheduler": "slackline", **more}
    for each in (started, role):
        factories.instance(model, device_kind="a100", max_num_seqs=16, role=each, started_role=started, spec=told)
    groups = {group.get("role", "collocated"): group for group in fleet_today("demo")}
    of_its_start, turned = settings_of(groups[started]), settings_of(groups[role])
    assert (of_its_start.role, turned.role) == (started, role)
    assert (turned.part.engine_kind, turned.part.batching) == (
        of_its_start.part.engine_kind, of_its_start.part.batching,
    )  # fmt: skip
    assert turned.build_batching().config == of_its_start.build_batching().config


def test_a_prefill_scheduler_that_decodes_now_cannot_be_replayed():
    model = data.fleet(instances=0)
    told = {"scheduler": "slackline"}
    row = factories.instance(model, device_kind="a100", role="decode", started_role="prefill", spec=told)
    with pytest.raises(ConfigError, match=f"{row.pk} decodes under scheduler 'slackline as it started .prefill.'"):
        fleet_today("demo")


def test_what_a_vllm_was_told_under_the_same_names_is_its_own_business():
    model = data.fleet(instances=0)
    factories.instance(model, device_kind="a100", backend="vllm", spec={"scheduler": "preemptive"})
    (group,) = fleet_today("demo")
    assert (group["batching"], "engine_kind" in group) == ("vllm_v1", False)


def test_what_was_served_late_is_served_late_in_a_replay():
    """Nobody could keep its TTFT: it was served because its class may be late, and a replay serves it too."""
    data.fleet(instances=2)
    data.traffic(30, target_ttft_s=1e-4, may_defer=True, attained=False)
    until = timezone.now()
    window = {"kind": "window", "since": (until - timedelta(hours=1)).isoformat(), "until": until.isoformat()}
    asked = {"instances": {"fleet": "today", "model": "demo"}, "workload": {**window, "model": "demo"}}
    spec, _ = resolved({"name": "late", "policies": ["slackline"], **asked}, data.no_profile)
    (one,) = read(spec)
    assert {each.may_defer for each in one.workload.requests} == {True}

    from controller.simulator.runner import run_once

    assert {record.outcome for record in run_once(one, one.contenders[0], None, 1).records} == {Outcome.OK}


def test_taking_the_permission_to_be_late_away_shows_in_the_preview():
    data.fleet(instances=2)
    data.traffic(30, target_ttft_s=1e-4, may_defer=True, attained=False, decisions=FROM_ITS_CLASS)
    row = preview(ClassEdit("interactive", Owners(), 1e-4, 0.1, None, 5.0, may_defer=False))
    outcomes = {each["policy"]: each["first_seed"]["outcomes"] for each in row.result["entries"]}
    assert outcomes == {RECORDED: {"ok": 30}, EDITED: {"refused": 30}}


@pytest.mark.parametrize(
    ("recorded", "edited", "defers"), [(True, None, True), (True, False, False), (False, True, True)]
)
def test_an_edit_says_whether_requests_of_its_class_may_be_late(recorded, edited, defers):
    data.traffic(1, may_defer=recorded)
    data.traffic(1, may_defer=recorded, tenant="globex")
    now = timezone.now()
    from controller.selectors.experiments import traffic

    rows = traffic.arrivals(traffic.RecordedWindow(now - timedelta(hours=1), now, "demo"), sources=True)
    edit = ClassEdit("interactive", Owners(None, ("globex",)), 1.0, 0.1, None, 5.0, may_defer=edited)
    assert edit_of_json(edit_as_json(edit)) == edit
    by_tenant = {row.tenant: edit.defers(row) for row in rows}
    assert by_tenant == {"acme": defers, "globex": recorded}, "another tenant's class is its own"
