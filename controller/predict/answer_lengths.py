"""What a gateway expects of the length of an answer, and what it learns from each that ended.

The expectation of a model without a forest in force is the recent mean of its kind of traffic (`OutputLengthModel`), as
it was before forests. With one (Concord 4.1) it is the median of the forest, beside a lower and an upper bound. The
levels of the upper bound follow the answers (`AdaptiveLevel`): for each model one for bounds predicted at the arrival,
and one for those predicted again once 50, 100, 200 and 400 tokens are out (`BoundLevels`), since those who are still
running then are others. All are judged when the answer has ended. An answer that was cut before its bound says nothing
of it; one that was cut beyond it shows that the bound was too low.

A forest predicts from `FEATURES`: numbers that a gateway can read from a request or remembers of earlier ones, never
text. `LengthHistory` keeps what it remembers, within bounds: for each kind of traffic (tenant, class, model) a fading
mean of the answers, and for each workflow its last call.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from controller.predict.length_forest import LengthForest
from controller.predict.lengths import OutputLengthModel

FEATURES = (
    "prompt_tokens",
    "max_tokens",  # 0: none was given
    "kind_mean",  # recent mean of the answers of this kind, tokens; 0 before the first
    "workflow_calls",  # before this one
    "workflow_answer",  # tokens of the last one, 0 before the first
    "workflow_growth",  # tokens of this prompt beyond the last one's
)
NEWEST = 0.2  # weight of the newest answer in the mean of its kind
MOST_KINDS, MOST_WORKFLOWS = 10_000, 50_000
TARGET = 0.9  # share of the answers that the upper bound is to cover
STEP = 0.01
LEAST_LEVEL, MOST_LEVEL = 0.5, 0.995
LOWER, MEDIAN = 0.1, 0.5  # levels of the lower bound and of the expectation
MAX_TOKENS = FEATURES.index("max_tokens")
MOST_AGE_S = 7 * 86_400.0  # of a version in force: traffic of a week ago says little of today's
MOST_STORED = 2_000  # kinds and workflows, for the next process
PRODUCED = (0, 50, 100, 200, 400)  # tokens out from which bounds have a level of their own, and coverage is told
LEAST_ANSWERS = 500  # recorded of a model, before a forest is trained on them

Kind = tuple[str, str, str]  # tenant, class, model
K = TypeVar("K")
V = TypeVar("V")


class _Call(NamedTuple):
    calls: int
    prompt_tokens: int
    answer_tokens: int


class LengthHistory:
    """Answers so far. Kinds and workflows that were not used for longest are forgotten first."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, float] = OrderedDict()
        self._workflows: OrderedDict[tuple[Kind, str], _Call] = OrderedDict()

    def features(self, kind: Kind, workflow: str, prompt_tokens: int, max_tokens: int | None) -> tuple[float, ...]:
        """As FEATURES. `workflow`: "" for none."""
        last = self._workflows.get((kind, workflow), _Call(0, prompt_tokens, 0)) if workflow else _Call(0, 0, 0)
        return (
            float(prompt_tokens),
            float(max_tokens or 0),
            self._kinds.get(kind, 0.0),
            float(last.calls),
            float(last.answer_tokens),
            float(prompt_tokens - last.prompt_tokens) if workflow else 0.0,
        )

    def observe(self, kind: Kind, workflow: str, prompt_tokens: int, answer_tokens: int) -> None:
        """An answer ended by itself."""
        mean = self._kinds.pop(kind, float(answer_tokens))
        self._kinds[kind] = mean + NEWEST * (answer_tokens - mean)
        if len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)
        if workflow:
            last = self._workflows.pop((kind, workflow), _Call(0, 0, 0))
            self._workflows[kind, workflow] = _Call(last.calls + 1, prompt_tokens, answer_tokens)
            if len(self._workflows) > MOST_WORKFLOWS:
                self._workflows.popitem(last=False)

    def state(self, most: int) -> dict[str, Any]:
        """What is remembered, of `most` kinds and workflows at most: those that were used last."""
        kinds = [[list(kind), mean] for kind, mean in _newest(self._kinds, most)]
        calls = [[list(kind), workflow, *call] for (kind, workflow), call in _newest(self._workflows, most)]
        return {"kinds": kinds, "workflows": calls}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError, and changes nothing, for anything else than a state."""
        kinds = OrderedDict((_kind(kind), float(mean)) for kind, mean in state["kinds"])
        calls = OrderedDict(
            ((_kind(kind), str(workflow)), _Call(int(calls), int(prompt), int(answer)))
            for kind, workflow, calls, prompt, answer in state["workflows"]
        )
        self._kinds, self._workflows = kinds, calls


def _newest(entries: OrderedDict[K, V], most: int) -> list[tuple[K, V]]:
    return list(islice(reversed(entries.items()), most))[::-1]


def _kind(raw: Sequence[Any]) -> Kind:
    tenant, slo_class, model = raw
    return str(tenant), str(slo_class), str(model)


class AdaptiveLevel:
    """The level at which the forest is asked, so that TARGET of the bounds hold whatever traffic has become (Gibbs and
    Candes, "Adaptive conformal inference under distribution shift", NeurIPS 2021): after each answer the level rises by
    STEP x TARGET if its bound was too low, and falls by STEP x (1 - TARGET) if it held."""

    def __init__(self, target: float = TARGET, step: float = STEP) -> None:
        self.target = target
        self.level = target
        self._step = step

    def observe(self, held: bool) -> None:
        moved = self.level + self._step * (self.target - held)
        self.level = min(MOST_LEVEL, max(LEAST_LEVEL, moved))


class PublishedVersion(NamedTuple):
    """The newest published version of a model's forest, or of a tenant's pattern graphs: its `subject`. `trained_at`:
    epoch seconds; `digest`: SHA-256 of its content, hex."""

    subject: str
    version: int
    trained_at: float
    digest: str


class VersionOutcome(NamedTuple):
    """A gateway took over a published version of its `subject`, or did not because of a `problem`. `at`: epoch
    seconds."""

    subject: str
    version: int
    problem: str
    at: float


class LengthsInForce(NamedTuple):
    """A version of a model's forest."""

    version: int
    forest: LengthForest


