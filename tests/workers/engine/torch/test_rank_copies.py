"""Copies in host memory of several ranks: all of them have theirs, or none has, whichever of them fails."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from tests.workers.engine.torch.bench import folder, program
from tests.workers.engine.torch.meetings import HOST, TOKEN
from tests.workers.engine.torch.test_kv_room import warm_follower
from workers.engine.torch.follower import Follower, _answer
from workers.engine.torch.group import RankGroup, RankLost
from workers.engine.torch.rank_weights import RankWeights
from workers.engine.torch.weights.store import TorchWeights
from workers.engine.torch.weights.transfer import WeightMemory
from workers.engine.weights.manager import LoadFailed, Source

pytestmark = [pytest.mark.torch, pytest.mark.thorough]
DISK, COPY = Source("disk"), Source("host")


class Group:
    """Of a first rank and one other, which is in this process and has all of the model as well."""

    def __init__(self, other: Follower) -> None:
        self._other = other

    def ask(self, verb: str, value: Any) -> list[int]:
        error, number = _answer(self._other, verb, value)
        if error:
            raise RankLost(f"rank 1: {error}")
        return [number]


class Ranks:
    """Both, asleep with a copy each."""

    def __init__(self, other: Follower) -> None:
        self.first = WeightMemory(program(folder()).model.slots(), present=True, ranked=True)
        self.other = other._memory
        own = TorchWeights(self.first, folder(), HOST, TOKEN, 1.0, model="tiny")
        self.store = RankWeights(own, cast(RankGroup, Group(other)))

    async def fall_asleep(self) -> None:
        await self.store.load(DISK)
        await self.store.release(keep_host_copy=True)
        assert (self.store.present, self.copies) == (False, (True, True))

    @property
    def copies(self) -> tuple[bool, bool]:
        return self.first.has_host_copy, self.other.has_host_copy


@pytest.fixture
async def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks(warm_follower(monkeypatch))
    await made.fall_asleep()
    return made


def full_device() -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("which", ["first", "other"])
async def test_one_rank_without_memory_costs_no_rank_its_copy(ranks, monkeypatch, which):
    with monkeypatch.context() as taken:
        taken.setattr(getattr(ranks, which), "_make_room", full_device)
        for source in (COPY, DISK):
            with pytest.raises(LoadFailed, match="out of memory"):
                await ranks.store.load(source)
            assert (ranks.store.present, ranks.copies) == (False, (True, True))
    await ranks.store.load(COPY)
    assert (ranks.store.present, ranks.other.present, ranks.copies) == (True, True, (False, False))


@pytest.mark.parametrize("which", ["first", "other"])
async def test_one_ranks_damaged_copy_leaves_the_others_of_no_use(ranks, which):
    next(iter(getattr(ranks, which)._host.values())).add_(1.0)
    with pytest.raises(LoadFailed, match=r"tensor \S+ of the copy in host memory is damaged"):
        await ranks.store.load(COPY)
    assert (ranks.store.present, ranks.store.has_host_copy, ranks.copies) == (False, False, (False, False))
    await ranks.store.load(DISK)
    assert (ranks.store.present, ranks.other.present) == (True, True)


async def test_a_rank_that_does_not_say_what_it_has_is_taken_to_have_no_copy(ranks, monkeypatch):
    def broken() -> None:
        raise OSError("the memory cannot be given back")

    monkeypatch.setattr(ranks.first, "_make_room", full_device)
    monkeypatch.setattr(ranks.other, "release", broken)
    with pytest.raises(LoadFailed, match="out of memory"):
        await ranks.store.load(COPY)
    assert ranks.copies == (False, False)


async def test_weights_that_are_here_need_no_copies_wherever_they_came_from(ranks):
    await ranks.store.load(DISK)
    assert (ranks.store.present, ranks.copies) == (True, (False, False))
