"""Simulations and traces over the API: asked, read, named, cancelled, removed; what is wrong names its field."""

from __future__ import annotations

import gzip
from datetime import timedelta

import pytest
from django.utils import timezone

from controller.models import Decision, Experiment
from controller.services.experiments import traces
from tests import experiment_data as data
from workers.experiments import runner as worker

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db"), pytest.mark.usefixtures("unsent_experiments")]

CSV = b"arrival_s,input_tokens,output_tokens,type\n0.0,100,10,chat\n1.5,200,20,chat\n"


def ask(caller, name="", **changes):
    return caller.post("/simulations", {"name": name, "spec": data.spec(**changes)})


def test_a_simulation_from_asking_to_its_csv(operator, viewer):
    made = ask(operator, "two policies", seeds=[1, 2])
    assert made.status_code == 201, made.data
    assert made.data["compares"] == ["slackline", "round_robin"]
    path = f"/simulations/{made.data['slug']}"
    waiting = viewer.get(f"{path}/result")
    assert (waiting.status_code, waiting.data["error"]["code"]) == (409, "conflict")
    worker.next_experiment()
    assert viewer.get(path).data["state"] == "done"
    result = viewer.get(f"{path}/result").data
    assert [each["policy"] for each in result["entries"]] == ["slackline", "round_robin"]
    file = viewer.get(f"{path}/result.csv")
    lines = file.content.decode().splitlines()
    assert lines[0].startswith("experiment,policy,policy_set,rate,class,requests,attainment")
    assert len(lines) == 1 + 2 * 5
    assert [each["slug"] for each in viewer.get("/simulations", state="done").data["items"]] == [made.data["slug"]]
    assert viewer.get("/simulations", state="failed").data["items"] == []
    decision = Decision.objects.get(kind="experiment_created")
    assert decision.inputs == {"compares": ["slackline", "round_robin"], "runs": 4, "seeds": [1, 2]}


def test_todays_fleet_and_shipped_profiles_become_figures(operator):
    data.fleet()
    made = ask(
        operator,
        instances={"fleet": "today"},
        policies=[
            "slackline",
            {"name": "slackline", "label": "three", "instances": {"fleet": "today", "change": 1}},
            {"name": "slackline", "label": "h100", "instances": {"profile": "llama-3.1-8b-h100"}},
        ],
    )
    assert made.status_code == 201, made.data
    spec = made.data["spec"]
    assert spec["instances"][0]["profile"] == data.SPEED
    assert spec["policies"][1]["instances"][0]["count"] == 3
    assert spec["policies"][2]["instances"][0]["profile"]["kv_capacity_tokens"] == 426788


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"policies": ["nonsense"]}, "spec.policies[0].name", "unknown 'nonsense'; valid:"),
        ({"policies": ["slackline", "slackline"]}, "spec.policies", "same label"),
        ({"policies": ["round_robin"] * 9}, "spec.policies", "1 to 8"),
        ({"policies": ["slackline", {"name": "edf_window", "overrides": {"pacing": {"x": 1}}}]},
         "spec.policies[1].overrides.pacing.x", "no setting 'x'"),
        ({"policies": [{"name": "slackline", "retarget": {}}]}, "spec.policies[0].retarget", "unknown field"),
        ({"instances": {"fleet": "today", "model": "demo"}}, "spec.instances", "no instance serves"),
        ({"instances": {"fleet": "tomorrow"}}, "spec.instances.fleet", "use fleet 'today'"),
        ({"instances": {"profile": "/etc/passwd"}}, "spec.instances[0].profile", "unknown profile"),
        ({"instances": {"profile": data.SPEED, "count": 10_000}}, "spec.instances", "at most 256"),
        ({"workload": {"kind": "trace", "path": "../shared/x.csv", "ttft_s": 1, "tpot_s": 1}}, "spec.workload.path",
         "no trace"),
        ({"workload": {**data.MIX, "per_task": 30_000}}, "spec.workload", "120,000 requests per run"),
        ({"workload": {**data.MIX, "per_task": 20_000}, "seeds": [1, 2, 3, 4]}, "spec.workload", "over 8 runs"),
        ({"workload": {"kind": "window", "since": "yesterday", "until": "now"}}, "spec.workload.since", "ISO 8601"),
        ({"seeds": list(range(11))}, "spec.seeds", "at most 10 seeds"),
        ({"seeds": ["one"]}, "spec.seeds", "must be an integer"),
        ({"surprise": 1}, "spec.surprise", "unknown field"),
    ],
)  # fmt: skip
def test_what_is_wrong_names_its_field(operator, changes, field, words):
    answer = ask(operator, **changes)
    assert answer.status_code == 400, answer.data
    error = answer.data["error"]
    assert error["fields"].keys() == {field}, error
    assert words in error["message"]
    assert not Experiment.objects.exists()


def test_a_window_without_traffic_says_so(operator):
    data.fleet()
    now = timezone.now()
    window = {"kind": "window", "since": (now - timedelta(hours=1)).isoformat(), "until": now.isoformat()}
    answer = ask(operator, workload=window)
    assert "no request for demo is recorded" in answer.data["error"]["message"]


