"""A model of a running `make up` whose vLLM servers it starts by itself, from a launch template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import requests

from benchmarks.servers.engines import CONTEXT_TOKENS, VLLM_ENVIRONMENT, VLLM_HOME
from controller.engine.shipped_templates import SHIPPED
from tests.faults.load import recorded
from tests.faults.system import System

FOLDER = VLLM_HOME / "model"
START_S = 240.0  # on a busy machine; less than a test may take, so that a start that hangs is told with its log
STEPS = ("process", "weights", "listening", "ready")
TEMPLATE = {
    "backend": "vllm", "key_variable": "VLLM_API_KEY", "start_limit_s": START_S,
    "command": [*SHIPPED["vllm"]["command"], "--enforce-eager", "--dtype", "bfloat16"],
    "environment": {**VLLM_ENVIRONMENT},
}  # fmt: skip


@dataclass
class Launched:
    """`slots`: requests at a time that each of its servers takes."""

    system: System
    session: requests.Session
    model: str
    slots: int

    def put(self, path: str, body: dict[str, Any], method: str = "POST") -> None:
        answer = self.system.control(self.session, path, body, method)
        assert answer.ok, f"{path}: {answer.text}"

    def end(self) -> None:
        """Stop its servers, and wait until they have ended."""
        listed = self.session.get(f"{self.system.console}/api/v1/scaling-policies", timeout=10).json()["items"]
        for policy in [each for each in listed if each["model"] == self.model]:
            self.put(f"scaling-policies/{policy['id']}", {"enabled": False, "version": policy["version"]}, "PATCH")
        for name in [*self.instances(), *self.instances("draining")]:
            self.put(f"instances/{name}/stop", {})
        self.system.until(lambda: set(self.instances("stopped").values()) <= {"stopped", "failed"}, 60.0)

    def start_first(self) -> str:
        """Its first server, which is ready afterwards; its id."""
        self.put("launch-templates/by-name/vllm-eager", TEMPLATE, "PUT")
        self.put("models", {"name": self.model, "context_tokens": CONTEXT_TOKENS})
        name = f"{self.model}-1"
        first = {
            "id": name, "model": self.model, "backend": "vllm", "provisioner": "process", "template": "vllm-eager",
            "max_num_seqs": self.slots, "spec": {"folder": str(FOLDER)},
        }  # fmt: skip
        self.put("instances", first)
        self.system.until(lambda: self.instances() == {name: "ready"}, START_S)
        return name

    def scale(self, **policy: Any) -> None:
        self.put("scaling-policies", {"model": self.model, "cooldown_s": 3.0, "warm": 0, **policy})

    def instances(self, state: str = "running") -> dict[str, str]:
        """Observed states of the model's instances by id."""
        sql = """SELECT i.id, i.observed_state FROM instance i JOIN served_model m ON m.id = i.model_id
                 WHERE m.name = %s AND i.desired_state = %s"""
        return dict(self.system.query(sql, self.model, state))

    def decisions(self, kind: str) -> list[tuple[Any, ...]]:
        """Time, reason, inputs and outcome of each."""
        sql = "SELECT at, reason, inputs, outcome FROM decision WHERE kind = %s AND subject LIKE %s ORDER BY id"
        return self.system.query(sql, kind, f"{self.model}/%")

    def scale_out_s(self, instance: str) -> dict[str, float]:
        """Seconds after the decision to start it at which it reached each step, to its first token."""
        [at] = [at for at, _, _, outcome in self.decisions("scale_out") if instance in outcome["started"]]
        [first] = [told for _, _, seen, told in self.decisions("scale_out_served") if seen["instance"] == instance]
        [(steps,)] = self.system.query("SELECT start_steps FROM instance WHERE id = %s", instance)
        assert set(STEPS) <= set(steps)
        by_step = {name: round(reached - at.timestamp(), 2) for name, reached in steps.items()}
        return {**by_step, "first_token": first["first_served_s"]}

    def attained(self, sent: list[Any]) -> float:
        """The attained share of requests, by their records."""
        recorded(self.system, sent)
        sql = "SELECT avg(attained::int)::float FROM request_record WHERE id = ANY(%s)"
        [(share,)] = self.system.query(sql, [each.id for each in sent])
        return round(share, 3)
