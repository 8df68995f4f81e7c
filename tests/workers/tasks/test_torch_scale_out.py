"""Scale-outs with real weights: the scaler's decision, real engine processes, weights from the best source that works.

Real: the processes, the transformer, safetensors, torch.distributed between engines, the database, every job. The load
that the scaler sees is the test's.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests
import safetensors.torch
from django.conf import settings

from controller.models import Action, Decision, Instance, Transfer
from controller.selectors.fleet.scaling import starts
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.actions import weights_load_order
from controller.services.fleet.instances import instance_create, instance_register
from controller.services.fleet.scaling_policies import scaling_policy_create
from controller.services.fleet.served_models import served_model_create
from tests.waiting import until
from tests.workers.engine.torch.bench import folder
from tests.workers.tasks.test_scaling import fleet, tick
from workers.actions.instance_keys import key_of
from workers.actions.runner import advance_actions
from workers.engine.weights.host_copy import WHOLE, home
from workers.provisioners import ProcessProvisioner, StaticProvisioner
from workers.supervisor.engine_processes import EngineFolder
from workers.tasks import reconcile

pytestmark = [pytest.mark.torch, pytest.mark.db, pytest.mark.django_db(transaction=True), pytest.mark.long(55)]
TOKEN = "fleet-secret"
WITHIN_S = 240.0  # a process with torch starts in seconds, or in minutes where others want the processor too
ASK = {"model": "mid", "prompt": list(range(40)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}


class Fleet:
    """The supervisor's part, the reconciler's and the actions' looks, done by the test in turns."""

    def __init__(self, path: Path) -> None:
        self.folder = EngineFolder(path / "engines", path / "logs", {**os.environ, "FLEET_TOKEN": TOKEN})
        self.provisioners = {"process": ProcessProvisioner(path / "engines")}

    def look(self) -> list[Decision]:
        self.folder.sync()
        static = Instance.objects.live().filter(provisioner="static").values_list("pk", "url")
        reconcile.reconcile_once({**self.provisioners, "static": StaticProvisioner(dict(static))}, time.time())
        return advance_actions([])

    def until(self, condition) -> None:
        instances = Instance.objects.values_list("id", "observed_state", "error")

        def held() -> bool:
            if not condition():
                self.look()
                return False
            return True

        until(held, WITHIN_S, every_s=0.1, what=lambda: [*instances.all()])

    def ended(self, instance_id: str) -> Action:
        """The newest load of weights there, at its end."""
        newest = Action.objects.filter(instance=instance_id, kind="weights_load").latest("id").pk
        self.until(lambda: Action.objects.get(pk=newest).state not in Action.OPEN)
        return Action.objects.get(pk=newest)

    def pid(self, instance_id: str) -> int:
        return self.folder.engines[instance_id].child.pid


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(reconcile, "fleet_or_nothing", list)
    monkeypatch.setattr(settings, "FLEET_TOKEN", TOKEN)
    (tmp_path / "logs").mkdir()
    running = Fleet(tmp_path)
    yield running
    running.folder.stop_all(lambda: True)


@pytest.fixture
def policy():
    model = served_model_create(actor=SYSTEM, name="mid")
    return scaling_policy_create(actor=SYSTEM, model=model, min_instances=1, max_instances=3, sustain_s=0, cooldown_s=0)


def spec(path: Path) -> dict[str, object]:
    return {
        "executor": "torch", "folder": str(path), "threads": 1, "kv_cache_gib": 0.01, "block_size": 4,
        "profile": "constant:5ms",
    }  # fmt: skip


def serving(policy, jobs, path: Path, id: str = "e1") -> Instance:
    """One that has started from the disk by itself."""
    instance_create(actor=SYSTEM, id=id, model=policy.model, spec=spec(path))
    jobs.until(lambda: Instance.objects.get(pk=id).observed_state == "ready")
    return Instance.objects.get(pk=id)


def scaled_out(policy) -> str:
    decision = tick(policy, fleet(0.95, "e1"))
    assert decision.kind == "scale_out", (decision.kind, decision.reason)
    (new,) = decision.outcome["started"]
    return new


