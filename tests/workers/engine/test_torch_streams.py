"""Each rank's work is on its own device, as far as that can be seen without one: torch.cuda is faked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.engine import torch_follower
from workers.engine.torch_follower import Follower
from workers.engine.torch_group import RankLost
from workers.engine.torch_streams import mark

pytestmark = pytest.mark.torch


def test_a_mark_lies_behind_the_work_of_its_own_device(monkeypatch):
    recorded: list[Any] = []

    class Event:
        def record(self, stream: Any = "that of the current device") -> None:
            recorded.append(stream)

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    device = torch.device("cuda", 1)
    assert not mark(device).query()
    assert recorded == [("stream of", device)]


def test_on_a_cpu_all_is_done():
    assert mark(torch.device("cpu")).query()


@pytest.mark.parametrize(
    ("device", "rank", "expected"),
    [("cuda", 1, ["device 1", "join"]), ("cuda", 3, ["join"]), ("cpu", 1, ["join"])],
    ids=["its own", "not there: said by all", "cpu"],
)
def test_a_rank_is_on_its_device_before_it_meets_the_others(monkeypatch, device, rank, expected):
    done: list[str] = []

    def join(*_: object) -> None:
        done.append("join")
        raise RankLost("the test ends here")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: done.append(f"device {number}"))
    monkeypatch.setattr(torch_follower.dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(torch_follower, "join", join)
    part: Any = SimpleNamespace(device=device, rank=rank, world=4, store_port=1)
    with pytest.raises(RankLost, match="the test ends here"):
        Follower(part, counter=-1)
    assert done == expected
