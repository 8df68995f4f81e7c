import pytest

from controller.core.snapshot import ClassConfig, LevelBounds, MappingConfig, TenantConfig
from controller.core.types import CONCORD_DEFAULTS
from controller.slo.classes import ClassBook, SloError, SloFields, parse_slo_fields

CHAT = ClassConfig("chat", None, 0.7, 0.5, None, 30.0, 0.95, 2.0)
OWN_CHAT = ClassConfig("chat", "acme", 0.3, 0.1, None, 10.0, 0.99, 1.0)
JOB = ClassConfig("job", None, 2.0, 0.5, 20.0, 30.0, 0.9, 1.0)
MAPPING = MappingConfig(None, (LevelBounds(0.5, 0.1, 0.4, 0.6, 0.05, 0.2), LevelBounds(2.0, 0.2, 1.5, 2.5, 0.1, 0.3)))


def tenant(name="globex", default=None):
    return TenantConfig(1, name, default)


def resolve(asked, who=None, classes=(CHAT, OWN_CHAT, JOB), mappings=(MAPPING,)):
    return ClassBook(classes, mappings).resolve(asked, who or tenant(), lambda level: False, 0.0)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"target_ttft": "fast"}, "target_ttft"),
        ({"target_ttft": True}, "target_ttft"),
        ({"target_ttft": 0}, "target_ttft"),
        ({"target_tbt": -0.1}, "target_tbt"),
        ({"deadline": float("inf")}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"deadline": -5}, "deadline"),
        ({"deadline": 1e9}, "deadline"),
        ({"waiting_time": [1]}, "waiting_time"),
        ({"slo_class": 7}, "slo_class"),
        ({"slo_class": ""}, "slo_class"),
        ({"priority": 1.5}, "priority"),
        ({"priority": -1}, "priority"),
        ({"target_ttft": 5, "deadline": 1}, "deadline"),
    ],
)
def test_bad_fields_are_named(body, field):
    with pytest.raises(SloError) as caught:
        parse_slo_fields(body)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_nothing_asked_is_nothing():
    assert parse_slo_fields({"model": "m", "target_ttft": None}) == SloFields()


def test_explicit_fields_win_over_the_class():
    applied = resolve(SloFields(slo_class="chat", target_ttft=0.2))
    assert (applied.targets.ttft_s, applied.targets.tpot_s, applied.source) == (0.2, 0.5, "explicit")


def test_a_tenants_own_class_wins_over_the_common_one():
    assert resolve(SloFields(slo_class="chat"), tenant("acme")).targets.ttft_s == 0.3
    assert resolve(SloFields(slo_class="chat")).targets.ttft_s == 0.7


def test_priority_goes_through_the_mapping():
    applied = resolve(SloFields(priority=1))
    assert (applied.targets.ttft_s, applied.slo_class, applied.source) == (2.0, "priority-1", "priority")


def test_default_class_then_concord_defaults():
    assert resolve(SloFields(), tenant(default="job")).source == "tenant_default"
    assert resolve(SloFields(), tenant(default="job")).targets.deadline_s == 20.0
    assert resolve(SloFields()).targets == CONCORD_DEFAULTS


def test_one_explicit_field_keeps_the_rest_of_its_class():
    patient = resolve(SloFields(waiting_time=90.0), tenant(default="chat"))
    assert (patient.slo_class, patient.targets.ttft_s, patient.targets.waiting_time_s) == ("chat", 0.7, 90.0)
    mapped = resolve(SloFields(priority=1, waiting_time=90.0))
    assert (mapped.level, mapped.targets.ttft_s, mapped.targets.waiting_time_s) == (1, 2.0, 90.0)
    assert mapped.source == patient.source == "explicit"


def test_a_class_without_a_priority_has_none():
    assert resolve(SloFields(slo_class="chat")).priority is None
    assert resolve(SloFields(slo_class="chat", priority=3)).priority == 3
    assert resolve(SloFields(slo_class="chat")).level is None


def test_how_the_mapping_came_to_its_targets_is_told():
    assert resolve(SloFields(priority=1)).figures["history"] == "no_history"


def test_unknown_class_lists_the_known_ones():
    with pytest.raises(SloError, match="chat, job"):
        resolve(SloFields(slo_class="caht"))


def test_explicit_ttft_after_the_class_deadline_contradicts():
    with pytest.raises(SloError) as caught:
        resolve(SloFields(slo_class="job", target_ttft=30.0))
    assert caught.value.field == "target_ttft"


def test_a_deadline_bounds_ttft_and_waiting():
    applied = resolve(SloFields(deadline=1.0))
    assert (applied.targets.ttft_s, applied.targets.waiting_time_s) == (1.0, 1.0)


def test_a_request_waits_as_long_as_its_own_first_token_target_allows():
    """An error after 5 s would come long before the promise could be broken."""
    assert resolve(SloFields(target_ttft=20.0)).targets.waiting_time_s == 20.0
    assert resolve(SloFields(target_ttft=0.5)).targets.waiting_time_s == CONCORD_DEFAULTS.waiting_time_s
    assert resolve(SloFields(target_ttft=20.0, waiting_time=3.0)).targets.waiting_time_s == 3.0
    assert resolve(SloFields(target_ttft=8.0, deadline=12.0)).targets.waiting_time_s == 8.0


def test_history_survives_a_change_elsewhere():
    book = ClassBook((CHAT,), (MAPPING,))
    book.observe("globex", 0, 0.45, 0.1, 0.0, 0.0)
    kept = book.renewed((CHAT, JOB), (MAPPING,))
    assert kept.mapping("globex").assign(0, False, 1.0).reference_ttft_s == 0.45
    other = MappingConfig(None, MAPPING.levels, window=5)
    assert book.renewed((CHAT,), (other,)).mapping("globex").assign(0, False, 1.0).reason == "no_history"


def test_a_thinking_deadline_takes_the_place_of_the_first_tokens_target():
    found = resolve(SloFields(slo_class="chat", thinking_deadline=60.0))
    assert (found.source, found.targets.ttft_s, found.targets.thinking_s) == ("explicit", 60.0, 60.0)
    assert found.targets.waiting_time_s == 60.0, "it may wait until then"
    assert resolve(SloFields(slo_class="chat")).targets.thinking_s is None


@pytest.mark.parametrize("deadline", [{"slo_class": "job"}, {"deadline": 20.0}])
def test_a_thinking_deadline_after_the_deadline_contradicts(deadline):
    with pytest.raises(SloError) as caught:
        resolve(SloFields(thinking_deadline=30.0, **deadline))
    assert caught.value.field == "thinking_deadline"
