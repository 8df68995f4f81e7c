"""`python -m workers.settings_check`: reads every setting and builds the scheduler from them, before anything starts.

`make up` runs it before the first server, and each gateway before it listens. An error is one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from controller.core.errors import ConfigError
from controller.dispatch import build_dispatcher, build_migrator
from workers.http.limits import LIMITS, read_limits
from workers.http.outbound import rules

REFUSED = 2  # exit code


def require_settings() -> None:
    """Load Django's settings. Raises ConfigError with the variable, the error and the valid values."""
    from django.conf import settings
    from django.core.exceptions import ImproperlyConfigured

    try:
        policy, overrides = settings.DISPATCH_POLICY, settings.DISPATCH_OVERRIDES
    except ImproperlyConfigured as error:
        raise ConfigError(_one_line(error)) from error
    require_dispatcher(policy, overrides)
    for server in LIMITS:
        read_limits(server)
    rules()


def require_dispatcher(policy: str, overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError naming DISPATCH_POLICY or DISPATCH_OVERRIDES if no scheduler can be built from them."""
    try:
        build_dispatcher(policy, overrides)
        build_migrator(policy, overrides)
    except ConfigError as error:
        if error.field == "policy_set":
            raise ConfigError(f"DISPATCH_POLICY: {_one_line(error)}", "DISPATCH_POLICY") from error
        where = f"{error.field}: " if error.field and error.field.rpartition(".")[2] not in str(error) else ""
        raise ConfigError(f"DISPATCH_OVERRIDES: {where}{_one_line(error)}", "DISPATCH_OVERRIDES") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    try:
        require_settings()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
