"""Hypothesis over every target: bytes, and right messages that were cut, doubled, spliced and changed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz import tally, tokenizing  # noqa: F401  # adds its targets
from tests.fuzz.targets import SEEDS, TARGETS

pytestmark = [pytest.mark.fuzz, pytest.mark.db]
EACH = 200 * tally.SCALE
ODD = (
    *(b"", b"\x00", b"\r\n", b"\n\n", b"inf", b"nan", b"1e999", b"-1", b"9" * 30, b"null", b"[]", b"{}", b"true"),
    *(b'"\xff"', b"\xed\xa0\x80", b"\\ud800", b": ", b"data: ", b"f" * 16, b"\xff" * 4, b"[" * 2000, b'{"a":' * 2000),
    *(b"Content-Length: 1\r\n", b"Transfer-Encoding: chunked\r\n"),
)


@st.composite
def changed(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A right message with up to six changes."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        to = draw(st.integers(at, min(len(data), at + 40)))
        new = draw(
            st.one_of(st.sampled_from(ODD), st.binary(max_size=8), st.just(data[at:to] * 2), st.sampled_from(seeds))
        )
        data = data[:at] + new + data[to:]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_raised_that_no_caller_expects(name: str) -> None:
    one = TARGETS[name]

    @settings(
        max_examples=EACH,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        derandomize=tally.QUICK,
    )
    @given(data=st.one_of(changed(SEEDS[name]), st.binary(max_size=200)))
    def each(data: bytes) -> None:
        tally.tried(name, "hypothesis")
        one(data)

    try:
        for seed in SEEDS[name]:
            one(seed)
        each()
    except Exception as error:
        tally.fault("crashes", f"{name}: {error!r}")
        raise
