"""`make bench-vllm-plugin`: vLLM's own queue against the plug-in's, on real servers, answers with a long tail.

One server for each policy, on one core each, all started before the first load; only one is under load at a time, and
the policies take turns on the same arrivals, so that they share whatever the machine does. `attainment` is the share of
requests with TTFT and TPOT met, the median over the rounds, at 1.0 and 1.3 times the knee of fcfs (attainment 0.9).
`priority` is the better of vLLM's priority by class and by deadline. `equal_alone`: greedy answers to the same
requests, one at a time, have the tokens of vLLM's own scheduler. `differing_share`: of the answers in one batch of
concurrent requests, those with other tokens than in a first fcfs run (two runs of fcfs differ too, since batches
differ). `throughput_share`: of the tokens a second of fcfs for that batch.

QUICK=1: one round of 30 s a load, and 40 requests in the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.load.generator import Target, run_plan
from benchmarks.load.knee import find_knee
from benchmarks.load.scoring import Score, score
from benchmarks.load.trials import note, wait_idle
from benchmarks.load.workloads import PlannedArrival, sustained
from benchmarks.servers.engines import (
    MODEL_NAME,
    PLUGIN_ENVIRONMENT,
    RunningEngine,
    plugin_arguments,
    stop_on_sigterm,
    vllm_missing,
    vllm_servers,
)
from benchmarks.vllm.plugin_plan import (
    CONTENDERS,
    FCFS,
    LITTLE_KV,
    LONG_TAIL,
    PLUGINS,
    PluginContender,
    PluginFigures,
    Preempted,
    differing_share,
    pairs,
)

TIMES = (1.0, 1.3)
FIRST_SEED, KNEE_SEED, BATCH_SEED = 4000, 3900, 3800
START_RATE = 4.0  # requests/s, where the search for the knee begins
ALONE = 6
CUTOFF_S = 20.0
ANSWER_S = 300.0
PAIRS = 3
_PREEMPTIONS = re.compile(r"(?m)^vllm:num_preemptions_total(?:\{[^}]*\})? ([0-9.e+]+)")


@contextlib.contextmanager
def servers(
    folder: Path, contenders: Sequence[PluginContender], arguments: Sequence[str] = ()
) -> Iterator[dict[str, RunningEngine]]:
    """By contender, one server for each different setting, all started at once, with further `arguments`."""
    wanted = {
        contender.name: (
            *("--scheduling-policy", contender.scheduling),
            *(() if contender.settings is None else plugin_arguments(contender.settings)),
        )
        for contender in contenders
    }
    settings = list(dict.fromkeys(wanted.values()))
    each = [(*setting, *arguments) for setting in settings]
    with vllm_servers(len(settings), folder, environment=PLUGIN_ENVIRONMENT, each=each) as started:
        yield {name: started[settings.index(setting)] for name, setting in wanted.items()}


class PluginBench:
    """Measures all contenders on their servers."""

    def __init__(self, engines: dict[str, RunningEngine], contenders: Sequence[PluginContender], load_s: float) -> None:
        self.engines, self.contenders, self.load_s = engines, contenders, load_s
        self.plugins = [contender for contender in contenders if contender.settings is not None]
        self.figures = PluginFigures()

    def run(self, contender: PluginContender, plan: Sequence[PlannedArrival]) -> Score:
        url = self.engines[contender.name].url
        wait_idle([url])
        target = Target([url], MODEL_NAME, extra=contender.body)
        return score(run_plan(plan, target, CUTOFF_S), LONG_TAIL, CUTOFF_S)

    def knee(self) -> float:
        def measure(rate: float) -> float:
            found = self.run(FCFS, sustained(LONG_TAIL, rate, KNEE_SEED, self.load_s)).attainment
            note(f"  fcfs at {rate:.2f} requests/s: {found:.3f}")
            return found

        return find_knee(measure, START_RATE, factor=1.25)[0]

    def loads(self, knee: float, rounds: int) -> None:
        for turn in range(rounds):
            for times in TIMES:
                plan = sustained(LONG_TAIL, knee * times, FIRST_SEED + turn, self.load_s)
                first = turn % len(self.contenders)
                for contender in (*self.contenders[first:], *self.contenders[:first]):
                    found = self.run(contender, plan)
                    self.figures.note(f"{times:.1f}", contender.name, found.attainment)
                    classes = " ".join(f"{share:.2f}" for share in found.by_class.values())
                    note(f"  {times:.1f} {contender.name:18} {found.attainment:.3f} [{classes}] {dict(found.outcomes)}")

    def tokens(self, rounds: int, batch: int) -> None:
        """Answers one at a time, and of a batch of concurrent requests."""
        plan = sustained(LONG_TAIL, batch / 10.0, BATCH_SEED, 10.0)[:batch]
        alone = self._batch(FCFS, plan[:ALONE], 1)[0]
        first = self._batch(FCFS, plan, len(plan))[0]
        self.figures.differing["fcfs"] = differing_share(first, self._batch(FCFS, plan, len(plan))[0])
        for contender in self.plugins:
            self.figures.equal_alone[contender.name] = self._batch(contender, plan[:ALONE], 1)[0] == alone
        for _ in range(rounds):
            for contender in (FCFS, *self.plugins):
                answers, seconds = self._batch(contender, plan, len(plan))
                self.figures.seconds.setdefault(contender.name, []).append(seconds)
                if contender is not FCFS:
                    self.figures.differing[contender.name] = differing_share(first, answers)
                note(f"  batch of {len(plan)}: {contender.name:18} {seconds:.1f} s")

    def preempted(self, count: int) -> None:
        """On servers with LITTLE_KV: `count` pairs of requests, each pair at once."""
        asked = pairs(count)
        alone = self._batch(FCFS, [each for pair in asked for each in pair], 1)[0]
        for contender in (FCFS, *self.plugins):
            url = self.engines[contender.name].url
            before = preemptions(url)
            told = [answer for pair in asked for answer in self._batch(contender, pair, 2)[0]]
            found = Preempted(round(preemptions(url) - before), told == alone)
            self.figures.preempted[contender.name] = found
            note(f"  pairs: {contender.name:18} {found.times} preempted, {'equal' if found.equal else 'not equal'}")

    def _batch(
        self, contender: PluginContender, plan: Sequence[PlannedArrival], at_once: int
    ) -> tuple[list[list[int]], float]:
        url = self.engines[contender.name].url
        wait_idle([url])
        started = time.monotonic()
        answers = asyncio.run(_answers(url, contender, plan, at_once))
        return answers, time.monotonic() - started


def preemptions(url: str) -> float:
    """Of the server since its start. Raises RuntimeError without the metric."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        found = _PREEMPTIONS.findall(reply.read().decode())
    if not found:
        raise RuntimeError(f"{url} does not tell its preemptions")
    return sum(map(float, found))


