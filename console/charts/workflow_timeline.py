"""A workflow's requests over time, as shapes of an SVG: bars, the end of each one's share, what each followed.

Lengths are in the units of the SVG's view box. The order is that of arrival, one row a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

WIDTH, LEFT, RIGHT = 960.0, 190.0, 20.0
ROW, BAR, TOP = 24.0, 12.0, 30.0
GAP, MARK = 6.0, 60.0  # of a mark: to its bar, and the room that it takes
LEAST = 3.0  # width of a bar, so that a short request can be seen
TICKS = 5
FARTHEST = 3.0  # a deadline further away than this many lengths of the work is not drawn: bars would be dots
STEPS_S = tuple(unit * 10.0**power for power in range(-3, 7) for unit in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """One request. `share_s`: its share of the time left when it arrived, None without one."""

    id: str
    name: str
    arrived_at: datetime
    ended_at: datetime
    share_s: float | None
    missed: bool
    parents: Sequence[str] | None  # ids of those that it depends on, as its client told; None: not told
    told: str  # what a screen reader says of it after its number and name, which are seen
    is_tool: bool = False  # a step of the client's own tool, which has no page
    mark: str = ""  # beside its bar: what was special about how it was served
    answer_of: str = ""  # id of the equal request whose call's answer it got
    given_up: bool = False  # its client hung up on it, and can ask for its step again


@dataclass(frozen=True, slots=True)
class RequestBar:
    """`x`, `y`, `width` of the bar; `text_y` of its name; `share_x`: where its share ended, None: none, or not in the
    chart. `follows`: the paths of an SVG from the requests that it followed: those that its client named, or,
    `inferred`, the one that times tell. `mark_x`: of its mark. `shared`: the path from the request whose answer it
    got; "": none, or that one is not drawn."""

    step: DrawnRequest
    x: float
    y: float
    width: float
    text_y: float
    share_x: float | None
    follows: Sequence[str]
    inferred: bool
    mark_x: float
    shared: str = ""


@dataclass(frozen=True, slots=True)
class WorkflowTimeline:
    """`ticks`: x and seconds since the beginning. `due_x`: None without a deadline, or if it is beyond the chart."""

    width: float
    height: float
    top: float
    left: float
    bottom: float
    bar: float
    bars: Sequence[RequestBar]
    ticks: Sequence[tuple[float, float]]
    due_x: float | None
    due_beyond: bool

    @property
    def inferred(self) -> bool:
        """Some lines are, as times tell."""
        return any(bar.inferred for bar in self.bars)

    @property
    def shared(self) -> bool:
        """Some requests got the answer of another one that is drawn."""
        return any(bar.shared for bar in self.bars)

    @property
    def told(self) -> bool:
        """Some lines are, by the client."""
        return any(bar.follows and not bar.inferred for bar in self.bars)


def timeline(steps: Sequence[DrawnRequest], due_at: datetime | None) -> WorkflowTimeline | None:
    """None without requests."""
    if not steps:
        return None
    start = min(step.arrived_at for step in steps)
    worked_s = max((step.ended_at - start).total_seconds() for step in steps) or 0.001
    due_s = None if due_at is None else (due_at - start).total_seconds()
    drawn = due_s is not None and 0 <= due_s <= FARTHEST * worked_s
    whole_s = max(worked_s, due_s if drawn and due_s is not None else 0.0) * 1.02
    scale = (WIDTH - LEFT - RIGHT) / whole_s

    def x_of(at: datetime) -> float:
        return round(LEFT + (at - start).total_seconds() * scale, 1)

    places = {step.id: index for index, step in enumerate(steps)}
    bars = []
    for index, step in enumerate(steps):
        x, y = x_of(step.arrived_at), TOP + index * ROW + (ROW - BAR) / 2
        share_x = None if step.share_s is None else round(x + step.share_s * scale, 1)
        last = followed(step, steps[:index]) if step.parents is None else None
        before = [steps[places[each]] for each in step.parents or () if each in places] if last is None else [last]
        width = max(LEAST, x_of(step.ended_at) - x)
        mark_x = x + width + GAP if x + width < WIDTH - RIGHT - MARK else x - GAP
        paths = [f"M{x_of(each.ended_at)} {TOP + places[each.id] * ROW + ROW / 2}V{y + BAR / 2}H{x}" for each in before]
        bars.append(
            RequestBar(
                step, x, y, width, y + BAR - 2,
                share_x if share_x is not None and share_x <= WIDTH - RIGHT else None, paths,
                last is not None, mark_x, shared_path(step, places, x, y),
            )
        )  # fmt: skip
    bottom = TOP + len(steps) * ROW
    step_s = next((each for each in STEPS_S if whole_s / each <= TICKS), STEPS_S[-1])
    ticks = [(round(LEFT + number * step_s * scale, 1), number * step_s) for number in range(int(whole_s / step_s) + 1)]
    due_x = round(LEFT + due_s * scale, 1) if drawn and due_s is not None else None
    return WorkflowTimeline(
        WIDTH, bottom + 4, TOP, LEFT, bottom, BAR, bars, ticks, due_x, due_s is not None and due_s > FARTHEST * worked_s
    )


def shared_path(step: DrawnRequest, places: Mapping[str, int], x: float, y: float) -> str:
    """From the row of the request whose answer `step` got to its own bar, which begins at `x`, `y`; "" for none."""
    index = places.get(step.answer_of)
    if index is None or step.answer_of == step.id:
        return ""
    return f"M{round(x + GAP, 1)} {TOP + index * ROW + ROW / 2}V{y + BAR / 2}"


def followed(step: DrawnRequest, before: Sequence[DrawnRequest]) -> DrawnRequest | None:
    """The one that ended last before `step` arrived: what it waited for, as far as times tell."""
    ended = [each for each in before if each.ended_at <= step.arrived_at]
    return max(ended, key=lambda each: each.ended_at, default=None)
