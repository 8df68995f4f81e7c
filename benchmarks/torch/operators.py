"""Times each operator of a prefill step of the PyTorch executor, in the form that experiments take as `operators`.

    python -m benchmarks.torch.operators --shape llama-8b --device cuda --output operators.json

A random model of the shape prefills prompts of several lengths, each in one step, and the longest one in chunks of a
quarter, which have a cached past. Every operator is timed separately (on CUDA with a synchronisation, which adds some
microseconds). The seconds of one layer are medians over `--repeats` runs and all layers but the first, whose qkv_proj
also builds the pass. One warm-up run is left out. Last line of output: the profile as JSON
(`controller/predict/operator_profile.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_preempt import BenchPrompt, build, operator_times
from benchmarks.machine.names import machine_name
from benchmarks.servers.shapes import SHAPES, add_shape_options, checked, device_words
from controller.core.steps import Step
from controller.predict.operator_profile import OPERATORS
from workers.engine.torch.task import OperatorProgram

LENGTHS = "16,64,256,512,1024,2048"
CHUNKS = 4  # of the longest prompt; the later ones have a past


def steps(lengths: Sequence[int], seed: int, vocabulary: int) -> Iterator[tuple[int, int, Step]]:
    """(new tokens, cached tokens, the step)."""
    for tokens in lengths:
        yield tokens, 0, BenchPrompt(tokens, seed, vocabulary).steps()[0]
    longest = max(lengths)
    for step in BenchPrompt(longest, seed, vocabulary).steps(-(-longest // CHUNKS))[1:]:
        (chunk,) = step.chunks
        yield chunk.length, chunk.start, step


def layer_medians(program: OperatorProgram, runs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Seconds of one layer's operators, by name. `runs`: from `operator_times`."""
    found: dict[str, list[float]] = defaultdict(list)
    for times in runs:
        for at, (stage, seconds) in enumerate(zip(program.stages, times, strict=True)):
            if at >= len(OPERATORS) and stage.name in OPERATORS:  # the first layer is left out
                found[stage.name].append(seconds)
    return {name: float(f"{statistics.median(found[name]):.4g}") for name in OPERATORS}


def measured(program: OperatorProgram, lengths: Sequence[int], repeats: int, seed: int) -> list[dict[str, float]]:
    rows = []
    for tokens, past, step in steps(lengths, seed, program.model.config.vocab_size):
        runs = [operator_times(program, step) for _ in range(repeats + 1)][1:]
        rows.append({"tokens": tokens, "past": past, **layer_medians(program, runs)})
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser, "thin")
    parser.add_argument("--lengths", default=LENGTHS, help="prompt lengths in tokens (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs per step, after a warm-up (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads per operator, on the CPU (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = checked(parser, parser.parse_args(argv))
    try:
        args.lengths = sorted({int(each) for each in args.lengths.split(",")})
    except ValueError:
        parser.error(f"--lengths must be whole numbers, not {args.lengths!r}")
    if args.lengths[0] < CHUNKS or args.repeats < 1:
        parser.error(f"--lengths must be at least {CHUNKS} tokens and --repeats at least 1")
    if SHAPES[args.shape].layers < 2:
        parser.error("--shape needs two layers: the first one is not counted")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.tokens = args.lengths[-1]
    with tempfile.TemporaryDirectory() as folder:
        program = build(args, Path(folder))
    rows = measured(program, args.lengths, args.repeats, args.seed)
    found: dict[str, Any] = {
        "name": f"slackline/{args.shape}/{machine_name(device_words(args.device))}",
        "source": "python -m benchmarks.torch.operators on the reference engine's PyTorch executor, random weights",
        "setting": {"shape": args.shape, "dtype": args.dtype, "threads": args.threads, "repeats": args.repeats},
        "layers": SHAPES[args.shape].layers,
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'tokens':>7}{'past':>7}" + "".join(f"{name + ', ms':>18}" for name in OPERATORS))
    for row in rows:
        print(f"{row['tokens']:>7}{row['past']:>7}" + "".join(f"{1e3 * row[name]:>18.3f}" for name in OPERATORS))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
