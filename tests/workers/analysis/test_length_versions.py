"""Forests trained on recorded requests: by time, published only if they do better than each class' constant."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from controller.models import LengthVersion
from controller.predict.answer_lengths import FEATURES, TARGET
from controller.predict.length_forest import LengthForest
from controller.selectors.records.length_versions import published_content, published_versions
from controller.services.records.learned_versions import CONTENTS_KEPT
from tests import factories
from workers.analysis import length_versions as module
from workers.analysis.length_versions import RecordedAnswer, judge, recorded_answers, train_models
from workers.tasks.lengths import train as task

BEGAN_S = time.time() - 7_200
BEGAN = datetime.fromtimestamp(BEGAN_S, UTC)


def stored(model, count, *, seed=0, later=0.0, tell=True, **fields):
    """Answers of a tenth of their prompts' tokens, give or take a half; with `tell` the features say so."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, prompt in enumerate(rng.integers(100, 3_000, count).tolist()):
        tokens = max(1, int(prompt * rng.uniform(0.05, 0.15)))
        features = [float(prompt if tell else 100), 0.0, 0.0, 0.0, 0.0, 0.0]
        own = {"model": model.name, "arrived_at": BEGAN_S + later + number, "prompt_tokens": prompt}
        rows.append(factories.record(**own, output_tokens=tokens, length_features=features, **fields))
    factories.records_stored(*rows)


@pytest.fixture
def model():
    return factories.served_model(name="demo", context_tokens=100_000)


@pytest.mark.django_db
def test_enough_recorded_answers_give_a_version_that_covers_later_ones(model):
    stored(model, 800)
    (row,) = train_models()
    assert (row.model, row.version, row.refused) == ("demo", 1, "")
    assert (row.answers, row.judged) == (640, 160)
    assert row.coverage == pytest.approx(TARGET, abs=0.06)
    assert row.pinball < 0.6 * row.class_pinball
    assert [each["tokens"] for each in row.coverage_by_tokens] == [0, 50, 100, 200, 400]
    assert row.coverage_by_tokens[0] == {"tokens": 0, "answers": 160, "coverage": row.coverage}
    (published,) = published_versions()
    content = published_content("demo", 1)
    assert hashlib.sha256(content).hexdigest() == published.digest == row.digest
    forest = LengthForest.from_bytes(content)
    assert forest.names == FEATURES
    assert forest.quantiles((2_000.0, 0, 0, 0, 0, 0), (TARGET,))[0] == pytest.approx(280, rel=0.1)


@pytest.mark.django_db
def test_the_task_trains_nothing_before_enough_is_new(model, monkeypatch):
    stored(model, module.LEAST_ANSWERS - 1)
    task()
    assert not LengthVersion.objects.exists()
    stored(model, 1, seed=1, later=5_000)
    task()
    assert LengthVersion.objects.count() == 1
    task()
    assert LengthVersion.objects.count() == 1, "nothing is new"
    monkeypatch.setattr(module, "NEW_ANSWERS", 100)
    monkeypatch.setattr(module, "GAP_S", 0.0)
    stored(model, 100, seed=2, later=6_000)
    monkeypatch.setattr(module, "GAP_S", 60.0)
    task()
    assert LengthVersion.objects.count() == 1, "the last one is a moment old"
    monkeypatch.setattr(module, "GAP_S", 0.0)
    task()
    assert [row.version for row in LengthVersion.objects.order_by("version")] == [1, 2]


@pytest.mark.django_db
def test_a_forest_that_knows_no_more_than_its_class_is_refused_and_the_last_one_stays(model, monkeypatch):
    monkeypatch.setattr(module, "NEW_ANSWERS", 100)
    monkeypatch.setattr(module, "GAP_S", 0.0)
    stored(model, 600)
    train_models()
    monkeypatch.setattr(module, "MOST_ANSWERS", 900)
    stored(model, 900, seed=1, later=1_000, tell=False)
    (row,) = train_models()
    assert row.version == 2
    assert "loss" in row.refused or "covers" in row.refused
    assert (row.content, row.digest) == (None, "")
    assert [each.version for each in published_versions()] == [1]


