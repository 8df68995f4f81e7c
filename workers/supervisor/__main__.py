"""`python -m workers.supervisor up|down`, which `make up` and `make down` run."""

from __future__ import annotations

import argparse
import os
import sys

from controller.core.errors import ConfigError
from workers.supervisor.announce import forget_unwritten, write
from workers.supervisor.ownership import stop_owner
from workers.supervisor.settings import settings_from
from workers.supervisor.supervisor import up

DOWN_TIMEOUT_S = 90.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.supervisor", description=__doc__)
    parser.add_argument("command", choices=("up", "down"))
    command = parser.parse_args().command
    try:
        settings = settings_from(os.environ)
        if command == "down":
            write(stop_owner(settings.data_dir, DOWN_TIMEOUT_S), sys.stdout)
            return 0
        return up(settings)
    except ConfigError as error:
        write(f"make {command}: {error}", sys.stderr)
        return 1
    finally:
        forget_unwritten()


if __name__ == "__main__":
    sys.exit(main())
