"""All that only a GPU can show, in one run within a time limit.

    python -m benchmarks.on_gpu FOLDER --budget 540              # on a machine with a CUDA device
    python -m benchmarks.on_gpu FOLDER --device cpu --budget 300 # the same steps on the CPU, with tiny models

The steps are those of *On a GPU* in `docs/reference/benchmark-methods.md`, the most important first: what the device
is, the tests of the executor, operators suspended by signals, a latency profile, the lengths of operators, weights that
move. The first one that needs the random model writes it (16 GB in FOLDER on CUDA, removed at the end), the others use
it. Each runs in a process of its own with a limit of its own. A step that fails or is late does not stop the others;
one that would begin with less than `LEAST_S` of the budget left is left out.

FOLDER gets NAME.log of each step as it runs and, after each, `steps.json`: for every step its command, outcome, seconds
and the JSON object of its last line. So a run that is cut off leaves what it had found. Ends with a table, then one
line of JSON; the exit status is 0 if all steps passed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.load.trials import note
from benchmarks.servers.engines import stop_on_sigterm

LEAST_S = 10.0  # of the budget, for a step to begin
END_S = 5.0  # from SIGTERM to SIGKILL, for a step that is late
TESTS = "tests/workers/engine/torch"
MODEL = "model"  # in the folder, while the steps run: they use one random model
Outcome = Literal["passed", "failed", "late", "left_out"]

DESCRIBE = """
import json, subprocess, sys, torch
there = torch.cuda.is_available()
found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
found["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
if there:
    ask = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
    found["driver"] = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
print(json.dumps(found))
sys.exit(sys.argv[1] == "cuda" and not there)
"""


class GpuStep(NamedTuple):
    """`command`: after the interpreter. `limit_s`: the most that it may take."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(slots=True)
class StepResult:
    """`result`: the JSON object of the last line that it printed, if there was one."""

    name: str
    command: str
    outcome: Outcome
    seconds: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)


def on_cuda(folder: Path) -> Iterator[GpuStep]:
    model = ("--device", "cuda", "--shape", "llama-8b", "--model-folder", str(folder / MODEL))
    yield GpuStep("device", ("-c", DESCRIBE, "cuda"), 60)
    yield GpuStep("tests", ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-rs", TESTS), 180)
    prompt = ("--tokens", "8192", "--chunk-tokens", "2048", "--signals", "80", "--pairs", "8")
    yield GpuStep("preempt", ("-m", "benchmarks.bench_preempt", *model, *prompt), 150)
    written = ("--output", str(folder / "profile.json"), "--points", str(folder / "points.json"))
    profile = (*written, "--budget", "60")
    yield GpuStep("profile", ("-m", "benchmarks.torch.profile", *model, *profile), 150)
    output = ("--output", str(folder / "operators.json"), "--lengths", "16,64,256,512,1024,2048,4096,8192")
    yield GpuStep("operators", ("-m", "benchmarks.torch.operators", *model, *output), 90)
    yield GpuStep("scaleout", ("-m", "benchmarks.bench_scaleout", *model, "--rounds", "2"), 200)


def on_cpu(folder: Path) -> Iterator[GpuStep]:
    """The same modules, so that a fault of the steps themselves shows without a device."""
    model = ("--device", "cpu", "--shape", "tiny", "--model-folder", str(folder / MODEL))
    yield GpuStep("device", ("-c", DESCRIBE, "cpu"), 60)
    test = f"{TESTS}/test_cuda.py"
    yield GpuStep("tests", ("-m", "pytest", "-m", "torch", "-q", "-p", "no:cacheprovider", "-rs", test), 180)
    few = ("--tokens", "128", "--chunk-tokens", "32", "--signals", "10", "--pairs", "2")
    yield GpuStep("preempt", ("-m", "benchmarks.bench_preempt", *model, *few), 150)
    grid = ("--output", str(folder / "profile.json"), "--budget", "5", "--max-num-seqs", "4", "--batch-tokens", "512")
    yield GpuStep("profile", ("-m", "benchmarks.torch.profile", *model, *grid, "--repeats", "1"), 90)
    short = ("--output", str(folder / "operators.json"), "--lengths", "16,64", "--repeats", "1")
    yield GpuStep("operators", ("-m", "benchmarks.torch.operators", *model, *short), 60)
    yield GpuStep("scaleout", ("-m", "benchmarks.bench_scaleout", *model, "--rounds", "2"), 200)


def last_object(log: Path) -> dict[str, Any]:
    """The JSON object of the last line that is not empty; {} if that is something else."""
    lines = log.read_text(errors="replace").strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def carried_out(task: GpuStep, folder: Path, within_s: float) -> StepResult:
    """Run a step. Its process group ends with it, so nothing of a late one stays on the device."""
    command, log = (sys.executable, *task.command), folder / f"{task.name}.log"
    shown = shlex.join(["python", *("DESCRIBE" if part == DESCRIBE else part for part in task.command)])
    done = StepResult(task.name, shown, "late")
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            done.outcome = "passed" if process.wait(within_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(process)
    done.seconds = round(time.monotonic() - began, 1)
    done.result = last_object(log)
    return done


def end(process: subprocess.Popen[bytes]) -> None:
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(END_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run(tasks: Iterator[GpuStep], folder: Path, budget_s: float) -> list[StepResult]:
    ends, found = time.monotonic() + budget_s, list[StepResult]()
    for task in tasks:
        left = ends - time.monotonic() - END_S
        if left < LEAST_S:
            found.append(StepResult(task.name, "", "left_out"))
        else:
            found.append(carried_out(task, folder, min(task.limit_s, left)))
        note(f"{task.name}: {found[-1].outcome}, {found[-1].seconds:.0f} s")
        (folder / "steps.json").write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for logs and results; made if it does not exist")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--only", help="names of steps, with commas between them (default: all)")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all steps (%(default)s)")
    args = parser.parse_args(argv)
    stop_on_sigterm()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tasks = list((on_cuda if args.device == "cuda" else on_cpu)(folder))
    chosen = [name.strip() for name in args.only.split(",")] if args.only else [task.name for task in tasks]
    if unknown := set(chosen) - {task.name for task in tasks}:
        parser.error(f"--only: no step is called {', '.join(sorted(unknown))}")
    try:
        found = run((task for task in tasks if task.name in chosen), folder, args.budget)
    finally:
        shutil.rmtree(folder / MODEL, ignore_errors=True)
    for each in found:
        print(f"{each.name:10s} {each.outcome:9s} {each.seconds:6.1f} s  {each.command}")
    print(json.dumps({"benchmark": "on_gpu", "device": args.device, "steps": [asdict(each) for each in found]}))
    return 0 if all(each.outcome == "passed" for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