class Foretold(NamedTuple):
    """Tokens. `features`: what it was told from (FEATURES). `bounds`: lower and upper, and `version`
    of the forest that they are from; None of both without one."""

    expected: int
    features: tuple[float, ...]
    bounds: tuple[int, int] | None = None
    version: int | None = None


class AnswerBounds(NamedTuple):
    """Tokens that a running answer will have, predicted by `version` of the forest when `produced` of them were out."""

    produced: int
    lower: int
    upper: int
    version: int


def with_bounds(earlier: tuple[AnswerBounds, ...], newest: AnswerBounds) -> tuple[AnswerBounds, ...]:
    """Of one answer, the first ones that each level of PRODUCED gave: these judge it. A long answer is asked about so
    often that its later bounds would move the last level many times at once."""
    given = {_reached(each.produced) for each in earlier}
    return earlier if _reached(newest.produced) in given else (*earlier, newest)


class Hits(NamedTuple):
    """Answers that could be told from, and how many of them their upper bound covered."""

    answers: int
    covered: int


class BoundLevels:
    """Of one version: the level at which its upper bound is asked, and the answers that judged it, from each count of
    tokens in PRODUCED on."""

    def __init__(self) -> None:
        self._levels = {each: AdaptiveLevel() for each in PRODUCED}
        self._hits = dict.fromkeys(PRODUCED, Hits(0, 0))

    def level(self, produced: int) -> float:
        return self._levels[_reached(produced)].level

    def hits(self, produced: int) -> Hits:
        return self._hits[_reached(produced)]

    def judge(self, bounds: AnswerBounds, answer_tokens: int, *, ended: bool) -> None:
        """A bound that `max_tokens` cut holds of any answer, so that it says nothing of the forest."""
        held = answer_tokens <= bounds.upper
        if held and not ended:
            return
        reached = _reached(bounds.produced)
        before = self._hits[reached]
        self._hits[reached] = Hits(before.answers + 1, before.covered + held)
        self._levels[reached].observe(held)

    def state(self) -> list[list[Any]]:
        """For each of PRODUCED: tokens out, level, answers, and how many of them were covered."""
        return [[each, self._levels[each].level, *self._hits[each]] for each in PRODUCED]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        """Other counts of tokens than PRODUCED are left out. Raises TypeError or ValueError for what is no state."""
        for produced, level, answers, covered in state:
            known, hits = min(MOST_LEVEL, max(LEAST_LEVEL, float(level))), Hits(int(answers), int(covered))
            if produced in self._levels:
                self._levels[produced].level, self._hits[produced] = known, hits


def _reached(produced: int) -> int:
    """The last of PRODUCED that so many tokens have reached."""
    return PRODUCED[bisect_right(PRODUCED, produced) - 1]


