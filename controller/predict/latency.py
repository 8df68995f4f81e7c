"""Step latency from the shape of a batch: HyperFlexis eq. 1 (prefill), eq. 2 (decode), eq. 5 (token budget).

`LatencyModel` predicts: lengths in tokens, results in seconds. For a prompt with a cached prefix of length `past`,
new * (new + 2 * past) replaces the square of its length, because that is the cost of attention over both.

`OnlineFit` refits an instance's model from first tokens and progress of its streams, which the gateway sees anyway.
While one request decodes from token i to token j, the engine runs j - i steps, and the work of these steps adds up:

    elapsed = steps * (a' + b' * context + c' * batch) + b * prefilled tokens + c * their squares

While an engine only prefills (a prefill instance, or one that was idle), its prefill batches add up in the same way:

    elapsed = batches * a + b * prefilled tokens + c * their squares

Both are linear in the coefficients. Recursive normal equations with forgetting keep the newest few hundred intervals in
42 numbers. The profile that an instance starts with enters as a few intervals, so that the first unusual ones cannot
move the fit far, and fades as measurements come in. A profile may be of another machine, which is slower or faster in
everything: it is first scaled by how much longer or shorter than predicted the recent intervals were. Since such a
profile loses requests as long as it is believed, the first refits come after a few intervals each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from controller.core.load import WORK_WINDOW_S
from controller.core.types import LatencyCoefficients
from controller.predict.latency_fit import solve_nonnegative

UNBOUNDED = 1 << 40  # tokens; more than any queue holds
# For models without a profile: slow, so that the first requests are sent carefully; corrected online.
UNPROFILED = LatencyCoefficients(0.01, 2e-4, 0.0, 0.02, 1e-7, 3e-4)
COLUMNS = 6  # a', b', c', a, b, c: the solver gives up the last one first where two are collinear
LEAST_PRIOR = 0.005  # final weight of the profile, which keeps coefficients that the traffic never shows
ENOUGH = 25  # intervals of a kind after which its coefficients are measured ones
KEPT = 0.95  # of a running mean per interval: some 20 intervals count
FEWEST = 5  # intervals that say how fast an instance is beside its profile
SAME_BATCH_S = 0.001  # first tokens closer together were computed in one batch


class LatencyModel:
    """Step latency of one model on one kind of device."""

    __slots__ = ("coefficients",)

    def __init__(self, coefficients: LatencyCoefficients = UNPROFILED) -> None:
        self.coefficients = coefficients

    def prefill(self, new: Sequence[int], past: Sequence[int] = ()) -> float:
        """Eq. 1 for one prefill batch; an empty batch takes 0 s, not a."""
        if not new:
            return 0.0
        cached = past or (0,) * len(new)
        squares = sum(n * (n + 2 * p) for n, p in zip(new, cached, strict=True))
        return self.prefill_sums(sum(new), squares)

    def prefill_sums(self, tokens: int, squares: int) -> float:
        """Eq. 1, from the sums of lengths and of squares."""
        if tokens <= 0:
            return 0.0
        a, b, c = self.coefficients[:3]
        return a + b * tokens + c * squares

    def decode(self, batch: int, context_sum: int) -> float:
        """Eq. 2: seconds of a decode step of `batch` sequences of `context_sum` tokens in all; 0 for an empty batch."""
        if batch <= 0:
            return 0.0
        k = self.coefficients
        return k.decode_a + k.decode_b * context_sum + k.decode_c * batch

    def step(self, tokens: int, squares: int, batch: int, context_sum: int) -> float:
        """Seconds of a mixed step: the larger of the two constants and both linear parts (eq. 1 and 2 leave this
        open).
        """
        if tokens <= 0:
            return self.decode(batch, context_sum)
        if batch <= 0:
            return self.prefill_sums(tokens, squares)
        k = self.coefficients
        linear = k.prefill_b * tokens + k.prefill_c * squares + k.decode_b * context_sum + k.decode_c * batch
        return max(k.prefill_a, k.decode_a) + linear

    def marginal_decode(self, context: int, batch: float) -> float:
        """Engine seconds that one sequence adds with each token it decodes, in a batch of `batch`."""
        k = self.coefficients
        return k.decode_a / max(1.0, batch) + k.decode_b * context + k.decode_c

    def token_budget(self, ttft_s: float, tpot_s: float, decode_s: float, waiting_tokens: int = 0) -> int:
        """Eq. 5: prompt tokens of the next prefill batch that still meet both targets; never negative.

        `waiting_tokens` already wait in the engine and are part of that batch. If decode_s >= tpot_s, eq. 5 has no
        solution and the result is 0.
        """
        if decode_s >= tpot_s:
            return 0
        k = self.coefficients
        if math.isinf(ttft_s):
            return UNBOUNDED
        kept = 1.0 if math.isinf(tpot_s) else (tpot_s - decode_s) / tpot_s
        seconds = ttft_s * kept - k.prefill_a
        if seconds <= 0:
            return 0
        if k.prefill_b <= 0:
            return UNBOUNDED
        # An exact 5500 can be 5499.999... in floats: round up within a billionth of the next integer.
        return max(0, math.floor(seconds / k.prefill_b + 1e-6) - waiting_tokens)

    def maturity(self, prefill_s: float, decode_s: float, tpot_s: float) -> float:
        """Seconds until a batch is prefilled and amortised (Alg. 1): E_P + E_P / relax * E_d.

        Infinite if relax <= 0: then only an event (a running request ends) can make the instance mature.
        """
        if prefill_s <= 0:
            return 0.0
        if math.isinf(tpot_s):
            return prefill_s
        relax = tpot_s - decode_s
        if relax <= 0:
            return math.inf
        return prefill_s + prefill_s / relax * decode_s


class OnlineFit:
    """`forgetting` per interval (0.995: some 200 intervals count); a refit every `every` intervals, and every `FEWEST`
    of the first ones.

    `decode_samples` and `prefill_samples` count the intervals that say something about decode steps and about prefills.
    `error` is the recent mean of |predicted - measured| / measured, None before the first interval.
    """

    def __init__(
        self, prior: LatencyCoefficients, *, prior_weight: float = 20.0, forgetting: float = 0.995, every: int = 25
    ) -> None:
        self.coefficients = prior
        self.samples = 0
        self.decode_samples = 0
        self.prefill_samples = 0
        self.error: float | None = None
        self._prior = prior
        self._speeds = (
            RecentRatio(),
            RecentRatio(),
        )  # of prefills alone, of all other intervals
        self._prior_weight = prior_weight
        self._forgetting = forgetting
        self._every = every
        self._matrix = [[0.0] * COLUMNS for _ in range(COLUMNS)]
        self._right = [0.0] * COLUMNS

    def observe(self, steps: int, batch: float, context_sum: float, tokens: int, squares: int, seconds: float) -> bool:
        """One interval of `steps` engine steps; True when the coefficients were refitted."""
        if steps <= 0 or seconds <= 0:
            return False
        self.decode_samples += 1
        self.prefill_samples += tokens > 0
        return self._observe((steps, steps * context_sum, steps * batch, 0, tokens, squares), seconds)

    def observe_prefills(self, batches: int, tokens: int, squares: int, seconds: float) -> bool:
        """One interval in which the engine did nothing else; True when the coefficients were refitted."""
        if batches <= 0 or tokens <= 0 or seconds <= 0:
            return False
        self.prefill_samples += 1
        return self._observe((0, 0.0, 0.0, batches, tokens, squares), seconds)

    def _observe(self, row: tuple[float, ...], seconds: float) -> bool:
        predicted = _predict(self.coefficients, row)
        error = abs(predicted - seconds) / seconds
        self.error = error if self.error is None else KEPT * self.error + (1 - KEPT) * error
        self._speeds[row[0] > 0].add(seconds, _predict(self._prior, row))
        self._add([value / seconds for value in row], 1.0, self._forgetting)
        self.samples += 1
        if self.samples % (self._every if self.samples > self._every else min(FEWEST, self._every)):
            return False
        self._refit()
        return True

    def _add(self, scaled: list[float], weight: float, keep: float) -> None:
        self._right = [old * keep + weight * value for old, value in zip(self._right, scaled, strict=True)]
        for row, value in zip(self._matrix, scaled, strict=True):
            weighed = weight * value
            row[:] = [old * keep + weighed * other for old, other in zip(row, scaled, strict=True)]

    def _refit(self) -> None:
        """Solve measured and prior rows together."""
        matrix = [list(row) for row in self._matrix]
        right = list(self._right)
        prior = self._scaled_prior()
        for row in _prior_rows(prior):
            weight = self._prior_weight / 5 * max(LEAST_PRIOR, self._forgetting**self.samples)
            for i in range(COLUMNS):
                right[i] += weight * row[i]
                for j in range(COLUMNS):
                    matrix[i][j] += weight * row[i] * row[j]
        a, context, batch, constant, linear, quadratic = solve_nonnegative(matrix, right)
        # A coefficient that measurements push to nothing keeps a tenth of its profile: a free prefill would admit all.
        self.coefficients = LatencyCoefficients(
            max(constant, 0.1 * prior.prefill_a),
            max(linear, 0.1 * prior.prefill_b),
            quadratic,
            max(a, 0.1 * prior.decode_a),
            context,
            batch,
        )

    def state(self) -> dict[str, Any]:
        """All that was learned, as numbers that JSON can hold."""
        return {
            "prior": list(self._prior),
            "coefficients": list(self.coefficients),
            "samples": [self.samples, self.decode_samples, self.prefill_samples],
            "error": self.error,
            "speeds": [each.state() for each in self._speeds],
            "matrix": [list(row) for row in self._matrix],
            "right": list(self._right),
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on from `state`. False, and nothing changes, if that began with another profile. Raises KeyError,
        TypeError or ValueError for anything else than a state."""
        matrix, right = [_numbers(row, COLUMNS) for row in state["matrix"]], _numbers(state["right"], COLUMNS)
        if len(matrix) != COLUMNS:
            raise ValueError(f"a matrix of {len(matrix)} rows")
        coefficients, error = LatencyCoefficients(*_numbers(state["coefficients"], COLUMNS)), state["error"]
        samples, decodes, prefills = (int(each) for each in _numbers(state["samples"], 3))
        alone, mixed = (RecentRatio.of(each) for each in state["speeds"])
        error = None if error is None else _numbers([error], 1)[0]
        if _numbers(state["prior"], COLUMNS) != list(self._prior):
            return False
        self._matrix, self._right, self._speeds = matrix, right, (alone, mixed)
        self.samples, self.decode_samples, self.prefill_samples = samples, decodes, prefills
        self.coefficients, self.error = coefficients, error
        return True

    def _scaled_prior(self) -> LatencyCoefficients:
        alone, mixed = self._speeds
        either = alone.value or mixed.value or alone.with_another(mixed) or 1.0
        prefill, decode = alone.value or either, mixed.value or either
        k = self._prior
        return LatencyCoefficients(*(prefill * each for each in k[:3]), *(decode * each for each in k[3:]))