@pytest.mark.django_db
def test_a_trainer_that_fails_leaves_the_last_version_in_force(model, monkeypatch):
    monkeypatch.setattr(module, "NEW_ANSWERS", 100)
    monkeypatch.setattr(module, "GAP_S", 0.0)
    stored(model, 600)
    train_models()
    stored(model, 300, seed=1, later=1_000)

    def fails(*args, **kwargs):
        raise MemoryError("no room")

    monkeypatch.setattr(module, "train", fails)
    with pytest.raises(MemoryError):
        train_models()
    assert [each.version for each in published_versions()] == [1]


@pytest.mark.django_db
def test_forests_of_old_versions_are_dropped(model, monkeypatch):
    monkeypatch.setattr(module, "NEW_ANSWERS", 1)
    monkeypatch.setattr(module, "GAP_S", 0.0)
    for number in range(CONTENTS_KEPT + 1):
        stored(model, 600 if not number else 200, seed=number, later=1_000.0 * number)
        train_models()
    kept = LengthVersion.objects.filter(content__isnull=False).values_list("version", flat=True)
    assert sorted(kept) == [2, 3, 4]
    assert published_versions()[0].version == 4
    assert published_content("demo", 1) is None


@pytest.mark.django_db
def test_answers_that_were_cut_are_told_from_whole_ones(model):
    told = [50.0, 20.0, 0.0, 0.0, 0.0, 0.0]
    for number, (tokens, outcome) in enumerate(((19, "ok"), (20, "ok"), (5, "cancelled"), (5, "cut"))):
        factories.records_stored(
            factories.record(
                model="demo", arrived_at=BEGAN_S + number, output_tokens=tokens, outcome=outcome, length_features=told
            )
        )
    factories.records_stored(
        factories.record(
            model="demo",
            arrived_at=BEGAN_S + 9,
            prompt_tokens=99_990,
            output_tokens=10,
            length_features=[9.0, 0, 0, 0, 0, 0],
        )
    )
    factories.records_stored(factories.record(model="demo"), factories.record(model="demo", length_features=[1.0]))
    assert [each.ended for each in recorded_answers("demo", 100_000)] == [True, False, False, False, False]


def test_the_later_answers_judge_and_none_of_them_is_trained_on():
    rng = np.random.default_rng(0)
    answers = [
        RecordedAnswer(
            *(BEGAN + timedelta(seconds=number), "chat", (0.0,) * len(FEATURES)),
            *(int(rng.integers(1, 100)) if number < 800 else 5_000, True),
        )
        for number in range(1_000)
    ]
    judged = judge("demo", answers)
    assert (judged.answers, judged.judged) == (800, 200)
    assert judged.forest.lengths.max() < 100
    assert (judged.coverage, judged.class_coverage) == (0.0, 0.0)


def test_levels_follow_only_answers_that_had_ended():
    """Answers have grown by a tenth. Where none of them ends before the last one is asked about, no level has moved."""

    def judged(took_s):
        rng = np.random.default_rng(0)
        answers = []
        for number in range(4_000):
            tokens = int(rng.integers(1, 100)) * (1.0 if number < 3_200 else 1.1)
            at = BEGAN + timedelta(seconds=number)
            answers.append(RecordedAnswer(at, "chat", (0.0,) * len(FEATURES), round(tokens), True, took_s))
        return judge("demo", answers)

    at_once, too_late = judged(1.0), judged(10_000.0)
    assert too_late.coverage + 0.03 < at_once.coverage <= TARGET
    for each in (at_once, too_late):
        assert each.coverage_by_tokens[0]["coverage"] == each.coverage
    assert too_late.coverage_by_tokens[1]["coverage"] < at_once.coverage_by_tokens[1]["coverage"]
