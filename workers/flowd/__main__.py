"""`python -m workers.flowd`: the transfer daemon of this host, set up by environment variables."""

from __future__ import annotations

import logging
import os
import sys

from controller.core.errors import ConfigError
from workers.flowd.daemon import run
from workers.flowd.settings import settings_from

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        given = settings_from(os.environ)
    except ConfigError as error:
        sys.exit(f"workers.flowd: {error}")
    sys.exit(run(given))
