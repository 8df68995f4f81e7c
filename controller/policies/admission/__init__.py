"""Admission policies: whether a queued request should be sent to an instance now. Importing this registers all."""

from controller.policies.admission import admit_all, scorpio_ttft_guard, ttft_probability

__all__ = ["admit_all", "scorpio_ttft_guard", "ttft_probability"]
