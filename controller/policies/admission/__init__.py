"""Whether a queued request should go to a worker now. Importing this package registers every admission."""

from controller.policies.admission import admit_all, scorpio_ttft_guard, ttft_probability

__all__ = ["admit_all", "scorpio_ttft_guard", "ttft_probability"]
