"""Calls to the launcher of an engine (`workers.ray.launcher`), which listens one port above the engine.

They are made at the same time for all engines, in the event loop of this process (`workers.http.call_loop`), and each
may be made twice: a lease is renewed again, and of two ends the earlier applies."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import requests

from workers.http import kept_calls, outbound
from workers.http.fleet_proof import made_key
from workers.ray.launcher import ports_of
from workers.ray.launches import control_token

TIMEOUT_S, FIND_S = 1.5, 0.5


class LauncherGone(Exception):
    """Nothing listens there: the launcher has ended, and its engine with it."""


class LauncherUnreachable(Exception):
    """The launcher does not answer; the text says how."""


class Stranger(LauncherUnreachable):
    """Something else listens there."""


async def control_port(instance: str, made: str, host: str, fleet_token: str) -> int | None:
    """Where the launcher of the instance listens on this host; None: nowhere yet. Raises LauncherUnreachable if a
    port does not answer and the launcher is at no other."""
    wanted = hashlib.sha256(control_token(fleet_token, instance, made).encode()).hexdigest()
    doubt: LauncherUnreachable | None = None
    for port in ports_of(instance):
        try:
            said = await _answer("GET", host, port + 1, "/whose", timeout_s=FIND_S)
        except (LauncherGone, Stranger):
            continue
        except LauncherUnreachable as error:
            doubt = doubt or error
            continue
        if said.get("token_sha256") == wanted:
            return port + 1
    if doubt is not None:
        raise doubt
    return None


@dataclass(frozen=True, slots=True)
class LauncherClient:
    """`made`: when the instance's row was made; `port`: its control port. Raises LauncherGone, LauncherUnreachable.

    A status tells the age of the engine (`age_s`), which it had at `asked_at` (epoch seconds by our clock) or later. So
    the start of one engine is never found to be later than it was, however long its launcher takes to answer."""

    instance: str
    made: str
    host: str
    port: int
    fleet_token: str = field(repr=False)

    async def lease(self) -> dict[str, Any]:
        """Renew; the first renewal starts the engine. Its status."""
        told = {"host": self.host, "key": made_key(self.fleet_token, self.instance)}
        return await self._call("POST", "/lease", told)

    async def status(self) -> dict[str, Any]:
        return await self._call("GET", "/status")

    async def end(self, wait_s: float, grace_s: float) -> dict[str, Any]:
        """End the engine in `wait_s`, with `grace_s` for its requests."""
        return await self._call("POST", "/end", {"wait_s": wait_s, "grace_s": grace_s})

    async def log(self) -> dict[str, Any]:
        return await self._call("GET", "/log")

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {control_token(self.fleet_token, self.instance, self.made)}"}
        asked_at = time.time()
        return {**await _answer(method, self.host, self.port, path, body, headers), "asked_at": asked_at}


async def _answer(
    method: str,
    host: str,
    port: int,
    path: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Raises LauncherGone or LauncherUnreachable."""
    where, shown = f"{host}:{port}", f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}{path}"
    try:
        answer = await kept_calls.request(method, url, json=body, headers=headers, timeout_s=timeout_s, repeatable=True)
        said = answer.json() if answer.status_code == 200 else None
    except requests.ConnectionError as error:
        if kept_calls.nobody_listens(error):
            raise LauncherGone(f"nothing listens at {where}") from error
        why = outbound.REFUSED if outbound.REFUSED in str(error) else type(error).__name__
        raise LauncherUnreachable(f"its launcher at {where} cannot be reached: {why}") from error
    except requests.Timeout as error:
        raise LauncherUnreachable(f"its launcher at {where} does not answer: {type(error).__name__}") from error
    except (requests.RequestException, ValueError) as error:
        raise Stranger(f"what answers at {where} is no launcher: {type(error).__name__}") from error
    if not isinstance(said, dict):
        raise Stranger(f"what answers at {where} is no launcher of ours (status {answer.status_code})")
    return said
