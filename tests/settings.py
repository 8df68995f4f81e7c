"""console.settings for tests: plain connections, a data folder of its own, cheap passwords.

tests/conftest.py starts PostgreSQL and Redis when the first test needs them, and corrects their addresses then.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

_folder = tempfile.mkdtemp(prefix="slackline-tests-")
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
os.chmod(_folder, 0o755)  # PostgreSQL may have to run as another user below it
os.environ.update(
    {
        "SLACKLINE_ROLE": "manage",
        "DATA_DIR": _folder,
        "SECRET_KEY": "for-tests-only-for-tests-only-for-tests-only",
        "DATABASE_URL": "postgresql://postgres@127.0.0.1:1/slackline",
        "REDIS_URL": "redis://127.0.0.1:1/0",
    }
)

from console.settings import *  # noqa: E402, F403 - after the environment it reads

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
