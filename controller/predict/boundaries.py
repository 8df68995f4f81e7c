"""Where a running prefill step can stop: at the end of an operator, of a layer, or of the step.

A step has `layers` equal layers, each with FlowPrefill's five checked operators (sec. 5.1: qkv_proj, attn, o_proj,
gate_up_proj, down_proj). Profiles give the time of whole steps, so operator times are composed. The part of a step that
grows with the squares of lengths is attention. The rest is divided among the four projections by their floating-point
operations, which for Llama-2-70B on A100 is within 1 point of measured kernels (0.098, 0.078, 0.549, 0.275 for qkv, o,
gate_up and down; measured at TP 2 and 4,096 tokens 0.096, 0.087, 0.543, 0.274, vidur's profiling data). Norms, rotary
embedding, embedding and head are spread over the operators. Under tensor parallelism o_proj and down_proj each end with
an all-reduce, as engines fuse them. If the operators were timed (operator_profile.py), `ProfiledBoundaries` uses these
times instead.

Times are device seconds from the start of the step, without the time while it was suspended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, Protocol

from controller.core.errors import ConfigError, UnknownName
from controller.core.steps import BOUNDARIES, Boundary, Step
from controller.core.types import LatencyCoefficients
from controller.predict.operator_profile import OperatorProfile

PASSED = 1e-9  # share of a layer; a boundary closer than this counts as passed, not as the next one


class Shape(NamedTuple):
    """Sizes of a decoder. `experts_used`: feed-forward experts per token (1: dense), each `feed_forward` wide."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    experts_used: int = 1

    def projection_shares(self) -> tuple[float, float, float, float]:
        """Shares of qkv, o, gate_up and down in the operations of all projections; they add up to 1."""
        attention = self.heads * self.head_dim
        qkv = self.hidden * (attention + 2 * self.kv_heads * self.head_dim)
        feed = self.hidden * self.feed_forward * self.experts_used
        whole = qkv + attention * self.hidden + 3 * feed
        return qkv / whole, attention * self.hidden / whole, 2 * feed / whole, feed / whole


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama3-8b": Shape(32, 4096, 32, 8, 128, 14336),
        "llama3-70b": Shape(80, 8192, 64, 8, 128, 28672),
        "qwen2.5-14b": Shape(48, 5120, 40, 8, 128, 13824),
        "qwen3-30b-a3b": Shape(48, 2048, 32, 4, 128, 768, 8),
    }
)


def shape(name: str) -> Shape:
    try:
        return SHAPES[name]
    except KeyError:
        raise UnknownName(f"unknown shape {name!r}; valid: {', '.join(sorted(SHAPES))}", field="shape") from None


class StepBoundaries(Protocol):
    """Boundaries of a step of `seconds`, of which `used` have passed. Used by executors that can suspend."""

    def next_boundary(self, step: Step, seconds: float, used: float) -> float: ...


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """`layers` equal layers whose operators take `durations`. Only the proportions of these matter."""

    layers: int
    durations: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError("layers must be at least 1", field="layers")
        if not self.durations or min(self.durations) < 0 or not sum(self.durations) > 0:
            raise ConfigError("durations must not be negative, and one positive", field="durations")

    def next_boundary(self, kind: Boundary, seconds: float, used: float) -> float:
        """The first boundary after `used` in a step of `seconds`; the end of the step is always one."""
        if kind in ("chunk", "none") or used >= seconds:
            return seconds
        layer = seconds / self.layers
        done = math.floor(used / layer + PASSED)
        if kind == "layer":
            return min(seconds, (done + 1) * layer)
        scale = layer / sum(self.durations)
        for end in accumulate(self.durations):
            if done * layer + end * scale > used + PASSED * layer:
                return min(seconds, done * layer + end * scale)
        return min(seconds, (done + 1) * layer)

    def mean_wait(self, kind: Boundary, seconds: float) -> float:
        """Mean seconds until the next boundary from a uniformly random moment: sum(d^2) / (2 sum d) over the
        pieces d.
        """
        if kind in ("chunk", "none"):
            return seconds / 2
        layer = seconds / self.layers
        pieces = [layer] if kind == "layer" else [d * layer / sum(self.durations) for d in self.durations]
        return sum(d * d for d in pieces) / (2 * sum(pieces))


@dataclass(frozen=True, slots=True)
class ComposedBoundaries:
    """Boundaries of any step of a model, composed from its shape and its latency profile.

    `all_reduce_share`: share of the profile's linear time that is spent in all-reduces, half after o and half after
    down.
    """

    kind: Boundary
    shape: Shape
    coefficients: LatencyCoefficients
    all_reduce_share: float = 0.0

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        if not 0 <= self.all_reduce_share < 1:
            raise ConfigError("all_reduce_share must be in [0, 1)", field="all_reduce_share")

    def profile(self, tokens: int, squares: int) -> LayerProfile:
        """Operator times of a prefill of `tokens` with `squares` = sum of new * (new + 2 * past)."""
        a, b, c = self.coefficients[:3]
        linear, attention = a + b * tokens, c * squares
        work = (1 - self.all_reduce_share) * linear
        qkv, out, gate_up, down = (share * work for share in self.shape.projection_shares())
        reduce = self.all_reduce_share * linear / 2
        return LayerProfile(self.shape.layers, (qkv, attention, out + reduce, gate_up, down + reduce))

    def next_boundary(self, step: Step, seconds: float, used: float) -> float:
        return self.profile(*sums(step)).next_boundary(self.kind, seconds, used)


@dataclass(frozen=True, slots=True)
class ProfiledBoundaries:
    """Boundaries from measured operators.

    The latency profile gives the length of the step, the operators its proportions.
    """

    kind: Boundary
    operators: OperatorProfile

    def __post_init__(self) -> None:
        _check_kind(self.kind)

    def profile(self, tokens: int, squares: int) -> LayerProfile:
        """As ComposedBoundaries.profile."""
        durations = self.operators.durations(tokens, squares)
        return LayerProfile(self.operators.layers, durations if any(durations) else (1.0,))

    def next_boundary(self, step: Step, seconds: float, used: float) -> float:
        return self.profile(*sums(step)).next_boundary(self.kind, seconds, used)


def _check_kind(kind: Boundary) -> None:
    if kind not in BOUNDARIES:
        raise ConfigError(f"unknown boundary {kind!r}; valid: {', '.join(BOUNDARIES)}", field="boundary")


def sums(step: Step) -> tuple[int, int]:
    """Prefill tokens of a step and the sum of their squares, as in eq. 1."""
    lengths: Sequence[tuple[int, int]] = [(chunk.length, chunk.start) for chunk in step.chunks]
    return sum(n for n, _ in lengths), sum(n * (n + 2 * past) for n, past in lengths)
