"""What many browsers see is shaped once, and only while somebody may still want it."""

from __future__ import annotations

import orjson

from console.consumers.overview import Shared


def test_one_state_is_made_once_for_all():
    shared, made = Shared(kept=2), []

    def make():
        made.append(1)
        return {"queued": 7}

    frames = [orjson.dumps({"data": shared.get(("gateway-1", 1.0), make)}) for _ in range(100)]
    assert len(made) == 1
    assert set(frames) == {b'{"data":{"queued":7}}'}


def test_old_states_are_dropped():
    shared, made = Shared(kept=2), []
    for key in (1, 2, 3, 3, 1):
        shared.get(key, lambda key=key: made.append(key))
    assert made == [1, 2, 3, 1]