class RecentRatio:
    """The geometric mean of the last measured times over predicted ones; None before there are `FEWEST`."""

    def __init__(self) -> None:
        self._log = 0.0
        self._count = 0

    def add(self, measured: float, predicted: float) -> None:
        if predicted > 0:
            self._count += 1
            weight = max(1 - KEPT, 1 / self._count)
            self._log += weight * (math.log(measured / predicted) - self._log)

    @property
    def value(self) -> float | None:
        return math.exp(self._log) if self._count >= FEWEST else None

    def with_another(self, other: RecentRatio) -> float | None:
        """The mean of both, where neither has `FEWEST`; None if they have fewer together."""
        count = self._count + other._count
        return math.exp((self._count * self._log + other._count * other._log) / count) if count >= FEWEST else None

    def state(self) -> list[float]:
        return [self._log, self._count]

    @classmethod
    def of(cls, state: Sequence[float]) -> RecentRatio:
        made = cls()
        made._log, count = _numbers(state, 2)
        made._count = int(count)
        return made


class RecentErrors:
    """Mean and deviation of measured minus predicted seconds, over the last 20 or so; 0 before there are `FEWEST`."""

    __slots__ = ("_count", "_mean", "_square")

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._square = 0.0

    def add(self, error_s: float) -> None:
        self._count += 1
        weight = max(1 - KEPT, 1 / self._count)
        self._mean += weight * (error_s - self._mean)
        self._square += weight * (error_s * error_s - self._square)

    @property
    def known(self) -> bool:
        return self._count >= FEWEST

    @property
    def value(self) -> tuple[float, float]:
        if not self.known:
            return 0.0, 0.0
        return self._mean, math.sqrt(max(0.0, self._square - self._mean * self._mean))

    def state(self) -> list[float]:
        return [self._count, self._mean, self._square]

    @classmethod
    def of(cls, state: Sequence[float]) -> RecentErrors:
        made = cls()
        count, made._mean, made._square = _numbers(state, 3)
        made._count = int(count)
        return made


