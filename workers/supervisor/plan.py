"""What `make up` runs besides the servers and the engines: command lines, environment, order of start and stop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from workers.environment import given
from workers.supervisor.child import Spec, die_with_parent
from workers.supervisor.ports import HOST
from workers.supervisor.settings import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
# The gateway goes first, to drain; what it needs goes last. Engines, Redis and PostgreSQL follow after these.
STOP_ORDER = (("demo-load",), ("gateway",), ("beat",), ("worker", "analysis"), ("console",))
GATEWAY_DRAIN_S = 30.0  # running requests have 20 s, their last words 1 s, their records 4 s
# glibc keeps an arena per thread; two are enough here and save tens of MB a process.
LEAN = {"MALLOC_ARENA_MAX": "2", "PYTHONUNBUFFERED": "1"}
# Each loads what its role needs of Django, no more.
ROLES = {"gateway": "gateway", "console": "console", "worker": "worker", "analysis": "worker", "beat": "beat"}
PYTHON = (sys.executable, "-m")
CHECK_TIMEOUT_S = 60.0


def environment(
    settings: Settings, database_url: str, redis_url: str, secrets: Mapping[str, str], base: Mapping[str, str]
) -> dict[str, str]:
    """What every process of ours is told. Deadlines, keys and ports travel here, never in command lines."""
    return _decided({"DATABASE_URL": database_url, "REDIS_URL": redis_url}, told(settings, secrets, base))


def told(settings: Settings, secrets: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """All of `environment` that is known before the servers run."""
    ours = {
        **LEAN,
        "DATA_DIR": str(settings.data_dir),
        "GATEWAY_PORT": str(settings.gateway_port),
        "CONSOLE_PORT": str(settings.console_port),
        "GATEWAY_URL": settings.gateway_url,
        "CONSOLE_URL": settings.console_url,
        **secrets,
        "DJANGO_SETTINGS_MODULE": "console.settings",
        "CELERY_SKIP_CHECKS": "1",  # the checks load every page of the console into worker and beat
    }
    return _decided(ours, base)


def _decided(values: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """`base` with these by value: the file that one of them was read from, or that is not meant, must not win again."""
    files = {f"{name}_FILE" for name in values}
    return {**{name: value for name, value in base.items() if name not in files}, **values}


def refused(env: Mapping[str, str]) -> str:
    """What is wrong with the settings of the Django processes, in one line; "" when nothing is."""
    done = subprocess.run(
        [*PYTHON, "workers.settings_check"],
        env={**env, "SLACKLINE_ROLE": "manage"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=CHECK_TIMEOUT_S,
        start_new_session=True,  # Ctrl-C is the supervisor's
        preexec_fn=die_with_parent(),
    )
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the settings could not be checked (exit code {done.returncode})"


def processes(settings: Settings, env: Mapping[str, str]) -> list[Spec]:
    """In the order of their start."""
    return [
        _spec(settings, env, "gateway", ("api.openai", "--port", str(settings.gateway_port)), GATEWAY_DRAIN_S),
        _spec(settings, env, "console", _console(settings.console_port), 8.0),
        _spec(settings, env, "worker", _worker(env, "control,actions"), 10.0),
        # An experiment in the middle goes on at the next start, from the last run that ended: no need to wait for it.
        _spec(settings, env, "analysis", _worker(env, "analysis"), 2.0),
        _spec(settings, env, "beat", _beat(env, settings.data_dir), 5.0),
    ]


def when_ready(settings: Settings, env: Mapping[str, str]) -> list[Spec]:
    """Started once an engine can serve: traffic before that would show an outage that is none."""
    load = ("workers.demo_load", "--url", settings.own_gateway_url)
    return [_spec(settings, env, "demo-load", load, 3.0)] if settings.demo_load else []


def migrate(env: Mapping[str, str], log: Path) -> Spec:
    return _manage(env, log, "migrate", "--no-input")


def seed(env: Mapping[str, str], log: Path) -> Spec:
    return _manage(env, log, "seed_demo", "--demo")  # the fixed key of the documentation, on loopback


def _manage(env: Mapping[str, str], log: Path, *command: str) -> Spec:
    argv = (sys.executable, str(ROOT / "manage.py"), *command)
    return Spec(command[0], argv, {**env, "SLACKLINE_ROLE": "manage"}, log)


def _spec(settings: Settings, env: Mapping[str, str], name: str, module: tuple[str, ...], grace_s: float) -> Spec:
    told = {**env, "SLACKLINE_ROLE": ROLES[name]} if name in ROLES else env
    return Spec(name, (*PYTHON, *module), told, settings.logs / f"{name}.log", grace_s=grace_s)


def _console(port: int) -> tuple[str, ...]:
    return (
        *("uvicorn", "console.asgi:application", "--host", HOST, "--port", str(port), "--log-level", "warning"),
        *("--http", "httptools", "--loop", "uvloop", "--timeout-graceful-shutdown", "3"),
        *("--ws-per-message-deflate", "false", "--no-access-log"),
    )


def _log_level(env: Mapping[str, str]) -> str:
    """Celery sets the root logger's level itself, whatever Django's settings say."""
    return given(env, "LOG_LEVEL") or "INFO"


def _worker(env: Mapping[str, str], queues: str) -> tuple[str, ...]:
    # One prefork child: it keeps time limits (threads ignore them), and costs one child's memory.
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