def text(row: Instance) -> str:
    answer = requests.post(f"{row.url}/v1/completions", json=ASK, headers=key_of(row).headers(), timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def routed() -> set[str]:
    return {spec.id for spec in gateway_snapshot().instances}


def test_a_new_process_gets_its_weights_from_the_engine_that_serves(policy, jobs):
    first = serving(policy, jobs, folder())
    new = scaled_out(policy)
    row = Instance.objects.get(pk=new)
    assert (row.weights, row.spec["weights"], routed()) == ("loading", "absent", {"e1"})
    action = jobs.ended(new)
    assert (action.state, [(each["kind"], each["source"], each["error"]) for each in action.attempts]) == (
        "done", [("engine", "e1", "")],
    )  # fmt: skip
    size = sum(path.stat().st_size for path in folder().glob("*.safetensors"))
    assert 0.9 * size < action.attempts[0]["bytes"] <= size
    assert (action.decision.kind, action.decision.outcome["from"]) == ("weights_load", "e1")
    (transfer,) = Transfer.objects.filter(action=action)
    assert (transfer.source, transfer.target, transfer.state, transfer.bytes) == (
        "e1", new, "done", action.attempts[0]["bytes"],
    )  # fmt: skip
    row.refresh_from_db()
    assert (row.weights, routed()) == ("present", {"e1", new})
    assert text(row) == text(first)
    (start,) = [each for each in starts() if each.id == new]
    assert (start.source, start.weights) == ("process", "engine")
    assert 0 < start.load_s <= start.ready_s


@pytest.mark.sampled(1)
@pytest.mark.parametrize("then", ["engine", "disk"])
def test_a_source_that_dies_in_the_middle_is_followed_by_the_next(policy, jobs, then):
    first = serving(policy, jobs, folder())
    dying = DyingSource(folder())
    with dying as url:
        instance_register(actor=SYSTEM, id="a-dying", model=policy.model, url=url, backend="reference")
        jobs.until(lambda: Instance.objects.get(pk="a-dying").observed_state == "ready")
        new = instance_create(actor=SYSTEM, model=policy.model, spec={**spec(folder()), "weights": "absent"})
        after = {"kind": "engine", "url": first.url} if then == "engine" else {"kind": "disk"}
        weights_load_order(actor=SYSTEM, instance_id=new.pk, sources=[{"kind": "engine", "url": url}, after])
        action = jobs.ended(new.pk)
        assert dying.ended() == DIED
    size = sum(path.stat().st_size for path in folder().glob("*.safetensors"))
    assert 0 < dying.sent < size / 2
    assert action.state == "done", action.error
    (cut, good) = action.attempts
    assert (cut["kind"], good["kind"], good["error"]) == ("engine", then, "")
    assert "the transfer failed" in cut["error"]
    assert cut["bytes"] == 0  # nothing of it is kept
    assert action.decision.reason == f"from_{then}"
    assert [each["error"] for each in action.decision.outcome["attempts"]] == [cut["error"], ""]
    states = Transfer.objects.filter(action=action).order_by("attempt").values_list("state", flat=True)
    assert list(states) == ["failed", "done"]
    new.refresh_from_db()
    assert text(new) == text(first)


@pytest.mark.thorough
def test_a_scale_out_whose_source_dies_takes_the_copy_in_host_memory(policy, jobs, tmp_path):
    """As it was planned, nobody naming sources: the only engine, then what it left in this host's memory."""
    copies = tmp_path / "copies"
    copies.mkdir()
    dying = DyingSource(folder(), "--host-copy", str(copies))
    with dying as url:
        instance_register(actor=SYSTEM, id="a-dying", model=policy.model, url=url, backend="reference")
        jobs.until(lambda: Instance.objects.get(pk="a-dying").observed_state == "ready")
        pattern = {**spec(folder()), "host_copy": str(copies)}
        new = instance_create(actor=SYSTEM, model=policy.model, spec={**pattern, "weights": "absent"})
        jobs.until(lambda: list(home(copies).glob(f"*/{WHOLE}")) and Instance.objects.get(pk=new.pk).url)
        weights_load_order(actor=SYSTEM, instance_id=new.pk)
        action = jobs.ended(new.pk)
        assert dying.ended() == DIED
    assert dying.sent > 0
    assert (action.state, action.decision.reason) == ("done", "from_host"), action.error
    assert [(each["kind"], bool(each["error"])) for each in action.attempts] == [("engine", True), ("host", False)]
    assert [each["kind"] for each in action.params["told"]] == ["engine", "host", "disk"]
    assert action.decision.inputs["host_copy"] is True
    assert "the transfer failed" in action.decision.outcome["attempts"][0]["error"]
    new.refresh_from_db()
    served = text(new)
    assert (new.weights, new.pk in routed()) == ("present", True)
    os.kill(jobs.pid(new.pk), signal.SIGKILL)  # the last one that held the copy
    jobs.until(lambda: not list(home(copies).iterdir()))
    assert text(serving(policy, jobs, folder())) == served  # what the disk gives


def truncated(path: Path) -> str:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return "is not a complete safetensors file"


def without_a_tensor(path: Path) -> str:
    weights = path / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, weights)
    return "tensor model.layers.1.mlp.up_proj.weight is missing"


