"""`make bench-preempt`: how long an urgent prompt waits for the device, by where a running prefill can be suspended.

The PyTorch executor prefills a long prompt again and again. Signals come at even intervals of device time from a random
start, so every moment of the step is equally likely. Blocking is the time from the signal to the acknowledgement
(FlowPrefill section 6.4). Boundaries are the ends of operators, of layers, or of chunks of the prompt.

*Predicted* is the expected blocking of a signal at a uniformly random moment, from the times of the operators: over
pieces of duration d the mean is sum(d^2) / (2 sum d). A GPU gets the next operator before one ends, so there that one
is waited for as well. Operator times are measured without signals, once in every round beside the runs with signals, so
that both see the same machine. Measured over predicted shows what the mechanism itself adds.

Throughput: the same prefill with checks at every operator and without checks, one after the other on separate devices,
in pairs of alternating order; the result is the median of the pairs' ratios.

Prints a table, then one line of JSON with `blocking_ms` by boundary and `throughput_cost_pct`. The model is random and
has Llama-3-8B's proportions (`--shape llama-8b`: its size). It runs on the CPU with one thread, so that the driver has
a core of its own, or on a GPU (`--device cuda`).
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine.names import keep, machine_name
from benchmarks.servers.shapes import SHAPES, add_shape_options, checked, device_words, random_model
from controller.core.steps import Chunk, Seq, Step, StepDone, Suspended
from workers.engine.model_config import read_config
from workers.engine.torch.executor import TorchExecutor
from workers.engine.torch.model.batch import segments_of
from workers.engine.torch.pool import LEAD
from workers.engine.torch.serving import load_program
from workers.engine.torch.task import Boundary, OperatorProgram, StepTask

BLOCK_SIZE = 16
TOLERANCE = 0.15  # tolerance of measured against predicted ratios
THROUGHPUT_BAR_PCT = 2.0
PAIRS = 15
SPACING = 1.5  # between signals, in multiples of the longest wait, so that the previous one is answered
WARM_UP = 2
BOUNDARIES = ("operator", "layer", "chunk")


class Piece(NamedTuple):
    """A stretch of work, in seconds, during which a signal may come; `behind`: seconds that still run before the step
    stops.
    """

    seconds: float
    behind: float = 0.0

    @property
    def longest_wait(self) -> float:
        return self.seconds + self.behind


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of a step, from which the expected wait of a signal follows, in seconds."""

    pieces: Sequence[Piece]

    @property
    def mean_wait(self) -> float:
        return sum(d * (d / 2 + behind) for d, behind in self.pieces) / self._total

    def wait_quantile(self, share: float) -> float:
        """Quantile of the wait for the next stop, for a uniformly random moment."""
        low, high = 0.0, max(piece.longest_wait for piece in self.pieces)
        for _ in range(60):
            middle = (low + high) / 2
            below = sum(min(max(0.0, middle - behind), d) for d, behind in self.pieces) / self._total
            low, high = (middle, high) if below < share else (low, middle)
        return high

    @property
    def _total(self) -> float:
        return sum(piece.seconds for piece in self.pieces)


def pieces(operators: Sequence[float], ends: Sequence[bool], lead: int) -> list[Piece]:
    """The pieces of a step, one per operator.

    `ends`: after which operators it may stop (always after the last). `lead`: how many further operators the device has
    already been given, which the host cannot take back.
    """
    found = []
    for at, seconds in enumerate(operators):
        stop = next((i for i in range(at + lead, len(operators)) if ends[i]), len(operators) - 1)
        found.append(Piece(seconds, sum(operators[at + 1 : stop + 1])))
    return found


