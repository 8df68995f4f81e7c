"""Server time and queries of every page of the console over a large database, in this process."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.console.addresses import AddressLook, addresses, prepare
from benchmarks.console.preview import previews
from benchmarks.load.trials import note
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis

WARM_LOOKS = 5
PERIOD_S = 1.0

Figures = dict[str, dict[str, Any]]


def measure(records: int, decisions: int, instances: int) -> tuple[Figures, Figures]:
    """Pages, and previews by simulation (benchmarks/console/preview.py) on the same database.

    By page: `cold_ms` (first look after a start), `warm_ms` and `cpu_ms` (medians; CPU time without PostgreSQL's),
    `queries`, `status`, `kb`.
    """
    with servers():
        return _pages(records, decisions, instances)


@contextmanager
def servers() -> Iterator[None]:
    """PostgreSQL and Redis of their own, and this process set up to use them."""
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL may run as another user
        postgres, redis = EmbeddedPostgres(folder), EmbeddedRedis(folder)
        postgres.start()
        try:
            redis.start()
            set_up(folder, postgres.url, redis.url)
            yield
        finally:
            redis.stop()
            postgres.stop()


def set_up(folder: Path, database_url: str, redis_url: str) -> None:
    """This process as a console on them; called once, before anything of Django is imported."""
    os.environ |= {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "DATA_DIR": str(folder),
        "SECRET_KEY": "x" * 40,
        "SLACKLINE_ROLE": "console",
        "ALLOWED_HOSTS": "testserver",
        "LOG_LEVEL": "ERROR",
        "DJANGO_SETTINGS_MODULE": "console.settings",
    }
    import django
    from django.conf import settings

    options = settings.DATABASES["default"]["OPTIONS"]
    options["options"] = "-c statement_timeout=0"  # filling takes longer than any page may
    django.setup()
    from controller.postgres.bounded import BoundedConnection

    BoundedConnection.patience_s = 900.0


def _pages(records: int, decisions: int, instances: int) -> tuple[Figures, Figures]:
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client

    from benchmarks.console.data import fill
    from console.warm_up import warm

    started = time.monotonic()
    call_command("migrate", verbosity=0)
    fill(records, decisions, instances)
    note(f"{records} records, {decisions} decisions, {instances} instances in {time.monotonic() - started:.0f} s")
    prepare()
    warm()  # as console/asgi.py does at the start
    client = Client(raise_request_exception=True)
    client.force_login(User.objects.create_superuser("benchmark"))
    found = {}
    with published(instances):
        for name, look in addresses().items():
            found[name] = _look(client, look)
            note(f"{name:<28} {found[name]}")
    return found, previews()


def _look(client: Any, look: AddressLook) -> dict[str, Any]:
    from django.db import connection

    queries: list[str] = []

    def counted(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        queries.append(sql)
        return execute(sql, params, many, context)

    times, cpu = [], []
    for _ in range(WARM_LOOKS + 1):
        queries.clear()
        started, busy = time.perf_counter(), time.process_time()
        with connection.execute_wrapper(counted):
            answer = client.get(look.path) if look.posted is None else client.post(look.path, look.posted)
        times.append(1e3 * (time.perf_counter() - started))
        cpu.append(1e3 * (time.process_time() - busy))
    content = b"".join(answer.streaming_content) if answer.streaming else answer.content
    return {
        "cold_ms": round(times[0], 1),
        "warm_ms": round(statistics.median(times[1:]), 1),
        "cpu_ms": round(statistics.median(cpu[1:]), 1),
        "queries": len(queries),
        "status": answer.status_code,
        "kb": round(len(content) / 1024),
    }


@contextmanager
def published(instances: int) -> Iterator[None]:
    """A gateway's fleet message of that size in Redis, written every second, as pages expect it."""
    import orjson
    import redis
    from django.conf import settings

    from controller.core.messages import FLEET_KEY, GATEWAYS_KEY

    client, done = redis.Redis.from_url(settings.REDIS_URL), threading.Event()

    def publish() -> None:
        while True:
            client.sadd(GATEWAYS_KEY, "benchmark")
            client.set(FLEET_KEY.format(gateway="benchmark"), orjson.dumps(_fleet(instances)), ex=60)
            if done.wait(PERIOD_S):
                return

    thread = threading.Thread(target=publish)
    thread.start()
    time.sleep(0.2)
    try:
        yield
    finally:
        done.set()
        thread.join()


def _fleet(instances: int) -> dict[str, Any]:
    each = {
        "model": "model-0", "role": "collocated", "state": "up", "running": 12, "waiting": 2, "waiting_tokens": 800,
        "kv_usage": 0.4, "slots": 64, "utilisation": 0.6, "telemetry_age_s": 0.3, "sent_total": 1000,
    }  # fmt: skip
    window = {
        "window_s": 60.0, "finished": 600, "attained": 580, "ttft_met": 585, "tpot_met": 590, "refused": 10,
        "failed": 0,
        "cancelled": 0, "goodput_tokens": 60_000, "target": 0.95, "queued": 3, "oldest_slack_s": 0.2, "ttft_p50_s": 0.2,
        "ttft_p95_s": 0.45, "tpot_p50_s": 0.03, "miss_reason": "slow_first_token",
    }  # fmt: skip
    return {
        "gateway": "benchmark", "at": time.time(), "seq": 1, "period_s": PERIOD_S,
        "instances": [{**each, "id": f"engine-{number:03}"} for number in range(instances)],
        "queued": 60, "queued_tokens": 9000, "in_flight": 400, "arrival_rate": 200.0, "service_rate": 198.0,
        "wait_over_slo": 0.4, "policy": "slackline", "models": {},
        "classes": [{**window, "tenant": f"tenant-{number:02}", "slo_class": name}
                    for number in range(20) for name in ("interactive", "batch")],
    }  # fmt: skip
