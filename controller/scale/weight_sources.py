"""Where a new engine loads its weights from: another engine's memory, else the copy of its host, else the disk.

HyperFlexis sec. 6 (Fast Scaling): the TransferLink Manager selects a source instance by topology, weights move from
device to device, and on failure the target falls back to the disk. The paper gives no rule for the choice. Ours
prefers, in this order: the target's own host; the widest link; the fewest transfers that the source already sends; the
lowest utilisation; the lowest id, so that ties are broken alike everywhere. An engine behind a link that is down is
left out. An engine whose link is not described comes last, since every host may still reach every other. Cost:
O(holders log holders + links).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controller.core.decisions import Figure
from controller.core.errors import ConfigError

MOST_ENGINES = 3  # tried before the host's copy, since each failure costs a timeout


@dataclass(frozen=True, slots=True)
class Holder:
    """An engine with whole weights. `host` "": unknown. `transfers`: how many engines it sends weights to now.
    `reached` false: the target reports that its link from this engine is down. `ranks`: tensor-parallel processes, each
    with a part of the weights."""

    id: str
    url: str
    host: str = ""
    utilisation: float = 0.0
    transfers: int = 0
    reached: bool = True
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Path:
    """A described link in one direction between two hosts; bandwidth in bytes/s."""

    source: str
    target: str
    bandwidth_bytes_s: float
    up: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth_bytes_s) and self.bandwidth_bytes_s > 0):
            raise ConfigError("bandwidth_bytes_s must be a number above 0", "bandwidth_bytes_s")


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """One source to try. `kind`: engine | host | disk; only an engine has `id` and `url`. `bandwidth_bytes_s` None: the
    link is not described."""

    kind: str
    id: str = ""
    url: str = ""
    bandwidth_bytes_s: float | None = None


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """`choices` in the order in which they are tried; `rejected`: the reason for each engine that was left out."""

    choices: tuple[SourceChoice, ...]
    reason: str
    figures: Mapping[str, Figure]
    rejected: Mapping[str, Figure]


def plan_sources(
    target: str,
    holders: Iterable[Holder],
    paths: Iterable[Path] = (),
    *,
    target_host: str = "",
    host_copy: bool = False,
    copy_first: bool = False,
    ranks: int = 1,
    most_engines: int = MOST_ENGINES,
) -> SourcePlan:
    """Sources for the engine `target`, best first; the disk is always last. `host_copy`: its host's memory has a copy.

    `copy_first`: the copy was kept for this engine (sleep level 1), so it goes before other engines, which then lose no
    time. `ranks`: of the target. With several ranks no engine is a source, since each part of the weights would need
    its counterpart.

    `reason` belongs to the first choice: `same_host`, `widest_link`, `link_unknown`, `host_copy` or `disk_only`.
    Raises ConfigError when `most_engines` is negative.
    """
    if most_engines < 0:
        raise ConfigError("most_engines must be 0 or more", "most_engines")
    known = _paths_to(target_host, paths)
    rejected: dict[str, Figure] = {}
    ranked: list[tuple[tuple[int, float, int, float, str], Holder, float | None, str]] = []
    for holder in holders:
        if holder.id == target:
            continue
        near = bool(target_host) and holder.host == target_host
        path = known.get(holder.host)
        if max(ranks, holder.ranks) > 1:
            rejected[holder.id] = "several_ranks"
            continue
        if not holder.reached or (path is not None and not path.up):
            rejected[holder.id] = "link_down"
            continue
        width = None if path is None else path.bandwidth_bytes_s
        tier, why = (0, "same_host") if near else (1, "widest_link") if width else (2, "link_unknown")
        key = (tier, -(width or 0.0), holder.transfers, holder.utilisation, holder.id)
        ranked.append((key, holder, width, why))
    ranked.sort(key=lambda each: each[0])
    taken = ranked[:most_engines]
    rejected.update({holder.id: "enough_before" for _, holder, _, _ in ranked[most_engines:]})
    engines = [SourceChoice("engine", holder.id, holder.url, width) for _, holder, width, _ in taken]
    copy = [SourceChoice("host")] if host_copy else []
    choices = [*(copy + engines if copy_first else engines + copy), SourceChoice("disk")]
    reason = {"host": "host_copy", "disk": "disk_only"}.get(choices[0].kind) or taken[0][3]
    first = taken[0] if choices[0].kind == "engine" else None
    return SourcePlan(tuple(choices), reason, _figures(first, len(ranked), host_copy), rejected)


def _paths_to(target_host: str, paths: Iterable[Path]) -> dict[str, Path]:
    """By source host: the widest link that is up, else one that is down."""
    best: dict[str, Path] = {}
    if not target_host:
        return best
    for path in paths:
        if path.target == target_host:
            before = best.get(path.source)
            if before is None or (path.up, path.bandwidth_bytes_s) > (before.up, before.bandwidth_bytes_s):
                best[path.source] = path
    return best


def _figures(
    first: tuple[object, Holder, float | None, str] | None, engines: int, host_copy: bool
) -> Mapping[str, Figure]:
    figures: dict[str, Figure] = {"engines": engines, "host_copy": host_copy}
    if first is not None:
        _, holder, width, _ = first
        figures |= {
            "source": holder.id,
            "source_host": holder.host,
            "source_utilisation": round(holder.utilisation, 4),
            "source_transfers": holder.transfers,
            "bandwidth_bytes_s": width,
        }
    return figures
