"""Messages of `make up` on the terminal: progress, components that are not ready and why, and the addresses at the
end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from workers.http.details import bearer
from workers.supervisor.own_calls import opened
from workers.supervisor.ports import HOST
from workers.supervisor.settings import Settings

REMIND_EVERY_S = 15.0
ASK_EVERY_S = 0.5
STARTS_WITHIN_S = 600  # most engines: the request that `make up` prints waits so long


def say(line: str, log: Path | None = None) -> None:
    """Print a line with the time. If the terminal or the reader of its pipe is gone, append it to `log` instead.

    Never raises, since a message must not end the loop or interrupt a stop.
    """
    write(f"{time.strftime('%H:%M:%S')} {line}", sys.stdout, log)


def write(text: str, to: TextIO, log: Path | None = None) -> None:
    """Print to `to`; if that fails, append to `log`; if that fails too, drop the text. Never raises."""
    try:
        print(text, file=to, flush=True)
    except (OSError, ValueError):  # a closed pipe or terminal; a closed file object
        if log is not None:
            with contextlib.suppress(OSError):
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a") as file:
                    file.write(f"{text}\n")


def forget_unwritten() -> None:
    """Drop output that a closed terminal did not take. At exit the interpreter would try to write it again, fail, and
    change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Readiness:
    """Polls the console's /healthz until everything was ready once; degraded, with fewer instances, is not enough."""

    def __init__(self, console_port: int, log: Path | None = None, token: str = "") -> None:
        self.log = log
        self._token = token
        self.url = f"http://{HOST}:{console_port}/healthz"
        self.done = False
        self._ask_at = 0.0
        self._remind_at = time.monotonic() + REMIND_EVERY_S

    def became_ready(self) -> bool:
        """True only for the call that first saw everything ready."""
        if self.done or time.monotonic() < self._ask_at:
            return False
        self._ask_at = time.monotonic() + ASK_EVERY_S
        status, body = fetch(self.url, headers=bearer(self._token))
        self.done = status == 200 and body.get("status", "ok") == "ok"
        if not self.done and time.monotonic() > self._remind_at:
            self._remind_at = time.monotonic() + REMIND_EVERY_S
            say(f"not ready yet: {waiting_for(body) if status else 'the console does not respond'}", self.log)
        return self.done


def fetch(
    url: str, timeout_s: float = 2.0, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, dict[str, Any]]:
    """Status and JSON object of a GET request; (0, {}) without a response."""
    try:
        with opened(url, headers, timeout_s) as answer:
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
    """The components that are not ready, from the body of /healthz, such as "engines: 1/2, beat: down"."""
    parts = []
    for name, component in (health.get("components") or {}).items():
        if component.get("state") != "ok":
            parts.append(f"{name}: {component.get('detail') or component.get('state')}")
    return ", ".join(parts) or "unknown"


def welcome(settings: Settings) -> None:
    credentials = _credentials(settings)
    gateway, console = settings.gateway_url, settings.console_url
    body = {"model": credentials.get("model", "demo"), "prompt": "Hello", "max_tokens": 16}
    note = ""
    if settings.model:  # with which `make up` was called, so this is what is wanted; it is not waited for
        body |= {"model": Path(settings.model).expanduser().resolve().name, "waiting_time": STARTS_WITHIN_S}
        note = (
            f"\n  The engine of {body['model']} may still be starting: Fleet shows its steps, and this request waits.\n"
        )
    key = credentials.get("api_key", "(create one: POST /api/v1/api-keys)")
    login = f"{credentials.get('operator', '?')} / {credentials.get('operator_password', '?')}"
    if settings.database_url is not None:  # not a demo on one machine: a terminal and its log are read by others
        key, login = "$KEY", f"password and API key ($KEY) are in {settings.credentials}"
    write(
        f"""
Slackline is ready.

  console   {console}    login {login}
  gateway   {gateway}/v1    (OpenAI-compatible)
  API key   {key}

  curl {gateway}/v1/completions -H "Authorization: Bearer {key}" \\
    -H 'Content-Type: application/json' -d '{json.dumps(body)}'
{note}
  logs in {settings.logs}; Ctrl-C (or `make down`) stops everything.
""",
        sys.stdout,
        settings.log,
    )


def _credentials(settings: Settings) -> dict[str, Any]:
    path = settings.credentials
    return _json(path.read_bytes()) if path.exists() else {}
