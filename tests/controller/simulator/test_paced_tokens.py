"""A simulation counts tokens in time for a whole column at once: the same number as production counts one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controller.core.types import Targets
from controller.simulator.in_flight import paced_tokens
from controller.slo.attainment import token_goodput

SECONDS = st.floats(0.0, 20.0).map(lambda value: round(value, 2))  # round figures meet their limits exactly


@given(st.lists(SECONDS, max_size=30), SECONDS, SECONDS)
def test_a_column_is_counted_as_its_tokens(gaps: list[float], ttft_s: float, tpot_s: float) -> None:
    times = np.cumsum(gaps)
    assert paced_tokens(times, Targets(ttft_s, tpot_s, None, 60.0)) == token_goodput(list(times), ttft_s, tpot_s)
