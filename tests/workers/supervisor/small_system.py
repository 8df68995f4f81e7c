"""`make up` with sleepers in place of gateway, console, worker and beat, and no servers: the supervisor itself is real.

Run as a program: `python -m tests.workers.supervisor.small_system DATA_DIR`. The worker has a child of its own, as
prefork workers do; the process named `restless` ends at once, so that there is always something to say.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil

from workers.supervisor import announce, plan, supervisor
from workers.supervisor.child import Spec
from workers.supervisor.ports import free_port
from workers.supervisor.settings import Settings

SLEEPER = "import time; time.sleep(120)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"
PROGRAMS = {"gateway": SLEEPER, "console": SLEEPER, "worker": PARENT, "beat": SLEEPER, "restless": "pass"}


def processes_of(folder: Path) -> list[psutil.Process]:
    """All that were told this data folder and run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DATA_DIR") == str(folder) and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


def main(folder: Path) -> int:
    def spec(name: str, code: str) -> Spec:
        env = {**os.environ, "DATA_DIR": str(folder)}
        return Spec(name, (sys.executable, "-c", code), env, folder / "logs" / f"{name}.log", grace_s=2.0)

    announce.REMIND_EVERY_S = announce.ASK_EVERY_S = 0.1
    supervisor.require_database = supervisor.require_redis = lambda url: url
    plan.migrate = lambda env, log: spec("prepare", "pass")
    plan.seed = lambda settings, env, log: spec("prepare", "pass")
    plan.processes = lambda settings, env: [spec(name, code) for name, code in PROGRAMS.items()]
    plan.STOP_ORDER = (("gateway", "restless"), ("beat",), ("worker",), ("console",))
    given = {"database_url": "given", "redis_url": "given", "demo_load": False}
    return supervisor.up(Settings(folder, free_port(), free_port(), **given))


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may be under nohup
    code = main(Path(sys.argv[1]))
    announce.forget_unwritten()
    sys.exit(code)