class ErrorsByKind:
    """The same for each kind of traffic (tenant, class), and for all where too few of a kind were seen."""

    def __init__(self) -> None:
        self._all = RecentErrors()
        self._kinds: dict[tuple[str, str], RecentErrors] = {}

    def add(self, kind: tuple[str, str], error_s: float) -> None:
        self._all.add(error_s)
        self._kinds.setdefault(kind, RecentErrors()).add(error_s)

    def of(self, kind: tuple[str, str]) -> tuple[float, float]:
        own = self._kinds.get(kind)
        return own.value if own is not None and own.known else self._all.value

    def state(self) -> list[Any]:
        return [self._all.state(), [[*kind, each.state()] for kind, each in self._kinds.items()]]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> ErrorsByKind:
        """Raises TypeError or ValueError for anything else than a state."""
        made, (whole, kinds) = cls(), state
        made._all = RecentErrors.of(whole)
        made._kinds = {(str(tenant), str(name)): RecentErrors.of(each) for tenant, name, each in kinds}
        return made


def _numbers(raw: Sequence[Any], count: int) -> list[float]:
    """Raises TypeError or ValueError unless they are so many finite numbers."""
    found = [float(each) for each in raw]
    if len(found) != count or not all(map(math.isfinite, found)):
        raise ValueError(f"{count} numbers were expected")
    return found


