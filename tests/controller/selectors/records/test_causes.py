"""Which decisions bear on a class: of its own rows, or of the mapping that its label stands for."""

from __future__ import annotations

import pytest

from controller.models import Decision
from controller.selectors.records.causes import ClassTraffic, bearing_on
from controller.services.decisions import decision_record
from tests import factories


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("label", "found"),
    [
        ("priority-1", {"priority_mapping"}),
        ("priority-high", {"slo_class"}),
        ("priority-", set()),
        ("chat", set()),
    ],
)
def test_a_class_is_a_mapped_priority_only_by_the_label_that_the_code_gives(label, found):
    for kind, subject in (("slo_class", "priority-high"), ("priority_mapping", "priorities of all tenants")):
        decision_record(
            actor=factories.ACTOR, kind=f"{kind}_updated", subject_type=kind, subject=subject, reason="person_updated"
        )
    whom = ClassTraffic(None, label, (), ())
    assert set(Decision.objects.filter(bearing_on(whom)).values_list("subject_type", flat=True)) == found
