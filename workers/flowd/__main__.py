"""`python -m workers.flowd`: the transfer daemon of this host, set up by environment variables."""

from __future__ import annotations

import os
import sys

from controller.core.errors import ConfigError
from workers.flowd.daemon import run
from workers.flowd.settings import settings_from
from workers.log_lines import log_to_stderr

if __name__ == "__main__":
    log_to_stderr()
    try:
        given = settings_from(os.environ)
    except ConfigError as error:
        sys.exit(f"workers.flowd: {error}")
    sys.exit(run(given))
