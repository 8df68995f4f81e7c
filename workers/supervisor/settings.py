"""The settings of `make up`, from environment variables. The supervisor reads them here since it does not load Django.

It passes its values to the processes it starts (`plan.known_environment`), so that all of them use the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from controller.core.errors import ConfigError
from workers.environment import read_variable
from workers.flowd.settings import FlowdSettings
from workers.flowd.settings import settings_from as flow_settings_from
from workers.supervisor.ports import HOST

GATEWAY_PORT = 8080
CONSOLE_PORT = 8000
FLOW_SOCKET = "flowd.sock"  # of the transfer daemon, in the data folder
FLEET_HOST = "local"  # this machine in the console: the demo's host, and what the transfer daemon reports
# SECRET_KEY signs sessions. Engines send KV and weights only to processes that know FLEET_TOKEN.
SECRETS = ("SECRET_KEY", "FLEET_TOKEN")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Settings:
    """`database_url`, `redis_url`: None starts the embedded servers in `data_dir`. `gateway_at`, `console_at`: public
    URLs, for instance behind a proxy; None: the ports of this machine. `model`: folder of a model to serve besides the
    demo, by the launch template `engine`; "": none."""

    data_dir: Path
    gateway_port: int = GATEWAY_PORT
    console_port: int = CONSOLE_PORT
    database_url: str | None = None
    redis_url: str | None = None
    demo_load: bool = True
    gateway_at: str | None = None
    console_at: str | None = None
    metrics_token: str = ""
    model: str = ""
    engine: str = "vllm"
    flows: FlowdSettings = field(default_factory=lambda: flow_settings_from({}))

    @property
    def gateway_url(self) -> str:
        return self.gateway_at or self.own_gateway_url

    @property
    def own_gateway_url(self) -> str:
        return f"http://{HOST}:{self.gateway_port}"

    @property
    def console_url(self) -> str:
        return self.console_at or f"http://{HOST}:{self.console_port}"

    @property
    def logs(self) -> Path:
        return self.data_dir / "logs"

    @property
    def credentials(self) -> Path:
        """Passwords and keys of the demo, which only the owner can read."""
        return self.data_dir / "credentials.json"

    @property
    def log(self) -> Path:
        """The supervisor's own log, used once its terminal is closed."""
        return self.logs / "supervisor.log"

    @property
    def engines(self) -> Path:
        return self.data_dir / "engines"


def settings_from(environ: Mapping[str, str]) -> Settings:
    gateway, console = _port(environ, "GATEWAY_PORT", GATEWAY_PORT), _port(environ, "CONSOLE_PORT", CONSOLE_PORT)
    if gateway == console:
        raise ConfigError(
            f"GATEWAY_PORT and CONSOLE_PORT are both {gateway}: give them different ports", "GATEWAY_PORT"
        )
    hosts = {name.strip() for name in read_variable(environ, "ALLOWED_HOSTS").split(",")} - {""}
    if hosts and not hosts & {HOST, "*"}:
        raise ConfigError(
            f"ALLOWED_HOSTS must contain {HOST}, where `make up` checks whether the console is ready", "ALLOWED_HOSTS"
        )
    data_dir = Path(read_variable(environ, "DATA_DIR") or ".data").expanduser().resolve()
    return Settings(
        data_dir=data_dir,
        gateway_port=gateway,
        console_port=console,
        database_url=read_variable(environ, "DATABASE_URL") or None,
        redis_url=read_variable(environ, "REDIS_URL") or None,
        demo_load=_flag(environ, "DEMO_LOAD", default=True),
        gateway_at=read_variable(environ, "GATEWAY_URL").rstrip("/") or None,
        console_at=read_variable(environ, "CONSOLE_URL").rstrip("/") or None,
        flows=flow_settings_from(environ, str(data_dir / FLOW_SOCKET)),
        metrics_token=read_variable(environ, "METRICS_TOKEN"),
        model=read_variable(environ, "MODEL"),
        engine=read_variable(environ, "ENGINE") or "vllm",
    )


def kept_secret(name: str, data_dir: Path, environ: Mapping[str, str]) -> str:
    """The secret from the environment. Otherwise it is generated once and kept in the data folder, readable by its
    owner only, so that sessions survive a restart."""
    if value := read_variable(environ, name):
        return value
    path = data_dir / name.lower()
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(48))
    return path.read_text().strip()


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    raw = read_variable(environ, name) or str(default)
    if not raw.isdecimal() or not 0 < int(raw) < 65536:
        raise ConfigError(f"{name} is {raw!r}: a port is a number from 1 to 65535", name)
    return int(raw)


def _flag(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    raw = read_variable(environ, name).strip().lower()
    if not raw:
        return default
    if raw not in _TRUE | _FALSE:
        raise ConfigError(f"{name} is {raw!r}: use 1 or 0", name)
    return raw in _TRUE
