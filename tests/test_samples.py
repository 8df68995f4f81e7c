"""Which tests `.ci/run` leaves out, and which begin first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import beyond_samples, longest_first


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


class InFile:
    def __init__(self, file: str, long: float | None = None) -> None:
        self.path, self.long = Path(file), long

    def get_closest_marker(self, name: str) -> Any:
        return pytest.mark.long(self.long).mark if name == "long" and self.long is not None else None


def test_long_files_begin_first_then_those_of_many_tests() -> None:
    items: list[Any] = [
        InFile("one"),
        InFile("two"),
        InFile("two"),
        InFile("a", 40.0),
        InFile("b", 90),
        InFile("b", 90),
    ]
    assert [each.path.name for each in longest_first(items)] == ["b", "b", "a", "two", "two", "one"]
    assert longest_first(items[:3]) == items[:3], "where no file is long the order stays"
