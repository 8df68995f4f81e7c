"""`python -m api.openai --port 8080`: one gateway. Its settings are Django's (see docs); flags say where it listens.

With `--snapshot FILE` it runs alone: configuration from the file, records into its spool, no PostgreSQL and no Redis.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from api.openai.app import OpenAIApp
from api.openai.gateway import GatewayOptions
from api.openai.protocol.schemas import allow_media
from api.openai.server import GatewayServer
from api.openai.service import GatewayService, Store
from api.openai.state.spool import RecordBounds
from api.openai.tenants import QueueBounds
from controller.core.errors import ConfigError
from workers.http.limits import HttpLimits, raise_file_limit, read_limits
from workers.http.protocol import bounded
from workers.settings_check import REFUSED, require_settings

GRACE_S = 20  # how long running requests may take to finish after SIGTERM
# Rare full collections: with 10,000 requests queued one stops the loop for tens of milliseconds.
GC_THRESHOLDS = (20_000, 20, 50)
SWITCH_S = 0.001  # the loop gets the interpreter back from threads that write records within a millisecond


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    os.environ["SLACKLINE_ROLE"] = "gateway"
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    import django
    from django.conf import settings

    try:
        require_settings()
    except ConfigError as error:
        return _refused(error)
    django.setup()
    allow_media(settings.MEDIA_HOSTS)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # imported modules stay, so that no collection looks at them again
    gc.set_threshold(*GC_THRESHOLDS)
    name = arguments.name or f"gateway-{socket.gethostname()}-{arguments.port}"
    options = GatewayOptions(
        name,
        settings.DISPATCH_POLICY,
        settings.DISPATCH_OVERRIDES,
        token_pacing=settings.TOKEN_PACING,
        salt_key=settings.SECRET_KEY.encode(),
        queue=QueueBounds(settings.QUEUE_BODY_MIB << 20, settings.TENANT_QUEUE_SHARE),
        records=RecordBounds(
            buffer_bytes=settings.RECORDS_BUFFER_MIB << 20, spool_bytes=settings.RECORDS_SPOOL_MIB << 20
        ),
        config_max_age_s=settings.CONFIG_MAX_AGE_S,
        metrics_token=settings.METRICS_TOKEN,
        scheduler_log=arguments.scheduler_log,
    )
    alone = arguments.snapshot is not None
    store = _store(arguments.snapshot)
    service = GatewayService(options, store, settings.DATA_DIR, None if alone else settings.REDIS_URL)
    try:
        serve(service, arguments.host, arguments.port, raise_file_limit(read_limits("gateway")))
    except ConfigError as error:
        return _refused(error)
    return 0


def _refused(error: ConfigError) -> int:
    print(f"gateway: {error}", file=sys.stderr)
    return REFUSED


def serve(service: GatewayService, host: str, port: int, limits: HttpLimits) -> None:
    protocol = bounded(limits)
    service.connections = protocol.book
    config = uvicorn.Config(
        OpenAIApp(service.start, service.stop, limits.body_bytes),
        host=host,
        port=port,
        loop="uvloop",
        http=protocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # client addresses are not used, and reading them costs a layer around each request
        backlog=8192,
    )
    server = GatewayServer(config, service, GRACE_S)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after an orderly end
        server.run()
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def _store(snapshot: Path | None) -> Store:
    if snapshot is None:
        from api.openai.state.storage import Database

        return Database()
    from api.openai.state.standalone import FileStore

    return FileStore(snapshot)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m api.openai", description="Slackline's data path.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--name", help="id of this gateway (default: from host and port)")
    parser.add_argument("--snapshot", type=Path, help="run alone from a configuration file")
    parser.add_argument(
        "--scheduler-log", type=Path, metavar="FILE", help="record what the scheduler is told and answers, for a replay"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
