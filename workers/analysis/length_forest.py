"""Trains the forest that bounds the lengths of answers, which `controller.predict.length_forest` reads without a
library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.predict.length_forest import LengthForest

TREES = 12  # 50 bound no better on later parts of traces, at five times the cost of a prediction
LEAF = 20  # training answers in a leaf, at least
SPLIT_FEATURES = 0.7  # share of the features that are looked at for a split
MOST_ANSWERS = 20_000  # the newest
CENSORED = 0.25  # added to the length of a censored answer while training, so that its rank says what it is


def train(
    names: Sequence[str],
    features: npt.NDArray[np.float64],
    lengths: npt.NDArray[np.int64],
    ended: npt.NDArray[np.bool_],
    *,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
) -> LengthForest:
    """`features`: a row for each answer, oldest first, with the columns `names`; `lengths`: its tokens; `ended`: False
    where it was cut, so that it would have been longer. The same input and seed give the same forest. Raises ValueError
    for fewer than two leaves of answers."""
    if len(lengths) < 2 * LEAF:
        raise ValueError(f"{len(lengths)} answers, and a forest needs at least {2 * LEAF}")
    model = fitted(features[-MOST_ANSWERS:], lengths[-MOST_ANSWERS:], ended[-MOST_ANSWERS:], seed)
    return as_arrays(model, names, {"answers": min(len(lengths), MOST_ANSWERS), "seed": seed, **(about or {})})


def fitted(
    features: npt.NDArray[np.float64], lengths: npt.NDArray[np.int64], ended: npt.NDArray[np.bool_], seed: int
) -> Any:
    """The library's own model."""
    from quantile_forest import RandomForestQuantileRegressor  # only this process has it

    model = RandomForestQuantileRegressor(
        n_estimators=TREES,
        min_samples_leaf=LEAF,
        max_samples_leaf=None,
        max_features=SPLIT_FEATURES,
        random_state=seed,
        n_jobs=1,
    )
    return model.fit(features, lengths + np.where(ended, 0.0, CENSORED))


def as_arrays(model: Any, names: Sequence[str], about: Mapping[str, Any]) -> LengthForest:
    """A fitted model as plain arrays."""
    nodes: dict[str, list[npt.NDArray[Any]]] = {"feature": [], "threshold": [], "left": [], "right": []}
    roots, begin, end, members = [], [], [], []
    count = held = 0
    leaves = np.asarray(model.forest_.y_train_leaves)  # tree, node, output, member: rank + 1, or 0
    for number, estimator in enumerate(model.estimators_):
        tree = estimator.tree_
        inner = tree.children_left >= 0
        roots.append(count)
        nodes["feature"].append(np.where(inner, tree.feature, -1))
        nodes["threshold"].append(np.where(inner, tree.threshold, 0.0))
        nodes["left"].append(np.where(inner, tree.children_left + count, 0))
        nodes["right"].append(np.where(inner, tree.children_right + count, 0))
        for node in range(tree.node_count):
            here = leaves[number, node, 0]
            here = here[here > 0] - 1 if not inner[node] else here[:0]
            begin.append(held)
            held += len(here)
            end.append(held)
            members.append(here)
        count += tree.node_count
    ordered = np.asarray(model.forest_.y_train)[0]
    return LengthForest(
        names=tuple(names),
        feature=np.concatenate(nodes["feature"]).astype(np.int32),
        threshold=np.concatenate(nodes["threshold"]).astype(np.float64),
        left=np.concatenate(nodes["left"]).astype(np.int32),
        right=np.concatenate(nodes["right"]).astype(np.int32),
        roots=np.asarray(roots, dtype=np.int32),
        begin=np.asarray(begin, dtype=np.int32),
        end=np.asarray(end, dtype=np.int32),
        members=np.concatenate(members).astype(np.int32),
        lengths=np.floor(ordered).astype(np.int32),
        ended=ordered == np.floor(ordered),
        about=dict(about),
    )
