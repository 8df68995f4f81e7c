"""Which recorded workflows stand for all of them: K-medoids over pattern graphs (Concord, sec. 4.1).

The medoids are seeded by squared distance (Arthur and Vassilvitskii, "k-means++", 2007) and then moved to the graph of
their group that is nearest to all of it (Park and Jun, "A simple and fast algorithm for K-medoids clustering", 2009).
A workflow counts 0.9 for each hour since it ended; groups that count less than LEAST_USED are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.predict.pattern_graphs import MOST_GRAPHS, GraphSet, PatternGraph, Rows, set_of

DECAY = 0.9  # an hour
LEAST_USED = 0.05  # a workflow that was seen once is dropped after 28 hours
ROUNDS = 10

Floats = npt.NDArray[np.float64]


def decayed(used: float, hours: float) -> float:
    """A use count after so many hours."""
    return used * float(DECAY**hours)


def medoids(
    graphs: Sequence[PatternGraph],
    hours: Sequence[float],
    *,
    most: int = MOST_GRAPHS,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
) -> GraphSet:
    """`hours`: since each ended. The same input and seed give the same set. Raises ValueError if none is left, or there
    are too many kinds of calls. Cost: the square of the number of graphs."""
    weights = np.array([decayed(1.0, each) for each in hours])
    everything = set_of(graphs, weights.tolist(), {})
    distances = _distances(Rows.of(everything))
    chosen = _seeded(distances, weights, most, seed)
    nearest = distances[:, chosen].argmin(axis=1)
    for _ in range(ROUNDS):
        moved = _centred(distances, weights, chosen, nearest)
        if (moved == chosen).all():
            break
        chosen = moved
        nearest = distances[:, chosen].argmin(axis=1)
    used = np.bincount(nearest, weights=weights, minlength=len(chosen))
    kept = [place for place in range(len(chosen)) if used[place] >= LEAST_USED]
    return set_of([graphs[int(chosen[place])] for place in kept], used[kept].tolist(), about or {})


def _distances(rows: Rows) -> Floats:
    return np.array([1.0 - rows.whole(row) for row in range(len(rows.nodes))], dtype=np.float64)


def _seeded(distances: Floats, weights: Floats, most: int, seed: int) -> npt.NDArray[np.intp]:
    """At most `most` graphs, no two of them alike."""
    rng = np.random.default_rng(seed)
    chosen = [int(weights.argmax())]
    nearest = distances[:, chosen[0]].copy()
    while len(chosen) < most:
        odds = weights * np.maximum(nearest, 0.0) ** 2
        odds[nearest < 1e-6] = 0.0  # rounding: those that are one of the chosen
        whole = odds.sum()
        if not whole > 0:
            break
        chosen.append(int(rng.choice(len(weights), p=odds / whole)))
        np.minimum(nearest, distances[:, chosen[-1]], out=nearest)
    return np.array(chosen, dtype=np.intp)


def _centred(
    distances: Floats, weights: Floats, chosen: npt.NDArray[np.intp], nearest: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    moved = chosen.copy()
    for place in range(len(chosen)):
        mine = np.flatnonzero(nearest == place)
        if len(mine):
            costs = distances[np.ix_(mine, mine)] @ weights[mine]
            here = np.flatnonzero(mine == chosen[place])
            best = int(costs.argmin())
            if not len(here) or costs[best] < costs[here[0]] - 1e-12:
                moved[place] = mine[best]
    return moved