def _predict(k: LatencyCoefficients, row: tuple[float, ...]) -> float:
    each = (k.decode_a, k.decode_b, k.decode_c, k.prefill_a, k.prefill_b, k.prefill_c)
    return sum(value * seconds for value, seconds in zip(row, each, strict=True))


def _prior_rows(prior: LatencyCoefficients) -> list[list[float]]:
    """Typical intervals as the profile predicts them, each divided by its time: five mixed ones, and a constant of its
    own size for the prefill batches, which mixed intervals do not show."""
    rows = [[0.0, 0.0, 0.0, 1.0 / prior.prefill_a, 0.0, 0.0]] if prior.prefill_a > 0 else []
    for steps, batch, context, tokens in (
        (10, 1, 200, 0),
        (10, 8, 4000, 0),
        (10, 24, 20000, 0),
        (5, 8, 2000, 500),
        (5, 4, 2000, 2000),
    ):
        squares = tokens * tokens
        seconds = (
            steps * (prior.decode_a + prior.decode_b * context + prior.decode_c * batch)
            + prior.prefill_b * tokens
            + prior.prefill_c * squares
        )
        if seconds > 0:
            rows.append(
                [
                    steps / seconds,
                    steps * context / seconds,
                    steps * batch / seconds,
                    0.0,
                    tokens / seconds,
                    squares / seconds,
                ]
            )
    return rows


class WorkRate:
    """Seconds of work for each second of time, over about the last `WORK_WINDOW_S` (exponentially weighted)."""

    __slots__ = ("_at", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        self._sum = self._sum * self._kept(now) + seconds
        self._at = now

    def value(self, now: float) -> float:
        return self._sum * self._kept(now) / WORK_WINDOW_S

    def _kept(self, now: float) -> float:
        return math.exp((self._at - now) / WORK_WINDOW_S)


class PrefillWork:
    """Prefill work at an instance lately, in seconds for each second: that of this gateway and that of others.

    Of others only the tokens are known. Their prompts are taken to be like those that ended here last, so that a token
    takes its part of the constant of a prefill too.
    """

    __slots__ = ("_others", "_ours", "_s_a_token", "_tokens")

    def __init__(self) -> None:
        self._ours, self._others = WorkRate(), WorkRate()
        self._tokens = WorkRate()
        self._s_a_token: float | None = None

    def ended(self, seconds: float, tokens: int, now: float) -> None:
        """A prefill of ours of so many tokens, which was predicted to take so long."""
        self._ours.add(seconds, now)
        self._tokens.add(tokens, now)
        if tokens > 0:
            self._s_a_token = self._ours.value(now) / self._tokens.value(now)

    def counted(self, tokens: float, s_a_token: float, now: float) -> None:
        """Tokens of others; `s_a_token` is for as long as no prompt of ours has ended."""
        self._others.add(tokens * (s_a_token if self._s_a_token is None else self._s_a_token), now)

    def ours(self, now: float) -> float:
        return self._ours.value(now)

    def of_all(self, now: float) -> float:
        return self._ours.value(now) + self._others.value(now)


class PrefillsAlone:
    """Prefills that an engine ran one after the other since `begun`, while it did nothing else."""

    __slots__ = ("batches", "begun", "squares", "tokens", "until")

    def __init__(self, begun: float) -> None:
        self.begun = self.until = begun
        self.batches = self.tokens = self.squares = 0

    def same_batch(self, now: float) -> bool:
        """Whether a prefill that ends now was computed in the newest batch here."""
        return self.batches > 0 and now - self.until <= SAME_BATCH_S

    def add(self, tokens: int, squares: int, now: float) -> None:
        """One prefill ended. Those that end together were one batch."""
        if not self.same_batch(now):
            self.batches += 1
        self.until = now
        self.tokens += tokens
        self.squares += squares

    @property
    def seconds(self) -> float:
        return self.until - self.begun
