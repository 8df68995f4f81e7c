"""What the addresses of pages name, found or made once a session: a request, a decision, an experiment and so on."""

from __future__ import annotations

import re

from tests.browser.running.caller import Caller, within
from tests.browser.running.stack import Stack

Places = dict[str, str]
SIMULATED_S = 120.0


def places_of(stack: Stack, caller: Caller, instance: str) -> Places:
    """`instance`: one that stays as it is."""
    found: Places = {"request": asked(stack, caller), "missed": missed(stack, caller), "instance": instance}
    for name, path, query in (
        ("class", "slo-classes", {"name": "interactive"}),
        ("mapping", "priority-mappings", {}),
        ("tenant", "tenants", {"name": "demo"}),
        ("policy", "scaling-policies", {"model": "demo"}),
        ("template", "launch-templates", {"name": "vllm"}),
        ("key", "api-keys", {}),
        ("decision", "decisions", {"kind": "slo_class_created"}),
    ):
        found[name] = str(caller.first(path, **query)["id"])
    found |= program_of(caller)
    found["workflow"] = of_two_steps(stack, caller)
    found["experiment"] = simulated(caller)
    found["trace"] = caller.first("traces")["slug"]
    return found


def program_of(caller: Caller) -> Places:
    """A service account with a token, which only pages can make."""
    path = caller.submit("/service-accounts/new/", {"name": "deployer", "role": "viewer", "scopes": "read"})
    caller.submit(f"{path}tokens/", {"days": "90"})
    tokens = re.findall(r"/service-tokens/(\d+)/revoke/", caller.page(path))
    return {"account": path.strip("/").split("/")[1], "token": tokens[0]}


def asked(stack: Stack, caller: Caller) -> str:
    """Id of a request that is on record, served and streamed."""
    body = {"model": stack.credentials["model"], "prompt": "Hello", "max_tokens": 20, "stream": True}
    answer = stack.ask(body)
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-slackline-request-id"]
    within(20, lambda: caller.get("requests", id=request_id)["items"])
    return request_id


def of_two_steps(stack: Stack, caller: Caller) -> str:
    """Id of a workflow that is open, with two requests on record."""
    name = "report-places"
    more = {"workflow_deadline": 7200, "workflow_steps_left": 2}
    for stage in ("plan", "write"):
        metadata = {"workflow_id": name, "stage": stage}
        body = {"model": stack.credentials["model"], "prompt": "Hello", "max_tokens": 20, "metadata": metadata, **more}
        stack.ask(body).raise_for_status()
    query = {"tenant": "demo", "workflow_id": name}
    within(20, lambda: len(caller.get("workflows/by-id", **query)["items"]) == 2)
    return name


def missed(stack: Stack, caller: Caller) -> str:
    """Id of one that missed; of one that was served, if there is any."""
    query = {"attained": "false", "slo_class": "interactive"}
    for each in stack.send(4, slo_class="interactive", target_ttft=0.001, max_tokens=20):
        each.result()
    within(20, lambda: caller.get("requests", **query)["items"])
    found = caller.get("requests", **query)["items"]
    return str(next((each for each in found if each["outcome"] == "ok"), found[0])["id"])


def simulated(caller: Caller) -> str:
    """Slug of an experiment that is done: the last hour with one fewer instance."""
    path = caller.submit("/experiments/ask/", {"window": "hour", "change": "less"})
    slug = path.strip("/").split("/")[1]
    within(SIMULATED_S, lambda: caller.get(f"simulations/{slug}")["state"] not in ("queued", "running"))
    assert caller.get(f"simulations/{slug}")["state"] == "done"
    return slug