class BenchPrompt:
    """One prompt on the first blocks of the cache, as one step or as several."""

    def __init__(self, tokens: int, seed: int, vocabulary: int) -> None:
        rng = random.Random(seed)
        self.tokens = tokens
        self._seq = Seq("prompt", 0.0, tokens, 1, token_ids=[rng.randrange(vocabulary) for _ in range(tokens)])
        self._seq.blocks = list(range(-(-tokens // BLOCK_SIZE)))
        self._steps = 0

    def steps(self, chunk_tokens: int | None = None) -> list[Step]:
        size = chunk_tokens or self.tokens
        found = []
        for start in range(0, self.tokens, size):
            length = min(size, self.tokens - start)
            self._steps += 1
            found.append(Step(self._steps, (Chunk(self._seq, start, length, start + length == self.tokens),), (), 0))
        return found


class TimedExecutor:
    """The executor, and the times of its answers, taken on its own thread."""

    def __init__(self, program: OperatorProgram, boundary: Boundary | None) -> None:
        self._answers: queue.Queue[tuple[float, StepDone | Suspended | Exception]] = queue.Queue()
        self.executor = TorchExecutor(program, self._sink, lambda call: call(), self._sink, boundary=boundary)

    def _sink(self, event: StepDone | Suspended | Exception) -> None:
        self._answers.put((time.perf_counter(), event))

    def answer(self, timeout: float | None = None) -> tuple[float, StepDone | Suspended] | None:
        """The next answer, or None after the time-out."""
        try:
            at, event = self._answers.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, Exception):
            raise event
        return at, event

    def prefill_s(self, steps: Sequence[Step]) -> float:
        total = 0.0
        for step in steps:
            self.executor.start(step)
            answer = self.answer()
            assert answer is not None
            total += answer[1].seconds
        return total

    def signalled(self, steps: Sequence[Step], spacing: float, first: float) -> list[float]:
        """Run the steps one after the other; blocking times of signals at `first`, `first + spacing` ... seconds."""
        waiting, blocked = list(steps), []
        before = used = 0.0  # device seconds of the steps that have ended, and of the current one
        due, began = first, time.perf_counter()
        self.executor.start(waiting[0])
        while waiting:
            answer = self.answer(max(0.0, due - before - used - (time.perf_counter() - began)))
            if answer is None:
                sent = time.perf_counter()
                self.executor.suspend(waiting[0].id)
                answer = self.answer()
                assert answer is not None
                blocked.append(answer[0] - sent)
            event = answer[1]
            if isinstance(event, StepDone):
                before, used = before + event.seconds, 0.0
                del waiting[0]
            else:
                used = event.seconds
            while due <= before + used:
                due += spacing
            began = time.perf_counter()
            if waiting:
                (self.executor.resume if isinstance(event, Suspended) else self.executor.start)(
                    waiting[0].id if isinstance(event, Suspended) else waiting[0]  # type: ignore[arg-type]
                )
        return blocked


def operator_times(program: OperatorProgram, step: Step) -> list[float]:
    """Seconds of each operator of a step, in order."""
    task, times = StepTask(0, program, segments_of(step)), []
    with torch.inference_mode():
        while not task.over:
            began = time.perf_counter()
            task.advance()
            if program.model.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return times


class Measurement:
    """Rounds of prefills of one prompt, without and with signals.

    `pieces` and `blocked` by boundary, over all rounds.
    """

    def __init__(self, program: OperatorProgram, prompt: BenchPrompt, chunk_tokens: int, seed: int) -> None:
        self._program, self._prompt, self._chunk_tokens = program, prompt, chunk_tokens
        self._rng = random.Random(seed)
        self._devices = {
            "operator": TimedExecutor(program, Boundary.OPERATOR),
            "layer": TimedExecutor(program, Boundary.LAYER),
            "chunk": TimedExecutor(program, None),
        }
        self._lead = LEAD if program.model.device.type == "cuda" else 0
        self.pieces: dict[str, list[Piece]] = {kind: [] for kind in BOUNDARIES}
        self.operators: list[list[float]] = []
        self.blocked: dict[str, list[float]] = {kind: [] for kind in BOUNDARIES}

    def run(self, signals: int) -> None:
        for _ in range(WARM_UP):
            self._plain()
        self._forget()
        while min(map(len, self.blocked.values())) < signals:
            self._plain()
            for kind in BOUNDARIES:
                if len(self.blocked[kind]) < signals:
                    self._signalled(kind)
            counts = ", ".join(f"{kind} {len(times)}" for kind, times in self.blocked.items())
            print(f"round {len(self.operators)}: signals {counts} of {signals}", file=sys.stderr)
        for device in self._devices.values():
            device.executor.close()

    def _forget(self) -> None:
        for times in self.pieces.values():
            times.clear()
        self.operators.clear()

    def _plain(self) -> None:
        times = operator_times(self._program, self._prompt.steps()[0])
        self.operators.append(times)
        for kind, boundary in (("operator", Boundary.OPERATOR), ("layer", Boundary.LAYER)):
            ends = [stage.boundary >= boundary for stage in self._program.stages]
            self.pieces[kind] += pieces(times, ends, self._lead)
        self.pieces["chunk"] += [Piece(sum(operator_times(self._program, step))) for step in self._steps("chunk")]

    def _signalled(self, kind: str) -> None:
        spacing = SPACING * max(piece.longest_wait for piece in self.pieces[kind][-len(self._program.stages) :])
        device, first = self._devices[kind], self._rng.uniform(0, spacing)
        self.blocked[kind] += device.signalled(self._steps(kind), spacing, first)

    def _steps(self, kind: str) -> list[Step]:
        return self._prompt.steps(self._chunk_tokens if kind == "chunk" else None)

    def operator_ms(self) -> dict[str, float]:
        """Medians in the second layer, since the first qkv_proj also builds the pass."""
        names = [stage.name for stage in self._program.stages]
        return {
            names[at]: round(1e3 * statistics.median(times[at] for times in self.operators), 3) for at in range(5, 10)
        }


def prefill_alone_s(program: OperatorProgram, steps: Callable[[], Sequence[Step]], boundary: Boundary | None) -> float:
    """Seconds of a prefill on a device of its own, after a warm-up.

    Only one such device exists at a time, so that it reuses the memory of the one before. Two at the same time would
    keep separate arenas, and the difference between these would look like the cost of the checks.
    """
    device = TimedExecutor(program, boundary)
    try:
        device.prefill_s(steps())
        return device.prefill_s(steps())
    finally:
        device.executor.close()


def throughput_cost_pct(program: OperatorProgram, prompt: BenchPrompt, pairs: int) -> tuple[float, list[float]]:
    """How much longer a prefill takes with checks at every operator, in per cent, and the ratio of each pair."""
    ratios = []
    for pair in range(pairs):
        order = (Boundary.OPERATOR, None) if pair % 2 else (None, Boundary.OPERATOR)
        seconds = {boundary: prefill_alone_s(program, prompt.steps, boundary) for boundary in order}
        ratios.append(seconds[Boundary.OPERATOR] / seconds[None])
    return 100 * (statistics.median(ratios) - 1), ratios


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(found: Sequence[float], pieces: Pieces) -> dict[str, float]:
    """The figures, in milliseconds."""
    return {
        "p50": round(1e3 * quantile(found, 0.5), 3),
        "p99": round(1e3 * quantile(found, 0.99), 3),
        "mean": round(1e3 * statistics.fmean(found), 3),
        "predicted_p50": round(1e3 * pieces.wait_quantile(0.5), 3),
        "predicted_p99": round(1e3 * pieces.wait_quantile(0.99), 3),
        "predicted_mean": round(1e3 * pieces.mean_wait, 3),
        "signals": len(found),
    }


def ratios(by_boundary: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Mean blocking at coarser boundaries over that at operators, predicted and measured."""
    found = {}
    for kind in ("layer", "chunk"):
        predicted = by_boundary[kind]["predicted_mean"] / by_boundary["operator"]["predicted_mean"]
        measured = by_boundary[kind]["mean"] / by_boundary["operator"]["mean"]
        found[kind] = {
            "predicted": round(predicted, 2),
            "measured": round(measured, 2),
            "within_15_pct": abs(measured / predicted - 1) <= TOLERANCE,
        }
    return found


def table(by_boundary: dict[str, dict[str, float]]) -> str:
    lines = [f"{'blocking, ms':14}{'p50':>9}{'p99':>9}{'mean':>9}{'predicted':>11}{'p50':>9}{'p99':>9}{'signals':>9}"]
    for kind, row in by_boundary.items():
        lines.append(
            f"{kind:14}{row['p50']:>9.2f}{row['p99']:>9.2f}{row['mean']:>9.2f}{row['predicted_mean']:>11.2f}"
            f"{row['predicted_p50']:>9.2f}{row['predicted_p99']:>9.2f}{row['signals']:>9}"
        )
    return "\n".join(lines)


def build(args: argparse.Namespace, folder: Path) -> OperatorProgram:
    folder, _ = random_model(args, folder, args.tokens + 1)
    blocks = -(-args.tokens // BLOCK_SIZE)
    return load_program(
        *(folder, read_config(folder)),
        device=args.device,
        dtype=args.dtype,
        blocks=blocks,
        block_size=BLOCK_SIZE,
        threads=args.threads if args.device == "cpu" else None,
    )


def run(args: argparse.Namespace, program: OperatorProgram) -> dict[str, Any]:
    prompt = BenchPrompt(args.tokens, args.seed, program.model.config.vocab_size)
    measurement = Measurement(program, prompt, args.chunk_tokens, args.seed)
    measurement.run(args.signals)
    found = {kind: summary(measurement.blocked[kind], Pieces(measurement.pieces[kind])) for kind in BOUNDARIES}
    cost, each = throughput_cost_pct(program, prompt, args.pairs)
    return {
        "blocking_ms": found,
        "throughput_cost_pct": round(cost, 3),
        "throughput_pair_ratios": [round(ratio, 4) for ratio in each],
        "ratio_to_operator": ratios(found),
        "operator_ms": measurement.operator_ms(),
        "within_2_pct": cost <= THROUGHPUT_BAR_PCT,
        "setting": {key: value for key, value in vars(args).items() if key not in ("keep", "model_folder")},
        "shape": asdict(SHAPES[args.shape]),
        "machine": f"{machine_name(device_words(args.device))}, torch {torch.__version__}",
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_preempt", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add_shape_options(parser, "thin")
    add("--tokens", type=int, default=768, help="tokens of the prompt that is preempted")
    add("--chunk-tokens", type=int, default=192)
    add("--signals", type=int, default=200, help="signals per boundary")
    add("--pairs", type=int, default=PAIRS, help="alternations of the throughput measurement")
    add("--threads", type=int, default=1, help="threads per operator, on the CPU")
    add("--seed", type=int, default=1)
    add("--keep", action="store_true", help="write the JSON to docs/measurements/preempt/MACHINE.json as well")
    return checked(parser, parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, build(args, Path(folder)))
    print(table(result["blocking_ms"]))
    for kind, row in result["ratio_to_operator"].items():
        print(f"{kind} / operator: measured {row['measured']}, predicted {row['predicted']} (paper, layer: 3.5 to 4.2)")
    print(f"throughput with checks: {result['throughput_cost_pct']:+.2f} % of the prefill time")
    print(json.dumps(result))
    if args.keep:
        keep("preempt", result, device_words(args.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
