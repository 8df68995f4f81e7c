from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def path() -> Iterator[str]:
    """Short, since the path of a Unix socket may not be long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"{folder}/flowd.sock"
