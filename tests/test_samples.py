"""Which tests `.ci/run` leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import beyond_samples


class Case:
    def __init__(self, nodeid: str, sampled: int | None) -> None:
        self.nodeid, self.sampled = nodeid, sampled

    def get_closest_marker(self, name: str) -> Any:
        return pytest.mark.sampled(self.sampled).mark if name == "sampled" and self.sampled is not None else None


def run(cases: list[Any], seed: str) -> set[str]:
    return {each.nodeid for each in cases} - {each.nodeid for each in beyond_samples(cases, seed)}


def test_so_many_cases_of_each_test_run_and_in_time_all_of_them() -> None:
    cases = [Case(f"a::t[{n}]", 3) for n in range(10)] + [Case(f"b::t[{n}]", 2) for n in range(2)]
    cases += [Case("a::u", None)]
    seeds = [run(cases, str(seed)) for seed in range(50)]
    assert all(len(each) == 3 + 2 + 1 for each in seeds)
    assert set.union(*seeds) == {each.nodeid for each in cases}
    assert run(cases, "7") == run(cases[::-1], "7"), "each process of one run tries the same"
