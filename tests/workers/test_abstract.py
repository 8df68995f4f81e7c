"""What a subclass must say for itself is asked for when one is made, not when it is used."""

from __future__ import annotations

from typing import Any

import pytest

from workers.backends.http import HttpBackend
from workers.engine.http.generate import Format
from workers.supervisor.embedded import _Server


@pytest.mark.parametrize(
    ("base", "missing"), [(HttpBackend, {"body_of"}), (Format, {"message"}), (_Server, {"ready", "_command"})]
)
def test_what_lacks_it_cannot_be_made(base: type[Any], missing: set[str]) -> None:
    assert set(getattr(base, "__abstractmethods__", ())) == missing
    with pytest.raises(TypeError, match="abstract"):
        type("Lacking", (base,), {})()
