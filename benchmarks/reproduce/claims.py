"""The results of a reproduction. A paper's module returns one Section, stored as JSON and shown as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

Progress = Callable[[str], None]
Value = float | int | str | None


PRINTED, PRINTED_STRONGER, SET, SET_STRONGER = "printed", "printed, stronger", "set", "set, stronger"
CHANGED = "changed"
VERDICTS: Mapping[str, str] = {  # what a claim is a verdict on; each is counted apart, so that none hides another
    PRINTED: "policy as printed, the paper's baselines",
    PRINTED_STRONGER: "policy as printed, stronger baselines",
    SET: "combined set, the paper's baselines",
    SET_STRONGER: "combined set, stronger baselines",
    CHANGED: "policy with a change of ours, the paper's baselines",
}
ANALYSERS = ("", "trained", "noise", "oracle")  # trained: on other seeds; noise: the truth with an error


@dataclass(frozen=True, slots=True)
class Claim:
    """One headline. `theirs`, `bar` and `ours` are in the unit that `claim` names.

    `theirs`: the paper's value. `bar`: what counts as reached where the paper gives no value, fixed before the run; a
    baseline that the paper does not have is judged by `bar` alone. `reached`: None if the baseline could only be built
    from a description, or nothing comparable exists. `reason`: why they differ, wherever they differ noticeably.
    Raises ValueError for a claim that is judged by nothing, or a stronger baseline that is judged by the paper's value.
    """

    paper: str
    figure: str
    claim: str
    theirs: float | None
    ours: float | None
    reached: bool | None
    setting: str
    seeds: Sequence[int]
    reason: str = ""
    part: str = ""  # for papers whose parts can be run separately
    verdict: str = PRINTED
    bar: float | None = None
    analyser: str = ""  # what lengths and graphs were told from, where a policy reads them: see ANALYSERS

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.claim}: {self.verdict!r} is no verdict; valid: {', '.join(VERDICTS)}")
        if self.analyser not in ANALYSERS:
            raise ValueError(f"{self.claim}: {self.analyser!r} is no analyser; valid: {', '.join(ANALYSERS[1:])}")
        if self.verdict in (PRINTED_STRONGER, SET_STRONGER) and self.theirs is not None:
            raise ValueError(f"{self.claim}: the paper's value is not about this baseline; give a bar")
        if self.reached is not None and self.theirs is None and self.bar is None:
            raise ValueError(f"{self.claim}: judged, but neither the paper's value nor a bar is given")


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines by label. `level`: a horizontal reference line (the 90 % of goodput)."""

    name: str  # file name without suffix
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    level: float | None = None
    log_x: bool = False
    part: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    part: str = ""


Part = TypeVar("Part", Claim, Table, Plot)


@dataclass(frozen=True, slots=True)
class Section:
    """All results of one paper.

    `settings_text`: Markdown about hardware profile, workload, sizes, seeds and stand-ins.
    """

    paper: str
    settings_text: str
    claims: Sequence[Claim]
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)  # duration, commit and machine; filled in by the command

    def updated(self, fresh: Section, parts: Sequence[str], order: Sequence[str]) -> Section:
        """This section with `parts` replaced by those of `fresh`, all parts in `order`.

        The meta holds each part's run. The text stays if `fresh` has none, because its part knows only itself.
        """

        def merged(old: Sequence[Part], new: Sequence[Part]) -> list[Part]:
            kept = [each for each in old if each.part not in parts] + [each for each in new if each.part in parts]
            return sorted(kept, key=lambda each: order.index(each.part))

        runs = {**self.meta.get("parts", {}), **{name: dict(fresh.meta) for name in parts}}
        return Section(
            fresh.paper,
            fresh.settings_text or self.settings_text,
            merged(self.claims, fresh.claims),
            merged(self.tables, fresh.tables),
            merged(self.plots, fresh.plots),
            {**self.meta, "parts": {name: runs[name] for name in order if name in runs}},
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Section:
        plots = [
            Plot(**{**plot, "series": {k: [(x, y) for x, y in v] for k, v in plot["series"].items()}})
            for plot in raw["plots"]
        ]
        return cls(
            raw["paper"],
            raw["settings_text"],
            [Claim(**claim) for claim in raw["claims"]],
            [Table(**table) for table in raw["tables"]],
            plots,
            raw["meta"],
        )