def of_another_shape(path: Path) -> str:
    weights = path / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()
    safetensors.torch.save_file(tensors, weights)
    return "tensor model.norm.weight"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("damage", [truncated, without_a_tensor, of_another_shape])
def test_damaged_files_fail_the_instance_and_the_next_one_is_asked_for(policy, jobs, tmp_path, damage):
    path = shutil.copytree(folder(), tmp_path / "model")
    first = serving(policy, jobs, path)
    complaint = damage(path)
    new = scaled_out(policy)
    Instance.objects.filter(pk=first.pk).update(weights="loading")  # nobody can give them: the disk is all there is
    action = jobs.ended(new)
    assert (action.state, action.decision.kind, action.decision.reason) == (
        "failed", "weights_load_failed", "no_source",
    )  # fmt: skip
    assert complaint in action.error
    assert complaint in action.decision.outcome["error"]
    row = Instance.objects.get(pk=new)
    assert (row.observed_state, row.desired_state, new in routed()) == ("failed", "stopped", False)
    assert complaint in row.error
    Instance.objects.filter(pk=first.pk).update(weights="present")
    assert scaled_out(policy) != new


@pytest.mark.thorough
def test_a_receiver_without_memory_says_so_and_stays_warm(policy, jobs):
    path = folder("LlamaForCausalLM", "--hidden", "768", "--layers", "4")
    first = serving(policy, jobs, path)
    new = instance_create(actor=SYSTEM, model=policy.model, spec={**spec(path), "weights": "absent"})
    jobs.until(lambda: Instance.objects.get(pk=new.pk).observed_state == "ready")
    pid = jobs.pid(new.pk)
    held = psutil.Process(pid).memory_info().vms
    before = resource.prlimit(pid, resource.RLIMIT_AS, (held + (40 << 20), resource.RLIM_INFINITY))
    weights_load_order(actor=SYSTEM, instance_id=new.pk)
    action = jobs.ended(new.pk)
    assert (action.state, [each["kind"] for each in action.attempts]) == ("failed", ["engine", "disk"])
    assert "memory" in action.attempts[-1]["error"]
    assert "memory" in action.decision.outcome["error"]
    new.refresh_from_db()
    assert (new.weights, new.observed_state, new.pk in routed()) == ("absent", "ready", False)
    resource.prlimit(pid, resource.RLIMIT_AS, before)
    weights_load_order(actor=SYSTEM, instance_id=new.pk)
    assert jobs.ended(new.pk).state == "done"
    new.refresh_from_db()
    assert text(new) == text(first)


DIED = 9
DYING = f"""
import os, sys
from workers.engine.torch.weights import meeting as torch_meeting
from workers.engine.torch.weights import transfer as torch_transfer
from workers.engine.config import parse
from workers.engine.server import run

whole = torch_transfer.WeightMemory.send

def some(self, meeting, turns=None):
    self._memory = dict(list(self._memory.items())[:3])
    print("sent", whole(self, meeting, turns), flush=True)
    os._exit({DIED})

torch_meeting.Meeting.wait_landed = lambda self, nbytes: None  # for what it never sends
torch_transfer.WeightMemory.send = some
run(parse(sys.argv[1:]))
"""


class DyingSource:
    """A real engine that is gone after the third tensor it sent. `sent`: bytes, once it has `ended`."""

    def __init__(self, path: Path, *more: str) -> None:
        options = ("--executor", "torch", "--model", str(path), "--served-model-name", "mid", "--threads", "1")
        sized = ("--kv-cache-gib", "0.01", "--profile", "constant:5ms", "--port", "0")
        self.sent = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", DYING, *options, *sized, *more],
            env={**os.environ, "FLEET_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "listening on " in line:
                return line.split("listening on ")[1].strip()
        raise RuntimeError("it did not start")

    def ended(self) -> int:
        """The code it exited with, by itself."""
        code = self._process.wait(30)
        assert self._process.stdout is not None
        self.sent = sum(int(line.split()[1]) for line in self._process.stdout if line.startswith("sent "))
        return code

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
