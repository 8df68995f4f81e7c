"""Each rank's work is on its own device, and none of it in a line with what it need not wait for, as far as that can be
seen without a device: torch.cuda is faked."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.engine.torch import follower as torch_follower
from workers.engine.torch import streams as torch_streams
from workers.engine.torch.follower import Follower
from workers.engine.torch.group import RankLost
from workers.engine.torch.streams import OF_THE_LOOP, Purpose, beside, mark

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


# ---- streams that are kept ------------------------------------------------------------------------------------------

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
PURPOSES: tuple[Purpose, ...] = ("kv", "identity", "digests", "copies", "transfer")


class Stream:
    """Of a device; `made` counts all."""

    made: list[Stream]

    def __init__(self, device: torch.device, priority: int) -> None:
        self.device, self.priority = device, priority
        self.waits = 0
        self.passed = self.stuck = False
        Stream.made.append(self)

    def wait_stream(self, other: object) -> None:
        self.waits += 1

    def synchronize(self) -> None:
        self.passed = True

    def query(self) -> bool:
        return not self.stuck


@pytest.fixture
def used(monkeypatch) -> list[Any]:
    """The streams that work was done on, in order."""
    found: list[Any] = []

    @contextmanager
    def on(stream: Any) -> Any:
        found.append(stream)
        stream.passed = False
        yield

    monkeypatch.setattr(Stream, "made", [], raising=False)
    monkeypatch.setattr(torch_streams, "_KEPT", torch_streams.StreamPool())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return found


def test_a_stream_is_made_once_for_a_device_and_a_purpose_however_often_it_is_used(used):
    """Each one that is made is the next of a pool of 32, behind whatever else has it."""
    for number in range(100):
        with beside(FIRST, behind=number % 2 == 0):
            pass
    (kv,) = Stream.made
    assert (used, kv.waits) == ([kv] * 100, 50)
    assert kv.passed, "what was done within is done at the end"
    for _ in range(20):
        for device in (FIRST, SECOND):
            for purpose in PURPOSES:
                with beside(device, behind=False, purpose=purpose):
                    pass
    assert len(Stream.made) == 2 * len(PURPOSES)
    assert used[100] is kv, "what names no purpose moves KV"


def test_what_the_loop_waits_for_is_from_a_pool_of_which_transfers_draw_nothing(used):
    for purpose in PURPOSES:
        with beside(FIRST, behind=False, purpose=purpose):
            pass
    priorities = {purpose: stream.priority for purpose, stream in zip(PURPOSES, Stream.made, strict=True)}
    assert {purpose for purpose in PURPOSES if priorities[purpose] < 0} == OF_THE_LOOP == {"kv", "identity"}


def test_what_goes_on_at_the_same_time_has_a_stream_each_and_both_are_kept(used):
    for _ in range(10):
        with beside(FIRST, behind=True, purpose="transfer"), beside(FIRST, behind=True, purpose="transfer"):
            pass
    assert len(Stream.made) == 2
    assert all(used[at] is not used[at + 1] for at in range(0, 20, 2))


def test_the_stream_of_what_failed_is_kept_too(used):
    for _ in range(5):
        with pytest.raises(ValueError, match="damaged"), beside(FIRST, behind=False):
            raise ValueError("damaged")
    assert len(Stream.made) == 1


def test_a_stream_in_which_what_failed_is_stuck_has_no_owner_any_more(used):
    def cut_off() -> None:
        used[-1].stuck = True
        raise ValueError("cut off")

    for _ in range(2):
        with pytest.raises(ValueError, match="cut off"), beside(FIRST, behind=False, purpose="transfer"):
            cut_off()
    assert used[0] is not used[1]


def test_on_a_cpu_there_are_none(used):
    with beside(torch.device("cpu"), behind=True, purpose="copies"):
        assert (Stream.made, used) == ([], [])


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
