"""Trains a forest of each model on its recorded requests, judges it on later ones, and publishes it or refuses it.

The split is by time: the last JUDGED_SHARE of the answers judge a forest of those before, since a gateway will ask it
about later ones too. What it must not do worse is the prior of each class: the constant quantile of its answers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np
from django.db.models import F, QuerySet, Sum
from django.utils import timezone

from controller.models import AttainmentMinute, LengthVersion, RequestRecord, ServedModel
from controller.predict.answer_lengths import (
    FEATURES,
    LEAST_ANSWERS,
    MOST_AGE_S,
    PRODUCED,
    TARGET,
)
from controller.predict.length_forest import LengthForest
from controller.predict.length_replay import PastAnswer, replayed
from controller.services.records.length_versions import CoverageAt, JudgedForest, length_version_store
from workers.analysis.length_forest import train

log = logging.getLogger(__name__)

MOST_ANSWERS = 12_000  # the newest
NEW_ANSWERS = 1_000  # since the last version, before another one is trained
GAP_S = 600.0  # between two versions of a model: the level of the bound has to settle
JUDGED_SHARE = 0.2
TOLERATED = 0.02  # of coverage below TARGET, where fewer answers do not allow for more


class RecordedAnswer(NamedTuple):
    """`ended` False: it was cut, and would have been longer. `features` as FEATURES. `took_s`: from its arrival to the
    end of its answer."""

    at: datetime
    slo_class: str
    features: Sequence[float]
    tokens: int
    ended: bool
    took_s: float = 0.0


def train_models() -> list[LengthVersion]:
    """A new version of each model that has enough new answers; those stored now."""
    stored = []
    for model, context_tokens in ServedModel.objects.order_by("name").values_list("name", "context_tokens"):
        last = LengthVersion.objects.filter(model=model).order_by("-version").first()
        if last is not None and timezone.now() - last.trained_at < timedelta(seconds=GAP_S):
            continue
        if last is not None and _newer(model, last.last_at) < NEW_ANSWERS + last.judged:
            continue
        if last is None and _newer(model, timezone.now() - timedelta(seconds=MOST_AGE_S)) < LEAST_ANSWERS:
            continue
        answers = recorded_answers(model, context_tokens)
        if len(answers) < LEAST_ANSWERS:
            continue
        row = length_version_store(judge(model, answers))
        stored.append(row)
        log.info("length forest %s: %s", row, row.refused or f"in force, covers {row.coverage:.3f}")
    return stored


def _usable(model: str) -> QuerySet[RequestRecord]:
    """Records of answers of which at least a token came, with the features that a gateway had."""
    return RequestRecord.objects.filter(model=model, output_tokens__gt=0).exclude(length_features=[])


def _newer(model: str, at: datetime) -> int:
    """About how many answers came since, from the roll-up by minute: records of a model that is seldom asked for are
    few among many."""
    rows = AttainmentMinute.objects.filter(model=model, minute__gt=at - timedelta(minutes=1))
    found = rows.aggregate(answers=Sum(F("finished") - F("refused") - F("expired")))["answers"]
    return int(found or 0)


def recorded_answers(model: str, context_tokens: int) -> list[RecordedAnswer]:
    """The newest MOST_ANSWERS, oldest first. Rows whose features are not those of this release are left out."""
    rows = _usable(model).order_by("-arrived_at", "-id")
    values = rows.values_list(
        *("arrived_at", "slo_class", "length_features", "output_tokens", "prompt_tokens", "outcome", "e2e_s")
    )[:MOST_ANSWERS]
    most = FEATURES.index("max_tokens")
    found = []
    for at, slo_class, features, tokens, prompt, outcome, took_s in reversed(list(values)):
        if len(features) != len(FEATURES):
            continue
        limit = min(features[most] or np.inf, context_tokens - prompt)
        ended = outcome == "ok" and tokens < limit
        found.append(RecordedAnswer(at, slo_class, features, tokens, ended, took_s or 0.0))
    return found


def judge(model: str, answers: Sequence[RecordedAnswer], *, seed: int = 0) -> JudgedForest:
    """Train on the earlier answers, judge on the later ones. Raises ValueError for too few to train on."""
    split = len(answers) - max(1, int(JUDGED_SHARE * len(answers)))
    earlier, later = answers[:split], answers[split:]
    forest = train(
        FEATURES,
        np.array([each.features for each in earlier], dtype=np.float64),
        np.array([each.tokens for each in earlier], dtype=np.int64),
        np.array([each.ended for each in earlier], dtype=bool),
        seed=seed,
        about={"model": model},
    )
    bounds, by_tokens = _followed(forest, later)
    prior = _by_class(earlier, later)
    coverage, pinball = _figures(later, bounds)
    class_coverage, class_pinball = _figures(later, prior)
    return JudgedForest(
        model=model,
        forest=forest,
        first_at=earlier[0].at,
        last_at=earlier[-1].at,
        answers=len(earlier),
        cut_answers=sum(1 for each in earlier if not each.ended),
        judged=len(later),
        coverage=coverage,
        coverage_by_tokens=by_tokens,
        class_coverage=class_coverage,
        pinball=pinball,
        class_pinball=class_pinball,
        refused=_refused(len(later), coverage, class_coverage, pinball, class_pinball),
    )


def _refused(judged: int, coverage: float, class_coverage: float, pinball: float, class_pinball: float) -> str:
    by_chance = 2 * math.sqrt(TARGET * (1 - TARGET) / judged)  # two standard errors of a coverage of TARGET
    if coverage < min(class_coverage, TARGET - max(TOLERATED, by_chance)):
        return f"it covers {coverage:.3f} of later answers; constant quantiles of each class cover {class_coverage:.3f}"
    if pinball > class_pinball:
        return f"its loss is {pinball:.1f} tokens; constant quantiles of each class have a loss of {class_pinball:.1f}"
    return ""


def _followed(forest: LengthForest, later: Sequence[RecordedAnswer]) -> tuple[list[int], list[CoverageAt]]:
    """Upper bounds at the arrival as a gateway would give them, and how many hold of those that it would ask again as
    the answer runs: each level follows the answers that had ended by then."""
    began = later[0].at
    timed = []
    for each in later:
        at_s = (each.at - began).total_seconds()
        timed.append(PastAnswer(at_s, at_s + each.took_s, tuple(each.features), each.tokens, each.ended))
    given = replayed(forest, timed)
    by_tokens = []
    for stage, produced in enumerate(PRODUCED):
        bounds = [(each, found[stage]) for each, found in zip(later, given, strict=True) if len(found) > stage]
        hits = [each.tokens <= bound for each, bound in bounds if each.ended or each.tokens > bound]
        share = sum(hits) / len(hits) if hits else None
        by_tokens.append(CoverageAt(tokens=produced, answers=len(hits), coverage=share))
    return [found[0] for found in given], by_tokens


def _by_class(earlier: Sequence[RecordedAnswer], later: Sequence[RecordedAnswer]) -> list[float]:
    """The constant quantile of each class; of all answers for a class without any."""
    everything = float(np.quantile([each.tokens for each in earlier], TARGET))
    by_class: dict[str, list[int]] = {}
    for each in earlier:
        by_class.setdefault(each.slo_class, []).append(each.tokens)
    constants = {name: float(np.quantile(tokens, TARGET)) for name, tokens in by_class.items()}
    return [constants.get(each.slo_class, everything) for each in later]


def _figures(later: Sequence[RecordedAnswer], bounds: Sequence[float]) -> tuple[float, float]:
    """Coverage and mean loss. An answer that was cut below its bound says nothing of it."""
    told = [
        (each.tokens, bound) for each, bound in zip(later, bounds, strict=True) if each.ended or each.tokens > bound
    ]
    if not told:
        return 1.0, 0.0
    short = np.array([tokens - bound for tokens, bound in told])
    loss = np.maximum(TARGET * short, (TARGET - 1) * short)
    return float(np.mean(short <= 0)), float(np.mean(loss))
