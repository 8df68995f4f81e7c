"""Bounds on the length of an answer from a quantile forest (Concord 4.1; Meinshausen, "Quantile regression forests",
Journal of Machine Learning Research 7, 2006).

A forest is trained by `workers.analysis.length_forest` on recorded requests and read here as plain arrays. A request
goes down every tree to a leaf; the lengths of the training answers in these leaves, counted as often as they occur, are
the distribution of its own. Refinement: once n tokens are out, only training answers that were longer than n count. The
paper calls the forest again with more text; text is never kept here, and the condition does the same without it. Where
the leaves have fewer than `FEW` longer answers, all longer training answers stand for those that they lack: of two
answers the upper one is no quantile at 0.9.

Answers that were cut (by `max_tokens`, a deadline, a client that left) say only that they would have been longer. Such
a censored answer passes its weight on to the longer answers (Efron, "The two sample problem with censored data", 1967),
which is the estimate of Kaplan and Meier. The longest counts as whole, since nothing is known beyond it.

At the arrival and without censored answers all figures are those of the library `quantile-forest` with all samples of a
leaf and linear interpolation. Cost: O(trees x depth + m log m) with m samples in the leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.core.errors import ConfigError
from controller.predict.array_files import from_file, to_file

MAGIC = b"slackline length forest 1\n"
MOST_FEATURES = 64
FEW = 30  # answers that a quantile of the longer ones is read from: of fewer, the highest is below it too often
POINTS = 64  # that stand for all answers which were longer
MOST_LONGER = 1_000  # numbers of tokens for which these are kept
_ARRAYS = ("feature", "threshold", "left", "right", "roots", "begin", "end", "members", "lengths", "ended")

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]
Node = tuple[Any, ...]  # feature, threshold, left and right; or -1 and the members of a leaf


@dataclass(frozen=True, eq=False)
class LengthForest:
    """`names`: of the features, in order. `about`: what the forest was trained on, for people.

    Nodes of all trees in a row: `feature` (-1 for a leaf), `threshold` (left if the feature is at most this), `left`,
    `right`, the `roots`, and for leaves `begin` and `end` within `members`. Members are training answers by rank:
    `lengths` (tokens, ascending) and `ended` (False: censored). At equal length those that ended come first.
    """

    names: tuple[str, ...]
    feature: Integers
    threshold: Floats
    left: Integers
    right: Integers
    roots: Integers
    begin: Integers
    end: Integers
    members: Integers
    lengths: Integers
    ended: npt.NDArray[np.bool_]
    about: Mapping[str, Any]

    @cached_property
    def _trees(self) -> list[Node]:
        """The roots. As tuples, which hold each other: a request between others finds little of this in the processor's
        caches, and a step down then waits for two places in memory, where one list for each array is five."""
        nodes: list[Node] = [()] * len(self.feature)
        arrays = (self.feature, self.threshold, self.left, self.right, self.begin, self.end)
        rows = list(zip(*(each.tolist() for each in arrays), strict=True))
        for at in reversed(range(len(rows))):  # children come after their parent
            feature, threshold, left, right, begin, end = rows[at]
            inner = feature >= 0
            nodes[at] = (feature, threshold, nodes[left], nodes[right]) if inner else (-1, self.members[begin:end])
        return [nodes[root] for root in self.roots.tolist()]

    @cached_property
    def _all_ended(self) -> bool:
        return bool(self.ended.all())

    def prepare(self) -> None:
        """Make the trees that it is read from now (tens of milliseconds), and not for the first request."""
        self._trees  # noqa: B018

    def quantiles(self, features: Sequence[float], levels: Sequence[float], produced: int = 0) -> list[float]:
        """Tokens of the whole answer at each level (0 to 1), given that more than `produced` tokens come. A request
        beyond all training answers gets `produced` + 1. Raises ValueError for another number of features."""
        ranks = self._ranks(features)
        values = self.lengths.take(ranks)
        if produced:
            first = int(values.searchsorted(produced, side="right"))
            ranks, values = ranks[first:], values[first:]
            known = int(np.count_nonzero(np.diff(ranks))) + 1 if len(ranks) else 0
            if known < FEW:
                return self._with_all(ranks, values, known, levels, produced)
        ended = None if self._all_ended else self.ended.take(ranks)
        if ended is None or ended.all():
            count = len(values)
            return [_between(values, 1.0 + level * (count - 1)) for level in levels]
        weights = _passed_on(ended)
        seen = weights > 0
        return _weighted(values[seen], weights[seen], levels)

    def _with_all(
        self, ranks: Integers, values: npt.NDArray[Any], known: int, levels: Sequence[float], produced: int
    ) -> list[float]:
        """With all training answers that were longer in place of those that the leaves lack to `FEW`. `known`: how many
        the leaves have, each once."""
        points = self._longer(produced)
        if not len(points):
            return [float(produced + 1)] * len(levels)
        weights = np.full(len(points), (FEW - known) / len(points))
        if known:
            own = _passed_on(self.ended[ranks])
            values, weights = np.concatenate((values, points)), np.concatenate((own * (known / own.sum()), weights))
            order = values.argsort(kind="stable")
            values, weights = values[order], weights[order]
        else:
            values = points
        upto = weights.cumsum() - weights / 2
        return [float(each) for each in np.interp(np.asarray(levels) * FEW, upto, values)]

    def _longer(self, produced: int) -> Floats:
        """`POINTS` quantiles of all training answers that were longer; empty if none was."""
        if (found := self._known_longer.get(produced)) is None:
            first = int(self.lengths.searchsorted(produced, side="right"))
            values, weights = self.lengths[first:], _passed_on(self.ended[first:])
            seen = weights > 0
            middles = ((np.arange(POINTS) + 0.5) / POINTS).tolist()
            found = np.array(_weighted(values[seen], weights[seen], middles) if len(values) else [], dtype=np.float64)
            if len(self._known_longer) >= MOST_LONGER:
                self._known_longer.clear()
            self._known_longer[produced] = found
        return found

    @cached_property
    def _known_longer(self) -> dict[int, Floats]:
        return {}

    def _ranks(self, features: Sequence[float]) -> Integers:
        """The training answers in the leaves of these features, ascending, each as often as it is in one."""
        if len(features) != len(self.names):
            raise ValueError(f"{len(features)} features, and this forest has {len(self.names)}")
        row = np.asarray(features, dtype=np.float32).tolist()  # as in training
        found = []
        for root in self._trees:
            node = root
            while (tested := node[0]) >= 0:
                node = node[2] if row[tested] <= node[1] else node[3]
            found.append(node[1])
        ranks = np.concatenate(found)
        ranks.sort()
        return ranks

    # ---- as a file --------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """A digest and plain arrays; no code."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return to_file(MAGIC, {"names": self.names, "about": dict(self.about)}, arrays)

    @classmethod
    def from_bytes(cls, content: bytes) -> LengthForest:
        """Raises ConfigError for what is no forest of this version, damaged, too large or inconsistent."""
        told, arrays = from_file(MAGIC, "length forest", _ARRAYS, content)
        try:
            forest = cls(tuple(told["names"]), **arrays, about=told["about"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the length forest cannot be read: {error}") from error
        forest._check()
        return forest

    def _check(self) -> None:
        """Raises ConfigError where following the arrays would leave them."""
        nodes, samples = len(self.feature), len(self.lengths)
        inner = self.feature >= 0
        one_row = all(getattr(self, name).ndim == 1 for name in _ARRAYS)
        alike = all(len(getattr(self, name)) == nodes for name in ("threshold", "left", "right", "begin", "end"))
        if not (one_row and alike and 1 <= len(self.names) <= MOST_FEATURES and len(self.ended) == samples > 0):
            raise ConfigError("the length forest has arrays of wrong lengths")
        here = np.arange(nodes)
        within = (
            (self.feature < len(self.names)).all()
            and ((self.left > here) & (self.right > here) & (self.left < nodes) & (self.right < nodes))[inner].all()
            and ((self.begin >= 0) & (self.begin < self.end) & (self.end <= len(self.members)))[~inner].all()
            and len(self.roots) > 0
            and ((self.roots >= 0) & (self.roots < nodes)).all()
            and ((self.members >= 0) & (self.members < samples)).all()
            and (np.diff(self.lengths) >= 0).all()
        )
        if not within:
            raise ConfigError("the length forest points outside of itself")


def _passed_on(ended: npt.NDArray[np.bool_]) -> Floats:
    """Weights, 1 each at first, after each censored answer gave its own to the longer ones, in proportion to theirs
    (Kaplan-Meier). Same sum; the longest keeps what it gets."""
    count = len(ended)
    died = ended / np.arange(count, 0, -1.0)
    died[-1:] = 1.0
    survived = np.ones(count)
    np.cumprod(1.0 - died[:-1], out=survived[1:])
    return np.asarray(survived * died * count, dtype=np.float64)


def _between(values: Integers, rank: float) -> float:
    """Linear between ranks, of which the first is 1."""
    whole = int(rank)
    below = float(values[whole - 1])
    return below if rank == whole else below + (rank - whole) * (float(values[whole]) - below)


def _weighted(values: Integers, weights: Floats, levels: Sequence[float]) -> list[float]:
    """The same, as if each value occurred as often as its weight says: rank 1 + level (sum - 1)."""
    upto = weights.cumsum()
    last = len(values) - 1
    total = float(upto[last])
    found = []
    for level in levels:
        rank = 1.0 + level * max(0.0, total - 1.0)
        place = min(int(upto.searchsorted(rank)), last)
        # Between the last occurrence of a value and the first of the next lies one rank.
        share = 1.0 if place == 0 else min(1.0, rank - float(upto[place - 1]))
        here = float(values[place])
        found.append(here if share >= 1.0 else float(values[place - 1]) * (1.0 - share) + share * here)
    return found
