"""The processes of `make up` other than servers and engines: command lines, environment, order of start and stop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from workers.environment import read_variable
from workers.supervisor.child import Spec, die_with_parent
from workers.supervisor.ports import HOST
from workers.supervisor.settings import FLEET_HOST, Settings

ROOT = Path(__file__).resolve().parent.parent.parent
# The gateway stops early, to drain; what it needs stops later. Engines, Redis and PostgreSQL follow after these.
STOP_ORDER = (("demo-load",), ("gateway",), ("beat",), ("worker", "analysis", "pruning"), ("console",), ("flowd",))
GATEWAY_DRAIN_S = 30.0  # requests in flight have 20 s, their error events 1 s, their records 4 s
# glibc keeps one memory arena for each thread; two are enough here and save tens of MB for each process.
LEAN = {"MALLOC_ARENA_MAX": "2", "PYTHONUNBUFFERED": "1"}
# Each role loads only the parts of Django that it needs.
ROLES = {
    "gateway": "gateway",
    "console": "console",
    "worker": "worker",
    "analysis": "worker",
    "pruning": "worker",
    "beat": "beat",
}
PYTHON = (sys.executable, "-m")
CHECK_TIMEOUT_S = 60.0


def environment(
    settings: Settings, database_url: str, redis_url: str, secrets: Mapping[str, str], base: Mapping[str, str]
) -> dict[str, str]:
    """The environment of every process that `make up` starts. Secrets are passed here and never on a command line."""
    return _with_values(
        {"DATABASE_URL": database_url, "REDIS_URL": redis_url}, known_environment(settings, secrets, base)
    )


def known_environment(settings: Settings, secrets: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """The part of `environment` that is known before the servers run."""
    ours = {
        **LEAN,
        "DATA_DIR": str(settings.data_dir),
        "GATEWAY_PORT": str(settings.gateway_port),
        "CONSOLE_PORT": str(settings.console_port),
        "GATEWAY_URL": settings.gateway_url,
        "CONSOLE_URL": settings.console_url,
        **secrets,
        **({"METRICS_TOKEN": settings.metrics_token} if settings.metrics_token else {}),
        "DJANGO_SETTINGS_MODULE": "console.settings",
        "CELERY_SKIP_CHECKS": "1",  # the checks load every page of the console into worker and beat
    }
    if settings.flows.socket:
        ours["FLOW_SOCKET"] = settings.flows.socket  # engines ask the daemon there
        ours["FLOW_HOST"] = FLEET_HOST
    return _with_values(ours, base)


def _with_values(values: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """`base` with these values. Their `NAME_FILE` variables are removed, since a file would take precedence again."""
    files = {f"{name}_FILE" for name in values}
    return {**{name: value for name, value in base.items() if name not in files}, **values}


def settings_error(env: Mapping[str, str]) -> str:
    """The error in the settings of the Django processes, in one line; "" if there is none."""
    done = subprocess.run(
        [*PYTHON, "workers.settings_check"],
        env={**env, "SLACKLINE_ROLE": "manage"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=CHECK_TIMEOUT_S,
        start_new_session=True,  # Ctrl-C reaches only the supervisor
        preexec_fn=die_with_parent(),
    )
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the settings could not be checked (exit code {done.returncode})"


def processes(settings: Settings, env: Mapping[str, str]) -> list[Spec]:
    """The processes, in the order in which they start."""
    flowd = [_spec(settings, env, "flowd", ("workers.flowd",), 2.0)] if settings.flows.socket else []
    return [
        *flowd,
        _spec(settings, env, "gateway", ("api.openai", "--port", str(settings.gateway_port)), GATEWAY_DRAIN_S),
        _spec(settings, env, "console", console_module(settings.console_port), 8.0),
        _spec(settings, env, "worker", _worker(env, "control,actions"), 10.0),
        # The next start continues an experiment after its last finished run, so a stop need not wait for it.
        _spec(settings, env, "analysis", _worker(env, "analysis"), 2.0),
        _spec(settings, env, "pruning", _worker(env, "pruning"), 2.0),
        _spec(settings, env, "beat", _beat(env, settings.data_dir), 5.0),
    ]


def when_ready(settings: Settings, env: Mapping[str, str]) -> list[Spec]:
    """The processes that start once an engine can serve. Demo traffic before that would show failures."""
    load = ("workers.demo_load", "--url", settings.own_gateway_url)
    return [_spec(settings, env, "demo-load", load, 3.0)] if settings.demo_load else []


def migrate(env: Mapping[str, str], log: Path) -> Spec:
    return _manage(env, log, "migrate", "--no-input")


def seed(settings: Settings, env: Mapping[str, str], log: Path) -> Spec:
    """With the API key of the documentation only in a database of our own: others may reach one that is not."""
    return _manage(env, log, "seed_demo", *(("--demo",) if settings.database_url is None else ()))


def serve_model(settings: Settings, env: Mapping[str, str], log: Path) -> Spec:
    return _manage(env, log, "serve_model", settings.model, "--template", settings.engine)


def _manage(env: Mapping[str, str], log: Path, *command: str) -> Spec:
    # Django's checks would read all pages, which takes longer than most commands; the settings were checked before.
    argv = (sys.executable, str(ROOT / "manage.py"), *command, "--skip-checks")
    return Spec(command[0], argv, {**env, "SLACKLINE_ROLE": "manage"}, log)


def _spec(settings: Settings, env: Mapping[str, str], name: str, module: tuple[str, ...], grace_s: float) -> Spec:
    env = {**env, "SLACKLINE_ROLE": ROLES[name]} if name in ROLES else env
    return Spec(name, (*PYTHON, *module), env, settings.logs / f"{name}.log", grace_s=grace_s)


def console_module(port: int) -> tuple[str, ...]:
    """Module and arguments of the console's server."""
    return (
        *("uvicorn", "console.asgi:application", "--host", HOST, "--port", str(port), "--log-level", "warning"),
        *("--http", "console.server:Protocol", "--ws", "console.server:WebSocket", "--ws-max-size", "65536"),
        *("--loop", "uvloop", "--timeout-graceful-shutdown", "3"),
        *("--ws-per-message-deflate", "false", "--no-access-log", "--no-proxy-headers"),
    )


def _log_level(env: Mapping[str, str]) -> str:
    """The log level for Celery, which sets the level of the root logger itself and ignores Django's settings."""
    return read_variable(env, "LOG_LEVEL") or "INFO"


def _worker(env: Mapping[str, str], queues: str) -> tuple[str, ...]:
    # One prefork child, since time limits do not work with threads, and each child takes memory.
    return (
        *("celery", "-A", "workers.celery:app", "worker", "-P", "prefork", "-c", "1", "-Q", queues),
        *("-l", _log_level(env), "--without-gossip", "--without-mingle", "--without-heartbeat"),
    )


def _beat(env: Mapping[str, str], data_dir: Path) -> tuple[str, ...]:
    return (
        "celery",
        "-A",
        "workers.celery:app",
        "beat",
        "-l",
        _log_level(env),
        "-s",
        str(data_dir / "celerybeat-schedule"),
        "--pidfile=",
    )
