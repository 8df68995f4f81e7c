"""What was decided and why: one object that log, console, audit and test read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Figure = float | int | str | bool | None


class Decision(NamedTuple):
    """A short machine-readable `reason` and the figures behind it.

    `kind` says what was decided ("dispatch", "refuse", "expire", "scale_out"), `subject` on whom (request or instance
    id), `rejected` the alternatives with the score or reason that ruled each out.
    """

    kind: str
    reason: str
    subject: str
    at: float
    figures: Mapping[str, Figure]
    rejected: Mapping[str, Figure] = {}
