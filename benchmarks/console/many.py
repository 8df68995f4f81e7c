"""A console alone over the benchmark's data: `python -m benchmarks.console.many` for a look at a fleet of 200.

Nothing serves: instances, records and the gateway's message are those of `bench-console`. It prints one line of JSON
(`url`, `name`, `password`) once it answers, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request

from benchmarks.console.pages import published, servers
from benchmarks.servers.engines import stop_on_sigterm
from workers.supervisor.ports import free_port

PERSON = "operator"
READY_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console.many", description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--records", type=int, default=20_000)
    chosen = parser.parse_args()
    stop_on_sigterm()
    with servers():
        _serve(chosen.records, chosen.instances)


def _serve(records: int, instances: int) -> None:
    from django.contrib.auth.models import Group, User
    from django.core.management import call_command

    from benchmarks.console.data import fill

    call_command("migrate", verbosity=0)
    fill(records, 2_000, instances, hours=2.0)
    password = secrets.token_urlsafe(9)
    User.objects.create_user(PERSON, password=password).groups.add(Group.objects.get_or_create(name=PERSON)[0])
    port = free_port()
    server = ("--http", "console.server:Protocol", "--ws", "console.server:WebSocket")
    command = ("-m", "uvicorn", "console.asgi:application", *server, "--host", "127.0.0.1", "--port", str(port))
    told = {**os.environ, "ALLOWED_HOSTS": "127.0.0.1"}
    console = subprocess.Popen(
        [sys.executable, *command, "--log-level", "warning"], env=told, stdout=subprocess.DEVNULL
    )
    try:
        with published(instances):
            url = f"http://127.0.0.1:{port}"
            _until_it_answers(f"{url}/healthz")
            print(json.dumps({"url": url, "name": PERSON, "password": password}), flush=True)
            sys.stdin.read()
    finally:
        console.terminate()
        console.wait()


def _until_it_answers(url: str) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, and says that something is missing: no worker runs here
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main()
