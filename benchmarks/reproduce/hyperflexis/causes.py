"""Why a figure was missed, from what the runs measured.

Each function first gives the measured values and what would have been needed, then the causes whose condition the
values meet. Nothing else is said, so a reason without a cause means that these measurements show none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.reproduce.hyperflexis.setting import UNIT_S, Point
from benchmarks.reproduce.hyperflexis.work import EngineWork

ALIKE = 0.01  # difference, as a share, below which two values count as the same


class ComparedPair(NamedTuple):
    """Two schedulers with the same requests on the same engines: ours, and the one it is compared with."""

    label: str
    own: Point
    against: str
    other: Point


def attainment(pair: ComparedPair, factor: float) -> str:
    """Why ours is not `factor` times the other's."""
    own, other = pair.own.attainment, pair.other.attainment
    needed = factor * other
    told = f"attained there {own:.3f} and {other:.3f}: {factor:g} times as much would be {needed:.3f}"
    if needed > 1:
        return f"{told}, more than all"
    most = own / factor
    return _joined(f"{told}, or {pair.against} would have to fall to {most:.3f}", *_kept(pair, most), *missed(pair))


def _kept(pair: ComparedPair, most: float) -> Iterator[str]:
    """The fewest classes, of equally many requests each, of which the other attains more than `most` of all."""
    ranked = sorted(pair.other.by_class.items(), key=lambda each: -each[1])
    for count in range(1, len(ranked)):
        kept = sum(share for _, share in ranked[:count]) / len(ranked)
        if kept > most:
            names = " and ".join(name for name, _ in ranked[:count])
            yield f"What {pair.against} attains of {names} alone is {kept:.3f}, more than that"
            return


def missed(pair: ComparedPair) -> Iterator[str]:
    """What the requests miss and whether they need more than the engines have; nothing without runs."""
    own, other = pair.own.work, pair.other.work
    yield from _by_class(pair)
    if not own.roles:
        return
    yield (
        f"{pair.label} misses the TTFT of {_percent(own.late)} of the requests and the TPOT alone of "
        f"{_percent(own.slow)}; {pair.against} {_percent(other.late)} and {_percent(other.slow)}"
    )
    load = f"; the requests take {own.load:.2f} times what those have while requests come" if own.load > 1 else ""
    yield (
        f"The instances of {pair.against} compute {_shares(other)} of their time, those of {pair.label} "
        f"{_shares(own)}{load}"
    )


def _by_class(pair: ComparedPair) -> Iterator[str]:
    """By which classes ours is behind, and by which ahead."""
    theirs = pair.other.by_class
    points = {name: 100 * (share - theirs.get(name, 0.0)) for name, share in pair.own.by_class.items()}
    if len(points) > 1:
        yield "By class: " + ", ".join(f"{name} {each:+.1f}" for name, each in points.items()) + " points"


def latency(pair: ComparedPair, wanted_s: float, others: Sequence[Point] = ()) -> str:
    """Why ours is not `wanted_s` in the mean. `others`: all schedulers on that fleet at that load."""
    own, other = pair.own.work, pair.other.work
    least = min((each.e2e_s for each in others if each.answered >= pair.own.answered), default=0.0)
    told = (
        f"attained there {pair.own.attainment:.3f} and {pair.other.attainment:.3f}, in {pair.own.e2e_s:.2f} and "
        f"{pair.other.e2e_s:.2f} s; {wanted_s:.2f} s would be needed"
    )
    if wanted_s < least:
        told += f", less than the {least:.2f} s of any scheduler that answers as many on that fleet at that load"
    if not own.roles:
        return told
    parts = (
        f"Until the first token {pair.label} takes {own.first_s:.2f} s and {pair.against} {other.first_s:.2f} s, from "
        f"there to the end {own.after_s:.2f} and {other.after_s:.2f} s"
    )
    causes = []
    if own.after_s > wanted_s:
        causes.append("the time after the first token alone is more than would be needed")
    if own.after_s > (1 + ALIKE) * other.after_s:
        mine, theirs = _tokens_a_step(own), _tokens_a_step(other)
        if _step_s(own) > (1 + ALIKE) * _step_s(other) > 0 and mine > (1 + ALIKE) * theirs:
            causes.append(
                f"steps generate more tokens ({mine:.1f} and {theirs:.1f}) and take longer "
                f"({1000 * _step_s(own):.1f} and {1000 * _step_s(other):.1f} ms)"
            )
    if own.first_s > (1 + ALIKE) * other.first_s and own.load > 1:
        causes.append(
            f"requests take {own.load:.2f} times the time that the instances have while requests come, and the "
            f"instances compute {_shares(own)} of their time"
        )
    return _joined(told, parts, *(f"{each[0].upper()}{each[1:]}" for each in causes))


