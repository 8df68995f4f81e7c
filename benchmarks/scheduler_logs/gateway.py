"""A gateway without PostgreSQL that takes commands from Redis: `... scheduler_logs.gateway PORT SNAPSHOT LOG`.

`python -m api.openai --snapshot` runs without Redis, and so hears of no command.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    port, snapshot, log = sys.argv[1:]
    os.environ["SLACKLINE_ROLE"] = "gateway"
    import django
    from django.conf import settings

    django.setup()
    from api.openai.__main__ import serve
    from api.openai.gateway import GatewayOptions
    from api.openai.service import GatewayService
    from api.openai.state.standalone import FileStore
    from workers.http.limits import raise_file_limit, read_limits

    options = GatewayOptions("logged", settings.DISPATCH_POLICY, settings.DISPATCH_OVERRIDES, scheduler_log=Path(log))
    service = GatewayService(options, FileStore(Path(snapshot)), settings.DATA_DIR, settings.REDIS_URL)
    serve(service, "127.0.0.1", int(port), raise_file_limit(read_limits("gateway")))


if __name__ == "__main__":
    main()
