"""Fidelity against recorded runs of real vLLM 0.19 on GPUs (`benchmarks/data`).

    python -m benchmarks.fidelity --recorded

300 ShareGPT requests at 10 a second, far above the capacity of one engine. The recordings have no profile, so the first
third of the requests to *end* calibrates the latency model (`controller/predict/latency_records.py`), and the other two
thirds, which it has not seen, are compared; the simulation always runs all 300. Slots, budget and the size of the KV
cache are those of the published engine settings (ENGINES). Scheduling is one step ahead, as is the default on GPUs:
without it, first tokens of requests that never queue are 28 % too early. The recordings have no SLOs: attainment is the
share with a TTFT within the median of the recorded ones. Not compared: the fourth recording (Qwen3-30B-A3B) used two
data-parallel ranks that wait for each other in every step, which the simulator does not have.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fidelity.compare import SeenRun, compare
from benchmarks.load.scoring import percentile
from controller.core.types import LatencyCoefficients, Targets
from controller.dispatch import build_dispatcher
from controller.predict.latency_records import Served, fit_records, intervals
from controller.simulator.settings import InstanceSettings, SimulationSettings
from controller.simulator.simulation import Simulation
from controller.simulator.workloads.demand import Demand

RECORDINGS = Path(__file__).resolve().parents[1] / "data" / "vllm_recorded_requests.csv.gz"
CALIBRATION_SHARE = 1 / 3
BLOCK = 16
TARGETS = Targets(10.0, 1.0, None, 1e9)  # not used by round robin on one engine


class Recording(NamedTuple):
    """Settings and figures of a recording: `max_num_seqs`, and tokens in the KV cache."""

    gpu: str
    model: str
    max_num_seqs: int
    kv_tokens: int


# github.com/casys-kaist/LLMServingSim, bench/: max_num_seqs and num_kv_tokens of each run's meta.json.
ENGINES = (
    Recording("RTX4090", "Llama-3.1-8B", 256, 41_408),
    Recording("RTXPRO6000", "Llama-3.1-8B", 128, 574_608),
    Recording("RTXPRO6000", "Qwen3-32B", 128, 462_144),
)


class RecordedRow(NamedTuple):
    arrival_s: float
    served: Served

    @property
    def ttft_s(self) -> float:
        return self.served.first_at - self.arrival_s


def read(path: Path, recording: Recording) -> list[RecordedRow]:
    """By arrival. Raises FileNotFoundError, or ValueError for a file without such a recording."""
    with gzip.open(path, "rt", newline="") as file:
        rows = [_row(raw) for raw in csv.DictReader(file) if (raw["gpu"], raw["model"]) == recording[:2]]
    if not rows:
        raise ValueError(f"{path} has no recording of {recording.model} on {recording.gpu}")
    return sorted(rows)


def _row(raw: Mapping[str, str]) -> RecordedRow:
    served = Served(
        int(raw["input_tokens"]), int(raw["output_tokens"]), float(raw["first_token_s"]), float(raw["last_token_s"])
    )
    return RecordedRow(float(raw["arrival_s"]), served)


def calibrate(rows: Sequence[RecordedRow]) -> tuple[LatencyCoefficients, set[int]]:
    """The fit, and the positions of the requests that it used."""
    by_end = sorted(range(len(rows)), key=lambda index: rows[index].served.last_at)
    seen = by_end[: round(len(rows) * CALIBRATION_SHARE)]
    everyone = [row.served for row in rows]
    return fit_records(intervals([everyone[index] for index in seen], everyone)), set(seen)


def simulate(rows: Sequence[RecordedRow], latency: LatencyCoefficients, recording: Recording) -> list[float]:
    """TTFTs in the order of the rows."""
    engine = InstanceSettings(
        latency,
        kv_tokens=recording.kv_tokens,
        max_num_seqs=recording.max_num_seqs,
        max_model_len=32_768,
        scheduling_policy="fcfs",
        batching="vllm_v1",
        batching_settings={"async_scheduling": True},
    )
    demands = [
        Demand(
            str(index), row.arrival_s, row.served.prompt_tokens, row.served.output_tokens, TARGETS,
            prefix=tuple((index, block) for block in range(row.served.prompt_tokens // BLOCK)),
        )
        for index, row in enumerate(rows)
    ]  # fmt: skip
    result = Simulation(SimulationSettings((engine,)), build_dispatcher("round_robin"), demands).run()
    ttfts = {int(record.id): record.ttft_s for record in result.records}
    return [ttfts[index] or 0.0 for index in range(len(rows))]


def seen(ttfts: Sequence[float], target_s: float) -> SeenRun:
    return SeenRun(sum(ttft <= target_s for ttft in ttfts) / len(ttfts), {}, ttfts)


def recorded(path: Path = RECORDINGS) -> list[dict[str, Any]]:
    """One entry per recording."""
    entries = []
    for recording in ENGINES:
        rows = read(path, recording)
        latency, used = calibrate(rows)
        simulated = simulate(rows, latency, recording)
        held = [index for index in range(len(rows)) if index not in used]
        target_s = percentile([rows[index].ttft_s for index in held], 0.5)
        real = seen([rows[index].ttft_s for index in held], target_s)
        found = compare([real], [seen([simulated[index] for index in held], target_s)])
        what = f"{recording.model} on {recording.gpu}, {len(held)} of {len(rows)}"
        entries.append(
            {"what": what, "ttft_target_s": target_s, "latency": latency._asdict(), "calibrated_on": len(used), **found}
        )
    return entries
