"""A process group for two engines that share one CUDA device.

NCCL refuses a group with two processes on one device. So their tensors go by host memory: the sender copies each piece
from the device to pinned memory, gloo sends it over TCP, and the receiver copies it to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class HostGroup:
    """Sends and receives contiguous tensors on a CUDA device like `ProcessGroupNCCL`, through host memory.

    `group`: of gloo. Calls raise RuntimeError, as its calls do. A tensor is copied in the caller's current stream, by
    `send` before it returns and by the work of `recv` when it ends. Pinned memory for what is in flight (`pieces`, some
    256 MiB) stays with the process.
    """

    def __init__(self, group: dist.ProcessGroupGloo) -> None:
        self._group = group
        self.abort: Callable[[], None] = group.abort

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """`tensors`: one. Returns the work, which ends when gloo has sent it."""
        (tensor,) = tensors
        host = pinned(tensor)
        host.copy_(tensor)
        return _HostWork(self._group.send([host], peer, tag), host)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """`tensors`: one. Returns the work, which ends when the tensor is on the device."""
        (tensor,) = tensors
        host = pinned(tensor)
        return _HostWork(self._group.recv([host], peer, tag), host, tensor)


class _HostWork:
    """A piece that moves. `host`: its memory, kept until then. `to`: the tensor on the device that gets it, if any."""

    def __init__(self, work: Any, host: torch.Tensor, to: torch.Tensor | None = None) -> None:
        self._work, self._host, self._to = work, host, to

    def wait(self, timeout: timedelta) -> None:
        if not self._work.wait(timeout):
            raise RuntimeError("the transfer was aborted")
        if self._to is not None:
            self._to.copy_(self._host)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for the tensor that the device copies from and to directly; torch keeps and reuses it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def device_identity(device: torch.device) -> str:
    """The name of a CUDA device that is the same in all processes, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid)