async def _answers(
    url: str, contender: PluginContender, plan: Sequence[PlannedArrival], at_once: int
) -> list[list[int]]:
    seats = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession, arrival: PlannedArrival) -> list[int]:
        body = arrival.body(MODEL_NAME, **contender.body(arrival), return_token_ids=True) | {"stream": False}
        async with seats, session.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{contender.name}: {reply.status} {(await reply.text())[:200]}")
            tokens: list[int] = (await reply.json())["choices"][0]["token_ids"]
            return tokens

    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        return await asyncio.gather(*(one(session, arrival) for arrival in plan))


def table(report: dict[str, Any]) -> str:
    loads = list(report["attainment"])
    lines = [f"{'policy':20}" + "".join(f"{load + ' knees':>12}" for load in loads)]
    for name in report["attainment"][loads[0]]:
        lines.append(f"{name:20}" + "".join(f"{report['attainment'][load][name]:>12.3f}" for load in loads))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_vllm_plugin", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a load lasts")
    parser.add_argument("--batch", type=int, default=80, help="requests of the closed batch")
    parser.add_argument("--knee", type=float, help="requests/s, instead of searching for it")
    names = [contender.name for contender in PLUGINS]
    parser.add_argument("--policies", default=",".join(names), help="only these of the plug-in, comma-separated")
    parser.add_argument(
        "--preempted", action=argparse.BooleanOptionalAction, default=True, help="answers that were preempted"
    )
    arguments = parser.parse_args()
    wanted = arguments.policies.split(",")
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--policies: unknown {unknown[0]!r}; valid: {', '.join(names)}")
    arguments.contenders = [each for each in CONTENDERS if each.settings is None or each.name in wanted]
    return arguments


def main() -> int:
    arguments = parse()
    quick = os.environ.get("QUICK", "") not in ("", "0")
    if (missing := vllm_missing()) is not None:
        print(f"bench-vllm-plugin: {missing}", file=sys.stderr)
        return 1
    stop_on_sigterm()
    started = time.monotonic()
    rounds = 1 if quick else arguments.rounds
    with tempfile.TemporaryDirectory(prefix="slackline-plugin-") as name:
        try:
            with servers(Path(name), arguments.contenders) as engines:
                bench = PluginBench(engines, arguments.contenders, 30.0 if quick else arguments.seconds)
                knee = arguments.knee or bench.knee()
                bench.loads(knee, rounds)
                bench.tokens(rounds, 40 if quick else arguments.batch)
            if arguments.preempted:
                asked = [each for each in arguments.contenders if each is FCFS or each in bench.plugins]
                with servers(Path(name) / "little", asked, LITTLE_KV) as bench.engines:
                    bench.preempted(1 if quick else PAIRS)
        except RuntimeError as error:  # a server that does not start, or no knee
            print(f"bench-vllm-plugin: {error}", file=sys.stderr)
            return 1
    report = {**bench.figures.report(), "knee": round(knee, 3), "rounds": rounds, "quick": quick}
    report["seconds"] = round(time.monotonic() - started)
    print(table(report))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
