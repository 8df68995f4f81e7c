"""From an instance to a job of the Jobs REST: the launcher as text, its order, and what the job takes of its node."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError
from controller.engine.placement import CPUS, GPUS, MEMORY
from controller.engine.runtime_env import RUNTIME_ENV
from controller.engine.start_steps import patterns
from workers.http.fleet_proof import keyed
from workers.ray import launcher

LEASE_S = 600.0  # workers may be away this long, and engines go on
ORPHAN_S = 20.0  # of an engine whose job was lost, and that no worker can reach
FIRST_LEASE_S = 120.0  # until a worker has called the launcher
OWNER, ROW = "slackline", "slackline_row"  # names of a job's metadata


def owner_of(fleet_token: str) -> str:
    """By which a Slackline knows its own jobs. It does not tell the token."""
    return keyed(fleet_token, "ray owner")[:24]


def control_token(fleet_token: str, instance: str, made: str) -> str:
    """What calls to the launcher of an instance show. `made`: when its row was made, so that the launcher of an earlier
    instance of the same id is another one."""
    return keyed(fleet_token, "ray launcher", instance, made)


def job_of(id: str, spec: Mapping[str, object], fleet_token: str, made: str) -> dict[str, Any]:
    """The body of a submission. `spec`: as `instance_spec` makes it. `made`: when the instance's row was made, which
    tells it from an earlier instance of the same id. Raises ConfigError without a launch template."""
    launch, placed = spec.get("launch"), spec.get("placement")
    if not isinstance(launch, Mapping):
        raise ConfigError(f"instance {id}: a cluster starts engines from a launch template only", "template")
    order = {
        "id": id,
        "token_sha256": hashlib.sha256(control_token(fleet_token, id, made).encode()).hexdigest(),
        **{"lease_s": LEASE_S, "orphan_s": ORPHAN_S, "first_lease_s": FIRST_LEASE_S},
        **{name: launch[name] for name in ("command", "environment", "secrets", "health_path", "key_variable")},
        "steps": patterns(str(launch.get("backend", ""))),
    }
    text = base64.b64encode(json.dumps(order).encode()).decode()
    resources = dict(placed.get("resources", {})) if isinstance(placed, Mapping) else {}
    labels = dict(placed.get("labels", {})) if isinstance(placed, Mapping) else {}
    taken = {
        "entrypoint_num_cpus": resources.pop(CPUS, None),
        "entrypoint_num_gpus": resources.pop(GPUS, None),
        "entrypoint_memory": int(resources.pop(MEMORY)) if MEMORY in resources else None,
        "entrypoint_resources": resources or None,
        "entrypoint_label_selector": labels or None,
    }
    return {
        "submission_id": id,
        "entrypoint": f"SLACKLINE_ORDER={text} exec python3 -c {_program()}",
        "metadata": {OWNER: owner_of(fleet_token), ROW: made},
        **{name: spec[name] for name in (RUNTIME_ENV,) if name in spec},
        **{name: value for name, value in taken.items() if value is not None},
    }


@cache
def _program() -> str:
    """The launcher as one argument of a shell's line: base64 has no character that a shell reads."""
    packed = base64.b64encode(zlib.compress(Path(launcher.__file__).read_bytes(), 9)).decode()
    return f"\"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))\""