def cost(pair: ComparedPair, wanted: float) -> str:
    """Why ours is not at most `wanted` units of provisioned time until the last answer."""
    own, other = pair.own.work, pair.other.work
    told = f"costs there {pair.own.cost:.0f} and {pair.other.cost:.0f} units; {wanted:.0f} would be needed"
    if not own.roles:
        return told
    computing, theirs = own.busy_s / UNIT_S, other.busy_s / UNIT_S
    idle, their_idle = pair.own.cost - computing, pair.other.cost - theirs
    parts = (
        f"Of these, {computing:.0f} and {theirs:.0f} are computing, {idle:.0f} and {their_idle:.0f} idle (busy "
        f"{_shares(own)} and {_shares(other)}); the last answer ends {own.ended_s - own.arrived_s:.1f} and "
        f"{other.ended_s - other.arrived_s:.1f} s after the last request"
    )
    return _joined(told, parts, *_dearer(pair, wanted, computing, computing - theirs, idle - their_idle))


def _dearer(
    pair: ComparedPair, wanted: float, computing: float, more_computing: float, more_idle: float
) -> Iterator[str]:
    """The causes, in units of cost."""
    own, other = pair.own.work, pair.other.work
    same = math.isclose(own.tokens, other.tokens, rel_tol=ALIKE)
    if other.tokens and not same:
        yield f"{pair.label} generates {own.tokens / other.tokens:.2f} times as many tokens"
    if computing > wanted:
        of_the_same = ", for the same tokens" if same else ""
        yield f"Computing alone costs more than would be needed{of_the_same}: to save idle time is not enough"
    else:
        yield "Computing alone costs no more than would be needed"
    more_decoding = (own.decoding.busy_s - other.decoding.busy_s) / UNIT_S
    mine, theirs = _tokens_a_step(own), _tokens_a_step(other)
    if more_computing > max(more_idle, 0.0):
        smaller = same and more_decoding > more_computing / 2 and mine < (1 - ALIKE) * theirs
        steps = f", as the same tokens take smaller steps: {mine:.1f} and {theirs:.1f} tokens a step"
        yield f"It computes {more_computing:.0f} units more{steps if smaller else ''}"
    elif more_idle > 0:
        yield f"It is idle for {more_idle:.0f} units more"
    grown = [
        f"{own.instances(role):.1f} and {other.instances(role):.1f}{_named(role)}"
        for role in own.roles
        if not math.isclose(own.instances(role), other.instances(role), rel_tol=ALIKE)
    ]
    if grown:
        yield f"Instances in the mean: {', '.join(grown)}"


def _tokens_a_step(work: EngineWork) -> float:
    """Generated by a step of the instances that decode; 0 without steps, as the next."""
    return work.decoding.tokens / work.decoding.steps if work.decoding.steps else 0.0


def _step_s(work: EngineWork) -> float:
    return work.decoding.busy_s / work.decoding.steps if work.decoding.steps else 0.0


def _shares(work: EngineWork) -> str:
    """Busy shares of the roles."""
    return ", ".join(f"{_percent(use.share)}{_named(role)}" for role, use in work.roles.items())


def _named(role: str) -> str:
    return "" if role == "collocated" else f" ({role})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _joined(*sentences: str) -> str:
    return ". ".join(sentences)
