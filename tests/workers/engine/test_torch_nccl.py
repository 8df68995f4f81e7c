"""What can be seen of weight moves between CUDA devices without one: how the group of two is made."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.workers.engine.torch_meetings import met
from workers.engine.torch_meeting import RECEIVER

pytestmark = pytest.mark.torch


async def test_a_peer_that_dies_ends_the_transfer_and_not_the_process(monkeypatch):
    """By default the watchdog of NCCL ends the process of whoever is left, and with it all that it serves."""
    made = []

    def group(store, rank, size, timeout):
        made.append((store, rank, size, timeout, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))
        return "group"

    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    async with met() as (_, receiver):
        assert receiver._made(RECEIVER, torch.device("cuda", 0)) == "group"
        assert made == [(receiver, RECEIVER, 2, receiver.limit, "2")]
