"""Every registered policy is measured, on as many requests as asked for."""

import pytest

from benchmarks.bench_policies import CALM_SIZE, KINDS, View, measure, sizes_of
from controller.core.policy import ADMISSIONS, ORDERINGS, ROUTINGS
from controller.dispatch.disaggregation.placements import MIGRATIONS
from controller.dispatch.pacing import PACINGS
from controller.policies.batching import BATCHINGS

CASES = [pytest.param(kind, name, id=f"{kind}-{name}") for kind, (names, _) in KINDS.items() for name in names]


def test_all_registries_are_covered():
    covered = {kind: set(names) for kind, (names, _) in KINDS.items()}
    for kind, registry in (
        ("ordering", ORDERINGS),
        ("admission", ADMISSIONS),
        ("routing", ROUTINGS),
        ("pacing", PACINGS),
        ("batching", BATCHINGS),
        ("migration", MIGRATIONS),
    ):
        assert covered[kind] == set(registry)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_decision_decides_something(kind, name):
    decided = KINDS[kind][1](name, 40, 1)()
    assert decided is not None or kind == "migration"  # which may rather wait
    if kind in ("ordering", "admission", "preemption"):
        assert len(decided) == 40


def test_half_decodes_and_half_waits():
    view = View(40, 1)
    assert all(seq.decoding for seq in view.running)
    assert len(view.running) == len(list(view.waiting())) == 20


def test_the_median_is_in_milliseconds_and_calm_has_its_own_size():
    assert 0 < measure(lambda: sum(range(1000))) < 10
    assert CALM_SIZE in sizes_of("batching", "calm")
    assert CALM_SIZE in sizes_of("frame", "calm")
    assert CALM_SIZE not in sizes_of("batching", "vllm_v1")
