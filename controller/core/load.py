"""What a load means to those who measure it, to scalers, and to those who explain it."""

from __future__ import annotations

WORK_WINDOW_S = 5.0  # computing is averaged over it: several prefills, and a rise of traffic soon shows
FULL = 1.0  # load of a fleet that can do no more, whatever a policy tolerates