class AnswerLengths:
    """Memory is bounded as that of its parts. `in_force`: by model, replaced as a whole by `take`."""

    def __init__(self) -> None:
        self.in_force: Mapping[str, LengthsInForce] = {}
        self._means = OutputLengthModel()
        self._history = LengthHistory()
        self._levels: dict[str, BoundLevels] = {}  # by model, since its version in force was taken and judged
        self._levels_before: dict[str, tuple[int, BoundLevels]] = {}  # by model: of an earlier process, see restore

    def take(self, in_force: Mapping[str, LengthsInForce]) -> None:
        """From the next request on. A model whose version changed starts again at the level's target."""
        for model in set(self.in_force) | set(in_force):
            before, after = self.in_force.get(model), in_force.get(model)
            if before is None or after is None or before.version != after.version:
                self._levels.pop(model, None)
            version, levels = self._levels_before.get(model, (None, BoundLevels()))
            if after is not None and after.version == version:
                self._levels[model] = levels
                del self._levels_before[model]
        self.in_force = dict(in_force)

    def state(self) -> dict[str, Any]:
        """All that was learned of answers, as JSON can hold it. `levels` is what releases with one level for a model
        read and write: that of arrivals. The others, `later_levels`, are beside it: each reads what the other wrote."""
        followed = {
            model: (each.version, self._levels[model].state())
            for model, each in self.in_force.items()
            if model in self._levels
        }
        return {
            "means": self._means.state(),
            "history": self._history.state(MOST_STORED),
            "levels": {model: [version, *first[1:]] for model, (version, (first, *_)) in followed.items()},
            "later_levels": {model: later for model, (_, (_, *later)) in followed.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what an earlier process learned. The level of a bound is taken over with the forest's version that
        it is of. Raises KeyError, TypeError or ValueError, and changes nothing, for anything else than a state."""
        levels: dict[str, tuple[int, BoundLevels]] = {}
        later = dict(state.get("later_levels", {}))
        for model, (version, *first) in dict(state["levels"]).items():
            known = BoundLevels()
            known.restore([[0, *first], *later.get(model, ())])
            levels[str(model)] = int(version), known
        means, history = OutputLengthModel(), LengthHistory()
        means.restore(state["means"])
        history.restore(state["history"])
        self._means, self._history, self._levels_before = means, history, levels

    def level(self, model: str, produced: int = 0) -> float:
        """At which its upper bound is asked now, 0 to 1, with so many tokens out."""
        known = self._levels.get(model)
        return known.level(produced) if known is not None else TARGET

    def hits(self, model: str, produced: int = 0) -> Hits:
        """Of its version in force, and bounds that were predicted with so many tokens out."""
        known = self._levels.get(model)
        return known.hits(produced) if known is not None else Hits(0, 0)

    def foretell(self, kind: Kind, workflow: str, prompt_tokens: int, max_tokens: int | None) -> Foretold:
        """`kind`: tenant, class, model. Expected tokens are at least 1 and at most `max_tokens`; so are the bounds."""
        return self.foretell_from(self._history.features(kind, workflow, prompt_tokens, max_tokens), kind, max_tokens)

    def foretell_from(self, features: tuple[float, ...], kind: Kind, max_tokens: int | None) -> Foretold:
        """The same for `features` that are known."""
        found = self.in_force.get(kind[2])
        if found is None:
            return Foretold(self._means.predict(*kind, max_tokens), features)
        lower, median, upper = found.forest.quantiles(features, (LOWER, MEDIAN, self.level(kind[2])))
        most = max_tokens if max_tokens is not None and max_tokens > 0 else math.inf
        low, expected, high = (int(max(1, min(each, most))) for each in (lower, round(median), math.ceil(upper)))
        return Foretold(expected, features, (low, high), found.version)

    def bounds_again(self, model: str, foretold: Foretold, produced: int) -> AnswerBounds | None:
        """Of an answer of which `produced` tokens are out and which still runs; None without a forest. Reads only, so
        that it may run in another thread."""
        found = self.in_force.get(model)
        if found is None:
            return None
        lower, upper = found.forest.quantiles(foretold.features, (LOWER, self.level(model, produced)), produced)
        most = foretold.features[MAX_TOKENS] or math.inf
        high = int(max(produced, min(math.ceil(upper), most)))
        return AnswerBounds(produced, min(max(produced, int(lower)), high), high, found.version)

    def observe(
        self,
        kind: Kind,
        workflow: str,
        foretold: Foretold,
        answer_tokens: int,
        *,
        ended: bool,
        again: Sequence[AnswerBounds] = (),
    ) -> None:
        """An answer came whole; `ended` False: it reached the most that it could have. The mean counts these too, since
        that is what engines will produce again. `again`: what `with_bounds` kept while it ran."""
        self._judge(kind[2], foretold, answer_tokens, again, ended=ended)
        self._means.observe(*kind, answer_tokens)
        if ended:
            self._history.observe(kind, workflow, int(foretold.features[0]), answer_tokens)

    def cut_off(self, model: str, foretold: Foretold, answer_tokens: int, again: Sequence[AnswerBounds] = ()) -> None:
        """An answer did not come whole (its client left, its time was over, its engine was lost): it would have been
        longer than this, so that bounds below were too low. How long such answers are is not known."""
        self._judge(model, foretold, answer_tokens, again, ended=False)

    def _judge(
        self, model: str, foretold: Foretold, answer_tokens: int, again: Sequence[AnswerBounds], *, ended: bool
    ) -> None:
        found = self.in_force.get(model)
        if found is None:
            return
        given = [*again]
        if foretold.bounds is not None and foretold.version is not None:
            given.append(AnswerBounds(0, *foretold.bounds, foretold.version))
        for each in given:
            if each.version == found.version:
                self._levels.setdefault(model, BoundLevels()).judge(each, answer_tokens, ended=ended)
