"""Both ways of reading and writing small messages understand each other."""

from __future__ import annotations

import importlib
import sys

import orjson
import pytest

from workers import small_json


def test_without_orjson_messages_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    message = {"op": "take", "size": 1 << 40, "due_in_s": 0.25, "names": ["ü", None, True]}
    monkeypatch.setitem(sys.modules, "orjson", None)
    try:
        plain = importlib.reload(small_json)
        raw = plain.dumps(message)
        assert raw == orjson.dumps(message).replace("ü".encode(), b"\\u00fc")
        assert plain.loads(orjson.dumps(message)) == orjson.loads(raw) == message
        with pytest.raises(ValueError, match="JSON"):
            plain.dumps({"seconds": float("inf")})
        for wrong in (b"{", b"\xff", b"[" * 100_000):
            with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
                plain.loads(wrong)
    finally:
        monkeypatch.undo()
        importlib.reload(small_json)
