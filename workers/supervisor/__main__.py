"""`python -m workers.supervisor up|down`: what `make up` and `make down` run."""

from __future__ import annotations

import argparse
import os
import sys

from controller.core.errors import ConfigError
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
            print(stop_owner(settings.data_dir, DOWN_TIMEOUT_S))
            return 0
        return up(settings)
    except ConfigError as error:
        print(f"make {command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
