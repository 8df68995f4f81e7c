"""The report of bench-scaleout over its rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def summary(
    rounds: Mapping[str, Sequence[Mapping[str, float | None]]],
    streams: Mapping[str, Sequence[float]],
    alone: float,
    size: int,
) -> dict[str, Any]:
    """The reported figures.

    `streams`: GB/s of the medium while the source answers, while it is idle, and from memory to memory while it
    answers. `alone`: the source's TPOT without loads, ms. `size`: bytes of the model. Shares of the medium are None if
    no weights moved over it or it was not measured.
    """

    def middle(kind: str, key: str) -> float | None:
        values = [each[key] for each in rounds[kind]]
        known = [value for value in values if value is not None]
        return round(statistics.median(known), 4) if known else None

    load = {kind: middle(kind, "load_s") for kind in rounds}
    first = {kind: middle(kind, "first_served_s") for kind in rounds}
    moved = load.get("engine")
    links = {name: statistics.median(found) if found else None for name, found in streams.items()}

    def share(link: float | None) -> float | None:
        return round(size / moved / 1e9 / link, 3) if moved and link else None

    return {
        "first_served_s": first,
        "load_s": load,
        "ratios": {"first_served_s": ratios(first), "load_s": ratios(load)},
        "link_share": share(links["answering"]),
        "link_share_idle": share(links["idle"]),
        "link_share_memory": share(links["memory"]),
        "raw_gb_per_s": {name: link and round(link, 3) for name, link in links.items()},
        "source_tpot_ms": {"alone": round(alone, 2), **{kind: middle(kind, "source_tpot_ms") for kind in rounds}},
        "bytes": size,
        "rounds": min(map(len, rounds.values())),
    }


def ratios(seconds: Mapping[str, float | None]) -> dict[str, float]:
    """How many times as long the first of a pair takes as the second, for every pair: `disk/engine` 2.5."""
    pairs = combinations([(kind, value) for kind, value in seconds.items() if value], 2)
    return {f"{kind}/{other}": round(value / less, 2) for (kind, value), (other, less) in pairs}


def table(result: Mapping[str, Any]) -> str:
    size, load, first, tpot = (result[key] for key in ("bytes", "load_s", "first_served_s", "source_tpot_ms"))
    lines = [f"{size / 1e9:.2f} GB, {result['rounds']} rounds; TPOT of the source alone {tpot['alone']:.1f} ms"]
    lines.append(f"{'source':8} {'load s':>8} {'GB/s':>6} {'first served s':>15} {'source TPOT ms':>15}")
    for kind in load:
        busy = "-" if tpot[kind] is None else f"{tpot[kind]:.1f}"
        lines.append(f"{kind:8} {load[kind]:8.3f} {size / load[kind] / 1e9:6.2f} {first[kind]:15.3f} {busy:>15}")
    for key, of in (("first_served_s", "first served"), ("load_s", "load")):
        said = ", ".join(f"{pair} {ratio:.2f}" for pair, ratio in result["ratios"][key].items())
        lines.append(f"{of}: {said}")
    if result["link_share"] is not None:
        lines.append(
            f"engine to engine: {100 * result['link_share']:.0f} % of the bare medium beside an engine that answers "
            f"({result['raw_gb_per_s']['answering']:.2f} GB/s), {100 * result['link_share_idle']:.0f} % of it idle"
        )
    if result["link_share_memory"] is not None:
        lines.append(
            f"engine to engine: {100 * result['link_share_memory']:.0f} % of a stream from memory to memory beside an "
            f"engine that answers ({result['raw_gb_per_s']['memory']:.2f} GB/s)"
        )
    if copies := result.get("device_gb_per_s"):
        said = f"{copies['to_host']:.2f} GB/s to the host, {copies['to_device']:.2f} GB/s from it"
        lines.append(f"copies of the device with pinned memory: {said}")
    lines += [f"{kind} left out: {why}" for kind, why in result.get("left_out", {}).items()]
    return "\n".join(lines)
