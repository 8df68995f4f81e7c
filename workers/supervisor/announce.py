"""What the person at the terminal reads: progress, what is not ready and why, and where to go once all is."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from workers.supervisor.ports import HOST
from workers.supervisor.settings import Settings

REMIND_EVERY_S = 15.0
ASK_EVERY_S = 0.5


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class Readiness:
    """Asks the console's /healthz until it answers 200 once."""

    def __init__(self, console_port: int) -> None:
        self.url = f"http://{HOST}:{console_port}/healthz"
        self.done = False
        self._ask_at = 0.0
        self._remind_at = time.monotonic() + REMIND_EVERY_S

    def became_ready(self) -> bool:
        """True once: at the call that saw it."""
        if self.done or time.monotonic() < self._ask_at:
            return False
        self._ask_at = time.monotonic() + ASK_EVERY_S
        status, body = fetch(self.url)
        self.done = status == 200
        if not self.done and time.monotonic() > self._remind_at:
            self._remind_at = time.monotonic() + REMIND_EVERY_S
            say(f"not ready yet: {waiting_for(body) if status else 'console does not answer'}")
        return self.done


def fetch(url: str, timeout_s: float = 2.0) -> tuple[int, dict[str, Any]]:
    """Status and JSON object; (0, {}) when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, _json(error.read())
    except (OSError, ValueError):
        return 0, {}


def _json(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def waiting_for(health: dict[str, Any]) -> str:
    """ "engines 1/2, beat down" from the body of /healthz."""
    parts = []
    for name, component in (health.get("components") or {}).items():
        if component.get("state") != "ok":
            parts.append(f"{name}: {component.get('detail') or component.get('state')}")
    return ", ".join(parts) or "unknown"


def welcome(settings: Settings) -> None:
    credentials = _credentials(settings)
    gateway, console = f"http://{HOST}:{settings.gateway_port}", f"http://{HOST}:{settings.console_port}"
    body = {"model": credentials.get("model", "demo"), "prompt": "Hello", "max_tokens": 16}
    key = credentials.get("api_key", "(make one: POST /api/v1/api-keys)")
    print(
        f"""
Slackline is ready.

  console   {console}    login {credentials.get("operator", "?")} / {credentials.get("operator_password", "?")}
  gateway   {gateway}/v1    (OpenAI-compatible)
  API key   {key}

  curl {gateway}/v1/completions -H 'Authorization: Bearer {key}' \\
    -H 'Content-Type: application/json' -d '{json.dumps(body)}'

  logs in {settings.logs}; Ctrl-C (or `make down`) stops everything.
""",
        flush=True,
    )


def _credentials(settings: Settings) -> dict[str, Any]:
    path = settings.data_dir / "credentials.json"
    return _json(path.read_bytes()) if path.exists() else {}