@pytest.mark.parametrize(
    ("filters", "field", "words"),
    [
        ({"tenant": "nope"}, "tenant", "no request of tenant nope for demo is recorded from"),
        ({"slo_class": "nope"}, "slo_class", "no request of class nope for demo is recorded from"),
        ({"slo_class": ""}, "slo_class", "no request without a class for demo is recorded from"),
        ({"tenant": "nope", "slo_class": "chat"}, "tenant", "no request of tenant nope for demo is recorded from"),
        ({"tenant": "acme", "slo_class": "nope"}, "slo_class", "no request of class nope for demo"),
        ({"tenant": "acme", "slo_class": "batch"}, "slo_class", "no request of tenant acme and of class batch for"),
    ],
)
def test_a_filter_that_leaves_nothing_is_the_one_that_is_named(operator, filters, field, words):
    data.fleet()
    data.traffic(3, tenant="acme", slo_class="chat")
    data.traffic(3, tenant="other", slo_class="batch")
    now = timezone.now()
    window = {"kind": "window", "since": (now - timedelta(hours=1)).isoformat(), "until": now.isoformat()}
    error = ask(operator, workload={**window, **filters}).data["error"]
    assert error["fields"].keys() == {f"spec.workload.{field}"}, error
    assert words in error["message"]


def test_a_filter_of_times_without_any_traffic_leaves_the_times_to_blame(operator):
    data.fleet()
    now = timezone.now()
    window = {"kind": "window", "since": (now - timedelta(hours=1)).isoformat(), "until": now.isoformat()}
    error = ask(operator, workload={**window, "tenant": "nope"}).data["error"]
    assert error["fields"].keys() == {"spec.workload.since"}, error


def test_cancel_name_keep_and_remove(operator):
    slug = ask(operator).data["slug"]
    path = f"/simulations/{slug}"
    named = operator.patch(path, {"name": "Kept", "kept": True, "version": 1})
    assert (named.data["name"], named.data["kept"], named.data["version"]) == ("Kept", True, 2)
    assert operator.patch(path, {"name": "Late", "version": 1}).data["error"]["code"] == "version_conflict"
    assert operator.post(f"{path}/cancel").data["state"] == "cancelled"
    again = operator.post(f"{path}/cancel")
    assert (again.status_code, again.data["error"]["code"]) == (409, "conflict")
    assert operator.delete(path).status_code == 204
    assert operator.get(path).status_code == 404
    kinds = set(Decision.objects.filter(subject=slug).values_list("kind", flat=True))
    assert kinds == {"experiment_created", "experiment_updated", "experiment_cancelled", "experiment_removed"}


def test_a_trace_as_json_or_as_a_file(operator, viewer):
    made = operator.post("/traces", {"name": "Two rows", "file": CSV.decode()})
    assert made.status_code == 201, made.data
    assert (made.data["requests"], made.data["span_s"], made.data["input_tokens_mean"]) == (2, 1.5, 150)
    url = "/api/v1/traces?name=Packed"
    packed = operator.client.generic("POST", url, gzip.compress(CSV), content_type="application/gzip")
    assert packed.status_code == 201, packed.data
    plain = operator.client.generic("POST", "/api/v1/traces?name=Plain", CSV, content_type="text/csv")
    assert plain.data["requests"] == 2
    assert len(viewer.get("/traces").data["items"]) == 3
    workload = {"kind": "trace", "path": made.data["slug"], "ttft_s": 1.0, "tpot_s": 0.2}
    asked = ask(operator, workload=workload)
    assert asked.status_code == 201, asked.data
    held = operator.delete(f"/traces/{made.data['slug']}")
    assert held.data["error"]["code"] == "conflict"
    worker.next_experiment()
    entry = operator.get(f"/simulations/{asked.data['slug']}/result").data["entries"][0]
    assert entry["first_seed"]["requests"] == 2
    assert operator.delete(f"/traces/{made.data['slug']}").status_code == 204


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "line 1: column input_tokens is missing"),
        ("input_tokens,output_tokens\n", "line 2: there are no requests"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1\n1,x,1\n", "line 3, input_tokens: 'x' is not a number"),
        ("arrival_s,input_tokens,output_tokens\n5,1,1\n4,1,1\n", "line 3, arrival_s: 4 is before the previous line"),
        ("arrival_s,input_tokens,output_tokens\n-1,1,1\n", "line 2, arrival_s: -1 is negative"),
        ("input_tokens,output_tokens\n1,1.5\n", "line 2, output_tokens: 1.5 is not a whole number"),
        ("input_tokens,output_tokens\n1,\n", "line 2, output_tokens: 'nothing' is not a number"),
        ("input_tokens,output_tokens\nnan,1\n", "line 2, input_tokens: 'nan' is not a number"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1\n1e9,1,1\n", "are these milliseconds?"),
    ],
)
def test_a_wrong_trace_names_line_and_column(operator, text, words):
    answer = operator.post("/traces", {"name": "wrong", "file": text})
    assert answer.status_code == 400
    assert words in answer.data["error"]["fields"]["file"][0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"input_tokens,output_tokens\n\xff,1\n", "line 2: not UTF-8"),
        (b"input_tokens,output_tokens\n1,1\n\x00", "line 3: contains a NUL"),
        (b"\x1f\x8bnot gzip", "not a readable gzip file"),
        (gzip.compress(b"input_tokens,output_tokens\n" + b"1,1\n" * 200_001), "line 200002: more than 200,000"),
        (gzip.compress(b"0" * (traces.BYTES_MAX + 1)), "larger than 32 MB"),
    ],
)
def test_a_wrong_file_is_refused(operator, content, words):
    url = "/api/v1/traces?name=wrong"
    kind = "application/gzip" if content[:2] == b"\x1f\x8b" else "text/csv"
    answer = operator.client.generic("POST", url, content, content_type=kind)
    assert answer.status_code == 400
    assert words in answer.data["error"]["fields"]["file"][0]
