"""No admission control: every request is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ADMISSIONS, AdmissionResult, Cost, InstanceView, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ADMISSIONS.register("admit_all")
class AdmitAll(Stateless):
    name: ClassVar[str] = "admit_all"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def judge(
        self, request: Request, cost: Cost, instance: InstanceView, backlog_s: float, now: float
    ) -> AdmissionResult:
        return AdmissionResult(True, 1.0, "admitted")

    def hopeless_at(self, request: Request, cost: Cost) -> float:
        return math.inf
