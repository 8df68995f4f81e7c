"""A person without a browser: makes what a test needs before it begins, and reads what a page has left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import requests

from tests.browser.running.stack import Stack
from tests.waiting import until

ANSWER_S = 30.0
LOOK_EVERY_S = 0.1
PROFILE = "llama-3.1-8b-a100"
LONG = 7000  # output tokens: minutes on the emulated engine


class Caller:
    """Somebody of a role, signed in. A change carries the token; an answer that is no success is an error."""

    def __init__(self, stack: Stack, role: str) -> None:
        self._base, self._session = stack.console, requests.Session()
        name, password = stack.person(role)
        self._session.get(f"{self._base}/login/", timeout=ANSWER_S)
        form = {"username": name, "password": password, "csrfmiddlewaretoken": self._token()}
        self._session.post(f"{self._base}/login/", data=form, timeout=ANSWER_S).raise_for_status()

    def _token(self) -> str:
        return next(cookie.value or "" for cookie in self._session.cookies if "csrf" in cookie.name)

    def get(self, path: str, **query: Any) -> Any:
        """What lies below /api/v1/."""
        answer = self._session.get(f"{self._base}/api/v1/{path}", params=query, timeout=ANSWER_S)
        answer.raise_for_status()
        return answer.json()

    def first(self, path: str, **query: Any) -> dict[str, Any]:
        """Of a list, the first one that fits; an AssertionError if none does."""
        items: list[dict[str, Any]] = self.get(path, **query)["items"]
        assert items, f"{path} has none of {query}"
        return items[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        head = {"X-CSRFToken": self._token()}
        answer = self._session.post(f"{self._base}/api/v1/{path}", json=body, headers=head, timeout=ANSWER_S)
        assert answer.ok, answer.text
        return answer.json()

    def delete(self, path: str, version: int) -> None:
        head = {"X-CSRFToken": self._token(), "If-Match": f'"{version}"'}
        answer = self._session.delete(f"{self._base}/api/v1/{path}", headers=head, timeout=ANSWER_S)
        assert answer.ok, answer.text

    def submit(self, path: str, form: dict[str, str]) -> str:
        """Sends a form of a page; the path of the page it led to."""
        form = {**form, "csrfmiddlewaretoken": self._token()}
        answer = self._session.post(f"{self._base}{path}", data=form, timeout=ANSWER_S)
        answer.raise_for_status()
        return answer.url.removeprefix(self._base)

    def page(self, path: str) -> str:
        answer = self._session.get(f"{self._base}{path}", timeout=ANSWER_S)
        answer.raise_for_status()
        return answer.text

    def recorded(self, kind: str, **query: Any) -> list[dict[str, Any]]:
        """Decisions of this kind, newest first."""
        found: list[dict[str, Any]] = self.get("decisions", kind=kind, **query)["items"]
        return found


def within(seconds: float, holds: Callable[[], Any]) -> None:
    until(holds, seconds, every_s=LOOK_EVERY_S)


def engine_of_its_own(caller: Caller, name: str, **spec: Any) -> str:
    """A model `name` with one engine that takes one request at a time. No scaling policy looks after it."""
    instance = f"{name}-1"
    caller.post("models", {"name": name, "context_tokens": 8192})
    body = {"id": instance, "model": name, "backend": "reference", "provisioner": "process", "max_num_seqs": 1}
    caller.post("instances", {**body, "spec": {"profile": PROFILE, **spec}})
    within(60, lambda: caller.get(f"instances/{instance}")["observed_state"] == "ready")
    return instance


def end_engines(caller: Caller, model: str) -> None:
    """Those that a test is done with, and their scaler: they would take processor time from all tests after it."""
    for each in caller.get("scaling-policies", model=model)["items"]:
        caller.delete(f"scaling-policies/{each['id']}", each["version"])
    for each in caller.get("instances", model=model, live="true")["items"]:
        caller.post(f"instances/{each['id']}/stop", {"version": each["version"]})


@contextmanager
def busy(stack: Stack, model: str) -> Iterator[None]:
    """One request runs at the model's engine until this ends; its client then goes away."""
    body: dict[str, Any] = {"model": model, "prompt": "Go on.", "max_tokens": LONG, "slo_class": "batch"}
    body |= {"stream": True, "ignore_eos": True}  # else the engine ends when it likes
    with stack.ask(body, stream=True) as answer:
        assert answer.status_code == 200, answer.text
        lines = answer.iter_lines()  # held: one that is dropped closes the connection
        next(lines)
        yield
