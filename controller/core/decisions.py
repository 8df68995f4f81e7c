"""The Decision: one object for the log, the console, the audit and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypedDict

Figure = float | int | str | bool | None
Alternative = Figure | Mapping[str, Figure]


class Decision(NamedTuple):
    """One decision: a short, stable `reason` code and the figures it was based on.

    `kind` is what was decided ("dispatch", "refuse", "expire", "scale_out"), `subject` the request or instance it is
    about. `at` is seconds on the clock of the code that decides. `rejected` holds the alternatives, each with the
    figures, the score or the reason that ruled it out.
    """

    kind: str
    reason: str
    subject: str
    at: float
    figures: Mapping[str, Figure]
    rejected: Mapping[str, Alternative] = {}


class DecisionMessage(TypedDict):
    """One decision for a list on a page. Only `controller.wording.sentences.message_of` makes these."""

    id: str
    at: float  # epoch seconds
    sentence: str
    figures_text: str  # its most important figures, without those in the sentence
