"""Fits a latency profile of the PyTorch executor on a device, in the form of the shipped ones.

    python -m benchmarks.torch.profile --shape llama-8b --device cuda --output mine.json   # for --profile mine.json
    python -m benchmarks.torch.profile --shape llama-8b --device cuda --add                # to the shipped ones
    python -m benchmarks.torch.profile --from-points points.json --least-tokens 512 --add  # of an earlier run

A random model of the shape runs HyperFlexis' App. A grid of batch sizes and lengths on the executor itself: a batch of
equal prompts prefilled in one step, then one decode step of the same batch. The time of a point is the median of
`--repeats` runs after a warm-up. The scheduler is not included. The fit is the profiler's (least squares on relative
error, without outliers). Last line of output: the profile as JSON.

On a GPU a step of few tokens takes as long as the host needs to queue its operators, whatever the device could do, and
one line fits no such floor. `--least-tokens` leaves smaller prefill steps out of the fit; the error over all points is
reported beside the fit's. `--points` writes what was measured, and `--from-points` fits that again without a device.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench_preempt import BLOCK_SIZE, TimedExecutor
from benchmarks.load.trials import note
from benchmarks.machine.names import machine_name, slug
from benchmarks.servers.shapes import SHAPES, add_shape_options, checked, device_words, random_model
from controller.core.errors import ConfigError
from controller.core.steps import Chunk, Seq, Step
from controller.core.types import LatencyCoefficients
from controller.predict.latency_fit import DecodeSample, PrefillSample
from workers.engine.model_config import read_config
from workers.engine.model_options import ELEMENT_BYTES
from workers.engine.profiles import SHIPPED
from workers.engine.torch.serving import load_program
from workers.engine.torch.task import OperatorProgram
from workers.profiler import ProfileSamples, ProfilingLimits


class Grid:
    """Steps on the blocks of a cache that has no other user. Each sequence has its own blocks."""

    def __init__(self, program: OperatorProgram, repeats: int, seed: int) -> None:
        self._device = TimedExecutor(program, None)
        self._vocabulary = program.model.config.vocab_size
        self._repeats, self._rng, self._steps = repeats, random.Random(seed), 0

    def _seqs(self, batch: int, length: int, computed: int) -> list[Seq]:
        each = -(-length // BLOCK_SIZE)
        made = []
        for index in range(batch):
            tokens = [self._rng.randrange(self._vocabulary) for _ in range(length)]
            blocks = list(range(index * each, (index + 1) * each))
            made.append(Seq(str(index), 0.0, length, 1, token_ids=tokens, computed=computed, blocks=blocks))
        return made

    def _seconds(self, chunks: tuple[Chunk, ...], decodes: tuple[Seq, ...], context: int) -> float:
        times = []
        for _ in range(self._repeats + 1):
            self._steps += 1
            times.append(self._device.prefill_s([Step(self._steps, chunks, decodes, context)]))
        return statistics.median(times[1:])

    def prefill(self, batch: int, length: int) -> PrefillSample:
        chunks = tuple(Chunk(seq, 0, length, True) for seq in self._seqs(batch, length, 0))
        return PrefillSample(batch * length, batch * length * length, self._seconds(chunks, (), 0))

    def decode(self, batch: int, length: int) -> DecodeSample:
        seqs = tuple(self._seqs(batch, length, length - 1))
        return DecodeSample(batch, batch * length, self._seconds((), seqs, batch * length))

    def close(self) -> None:
        self._device.executor.close()


def measured(program: OperatorProgram, limits: ProfilingLimits, repeats: int, seed: int) -> ProfileSamples:
    """The grid within the bounds, until the time budget is spent."""
    profile, grid = ProfileSamples(), Grid(program, repeats, seed)
    points, began = limits.points(), time.monotonic()
    try:
        for at, (batch, length) in enumerate(points, 1):
            profile.prefill.append(grid.prefill(batch, length))
            profile.decode.append(grid.decode(batch, length))
            profile.points += 1
            if time.monotonic() - began > limits.budget_s:
                note(f"{limits.budget_s:.0f} s are spent: {at} of {len(points)} points")
                break
    finally:
        grid.close()
    return profile


class ProfilePoints(NamedTuple):
    """Points and what they were measured on.

    `on`: the date. `capacity`: tokens of KV that fit.
    """

    samples: ProfileSamples
    shape: str
    dtype: str
    device: str
    capacity: int
    on: str

    def to_json(self) -> dict[str, Any]:
        points = {kind: [asdict(each) for each in getattr(self.samples, kind)] for kind in ("prefill", "decode")}
        return {**self._asdict(), "samples": points}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ProfilePoints:
        prefill = [PrefillSample(**each) for each in raw["samples"]["prefill"]]
        decode = [DecodeSample(**each) for each in raw["samples"]["decode"]]
        return cls(**{**raw, "samples": ProfileSamples(prefill, decode, points=len(prefill))})


def error_over(samples: Sequence[PrefillSample], k: LatencyCoefficients) -> float:
    """Median relative error of the prefill equation (0.05 = 5 %)."""
    predicted = (k.prefill_a + k.prefill_b * each.tokens + k.prefill_c * each.squares for each in samples)
    return statistics.median(abs(at / each.seconds - 1) for at, each in zip(predicted, samples, strict=True))


def entry(found: ProfilePoints, least_tokens: int = 0) -> dict[str, Any]:
    """The profile in the form of `workers/engine/profiles.json`, of prefill steps of at least so many tokens."""
    profile, shape, dtype, device, capacity, on = found
    used = [sample for sample in profile.prefill if sample.tokens >= least_tokens]
    fitted = replace(profile, prefill=used).fit()
    k = fitted.coefficients
    lengths = [sample.squares // sample.tokens for sample in used]
    batches = [sample.batch for sample in profile.decode]
    sizes = [sample.tokens for sample in used]
    domain = f"batch {min(batches)}..{max(batches)}, length {min(lengths)}..{max(lengths)}, no cached prefix"
    smaller = f"; over all steps, from {min(each.tokens for each in profile.prefill)} tokens, the median error is "
    smaller = f"{smaller}{error_over(profile.prefill, k):.3f}" if len(used) < len(profile.prefill) else ""
    return {
        "id": f"slackline/{shape}/{slug(device)}/tp1",
        "aliases": [f"{shape}-{slug(device)}"],
        "model": shape,
        "gpu": device,
        "tp": 1,
        "weights": dtype,
        "kind": "executor_measured",
        "source": f"python -m benchmarks.torch.profile, {profile.points} points of HyperFlexis App. A's grid on the "
        f"reference engine's PyTorch executor, random weights, {on}",
        "credit": "Slackline",
        "prefill": {
            **{"a": k.prefill_a, "b": k.prefill_b, "c": k.prefill_c},
            "median_rel_err": round(fitted.prefill_median_error, 4),
            "domain": f"batch*len {min(sizes)}..{max(sizes)} tokens, {domain}{smaller}",
        },
        "decode": {
            **{"a": k.decode_a, "b": k.decode_b, "c": k.decode_c},
            "median_rel_err": round(fitted.decode_median_error, 4),
            "domain": domain,
        },
        "kv_capacity_tokens": capacity,
    }


def add(profile: Mapping[str, Any], path: Path = SHIPPED) -> None:
    """Add it to the shipped profiles, replacing an earlier one of the same id."""
    raw = json.loads(path.read_text())
    others = [each for each in raw["profiles"] if each["id"] != profile["id"]]
    path.write_text(json.dumps(raw | {"profiles": [*others, profile]}, indent=1) + "\n")


def capacity_tokens(args: argparse.Namespace, token_bytes: int) -> int:
    """Tokens that fit into `--kv-cache-gib`; on CUDA without it, into nine tenths of the device less the weights."""
    import torch

    room = args.kv_cache_gib * (1 << 30)
    if not room and args.device == "cuda":
        weights = SHAPES[args.shape].parameters * ELEMENT_BYTES[args.dtype]
        room = 0.9 * torch.cuda.get_device_properties(0).total_memory - weights
    return int((room or 1 << 30) // token_bytes)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser, "thin")
    parser.add_argument("--output", type=Path, help="JSON file to write, for an engine's --profile")
    parser.add_argument("--points", type=Path, help="JSON file to write: every point with its seconds")
    parser.add_argument("--from-points", type=Path, metavar="FILE", help="fit these points and measure nothing")
    least = "smallest prefill step of the fit, tokens (%(default)s)"
    parser.add_argument("--least-tokens", type=int, default=0, metavar="TOKENS", help=least)
    parser.add_argument("--add", action="store_true", help="add it to workers/engine/profiles.json")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="largest batch (%(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="largest batch x length (%(default)s)")
    parser.add_argument(
        "--kv-cache-gib",
        type=float,
        default=0.0,
        help="size of the KV cache (default: 1 on CPUs, all that fits on CUDA)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs per point, after a warm-up (%(default)s)")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds to spend (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads per operator, on the CPU (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = checked(parser, parser.parse_args(argv))
    if min(args.repeats, args.max_num_seqs, args.batch_tokens) < 1:
        parser.error("--repeats, --max-num-seqs and --batch-tokens must be at least 1")
    return args


def measure(args: argparse.Namespace) -> ProfilePoints:
    limits = ProfilingLimits(args.max_num_seqs, 2 * args.batch_tokens, args.batch_tokens, args.budget)
    longest = max(batch * -(-length // BLOCK_SIZE) for batch, length in limits.points())
    with tempfile.TemporaryDirectory() as name:
        folder, _ = random_model(args, Path(name), 2 * args.batch_tokens)
        config = read_config(folder)
        program = load_program(
            *(folder, config),
            device=args.device,
            dtype=args.dtype,
            blocks=longest,
            block_size=BLOCK_SIZE,
            threads=args.threads if args.device == "cpu" else None,
        )
    samples = measured(program, limits, args.repeats, args.seed)
    capacity = capacity_tokens(args, config.kv_bytes_per_token(ELEMENT_BYTES[args.dtype]))
    device = device_words(args.device) or machine_name()
    return ProfilePoints(samples, args.shape, args.dtype, device, capacity, date.today().isoformat())


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    points = ProfilePoints.from_json(json.loads(args.from_points.read_text())) if args.from_points else measure(args)
    if max(sample.tokens for sample in points.samples.prefill) < args.least_tokens:
        raise ConfigError("all prefill steps have fewer tokens", field="least_tokens")
    found = entry(points, args.least_tokens)
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    if args.points:
        args.points.write_text(json.dumps(points.to_json(), indent=1) + "\n")
    if args.add:
        add(found)
    for part in ("prefill", "decode"):
        a, b, c, error = (found[part][key] for key in ("a", "b", "c", "median_rel_err"))
        print(f"{part:8} a {a:.3g} b {b:.3g} c {c:.3g}, median error {error:.1%}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
