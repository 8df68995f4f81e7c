"""A request at an engine, as the scheduler follows it."""

from __future__ import annotations

from controller.core.types import Request


class Sent:
    """A request at an engine: `produced` output tokens so far; `first_at` is None while it waits for its prefill."""

    __slots__ = (
        "assumed",
        "at",
        "binds",
        "expected_s",
        "first_at",
        "mark",
        "new_tokens",
        "prefill_s",
        "produced",
        "rank",
        "request",
        "squares",
        "to_come",
    )

    def __init__(self, request: Request, at: float, rank: int, prefill_s: float, new: tuple[int, int]) -> None:
        self.request = request
        self.at = at
        self.rank = rank
        self.prefill_s = prefill_s
        self.new_tokens, self.squares = new  # see ShadowInstance.uncached
        self.expected_s = 0.0  # from `at` to its first token, as predicted then
        self.binds = False  # its TPOT limits what else this instance may take
        self.assumed = False  # its first token was not seen: it was expected by then
        self.first_at: float | None = None
        self.produced = 0
        self.to_come = 0  # predicted output tokens that have not come yet
        self.mark: tuple[float, int, int, int, int, float] | None = None  # last progress: see ShadowInstance.progress
